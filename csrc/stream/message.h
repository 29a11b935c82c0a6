// The small two-sided messages of a hand-over; bulk bytes travel by tagged one-sided writes.
//   sender -> receiver   open (who, with which grant), mark (attention of the last layer ended),
//                        commit (nothing more comes; payload), sender_abort,
//                        sums (of a run that comes without slice headers)
//   receiver -> sender   done (complete), receiver_abort
// Each names the request and the transport's grant, which tells the shares of one hand-over apart.
// Thread rules: plain values. Units: nanoseconds of the sender's CLOCK_MONOTONIC.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/result.h"
#include "stream/grant.h"
#include "stream/run.h"

namespace kvcore::stream {

enum class MessageKind : std::uint8_t {
  kOpen = 1,
  kMark = 2,
  kCommit = 3,
  kSenderAbort = 4,
  kDone = 5,
  kReceiverAbort = 6,
  kSums = 7,
};

struct StreamMessage {
  MessageKind kind = MessageKind::kOpen;
  RequestId request_id{};
  transport::GrantRef grant{};             // all
  HostId host{};                           // open: of the sender
  std::int64_t at_ns = 0;                  // mark: end of attention; commit: when it was given
  std::int64_t acked_bytes = 0;            // mark: bytes known to have arrived by then
  ErrorCode code = ErrorCode::kCancelled;  // aborts
  std::string reason{};                    // aborts
  std::vector<std::byte> payload{};        // commit
  bool makes_sums = false;                 // open: slices, or runs without headers, are summed
  SliceRun run{};                          // sums
  std::vector<std::uint64_t> sums{};       // sums: xxh3-64 of each slot's bytes as they are sent

  std::vector<std::byte> encode() const;
  static Result<StreamMessage> decode(std::span<const std::byte> bytes);
};

inline constexpr std::size_t kMaxPayloadBytes = std::size_t{256} << 10;
inline constexpr std::int32_t kMaxSumsPerMessage = kMaxSlots;
inline constexpr std::size_t kMaxReasonBytes = 1024;

}  // namespace kvcore::stream
