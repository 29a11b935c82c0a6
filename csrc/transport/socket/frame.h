// Frames of the socket links (tcp, shm): control in authenticated bodies, payload (tcp only)
// behind.
//
//   frame  = prefix 16 | body | MAC 16 | payload
//   prefix = "KVTL" | type u8 | priority u8 | flags u16 | body bytes u32 | payload bytes u32
//
// The MAC (AuthSession) covers prefix and body; payload is covered by the xxh3-64 of each piece,
// which stand in the body: accidents are found, a forger on the path of the payload is not kept
// out. All integers little endian. The parsers are total: a body that is not exactly what its type
// says is Corrupt, and nothing is allocated beyond what was received. Thread rules: pure functions.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "base/auth_session.h"
#include "base/result.h"
#include "transport/core/credit_window.h"
#include "transport/link.h"

namespace kvcore::transport {

enum class FrameType : std::uint8_t {
  kPing = 1,     // keep-alive; no body
  kMessage,      // body = the message (kFlagAnswer: behind an OpHead)
  kWrite,        // a chunk of a write: WriteHead, Piece*; tcp: payload, shm: where to pull from
  kResult,       // ResultHead, text: the owner's verdict on a write or read
  kAbort,        // OpHead: the initiator gives an operation up; shm: a kResult answers
  kReadRequest,  // ReadHead, Range*
  kReadData,     // tcp: OpHead, DataPiece*, payload: the next bytes of a read
  kReadGo,       // shm: GoHead: the reader may pull
  kReadDone,     // shm: OpHead: it has pulled; kResult says whether the grant still stood
  kRegion,       // shm: RegionHead and a descriptor by SCM_RIGHTS
  kRegionGone,   // shm: RegionHead
  kCredit,       // Credit: what the peer may send
  kBye,          // last frame of a lane closed in order; on lane 0 ByeHead: where others follow
  kBorrow,       // shm: ReadHead, Range*: may they be read where they lie?
  kLent,         // shm: LentHead: they may
  kGiveBack,     // shm: OpHead: they are not read any more, or not wanted after all
};
inline constexpr std::uint8_t kLastFrameType = static_cast<std::uint8_t>(FrameType::kGiveBack);

inline constexpr std::uint16_t kFlagLast = 1;       // kWrite, kReadData: the operation's last chunk
inline constexpr std::uint16_t kFlagUnchecked = 2;  // the pieces carry no checksum
inline constexpr std::uint16_t kFlagAnswer = 4;  // kMessage: begins with an OpHead, kResult follows
inline constexpr std::uint16_t kFlagQuiet = 8;   // kWrite: no Arrival
inline constexpr std::uint16_t kAllFlags = 15;
inline constexpr std::size_t kMacBytes = 16;
inline constexpr std::size_t kMaxPieces = 1024;  // of one chunk
inline constexpr std::size_t kMaxBodyBytes = kMaxMessageBytes + 4096;
inline constexpr std::size_t kMaxResultText = 1000;  // of a kResult
inline constexpr std::size_t kMaxPayloadBytes = 1024UL * 1024;

struct FramePrefix {
  std::array<char, 4> magic{'K', 'V', 'T', 'L'};
  std::uint8_t type = 0;
  std::uint8_t priority = 0;
  std::uint16_t flags = 0;
  std::uint32_t body_bytes = 0;
  std::uint32_t payload_bytes = 0;
};
static_assert(sizeof(FramePrefix) == 16);

struct WriteHead {
  std::uint64_t op;
  GrantRef grant;
  std::uint64_t tag;
  std::uint32_t region;  // shm: the sender's region to pull from
  std::uint32_t num_pieces;
};
struct Piece {
  std::uint64_t remote_offset;
  std::uint64_t bytes;
  std::uint64_t source;  // tcp: xxh3-64 of the bytes; shm: their offset in the sender's region
};
struct ResultHead {
  std::uint64_t op;
  std::uint64_t code;  // 0 = ok, else ErrorCode + 1
};
struct OpHead {
  std::uint64_t op;
};
struct ReadHead {
  std::uint64_t op;
  GrantRef grant;
  std::uint64_t num_ranges;
};
struct DataPiece {
  std::uint64_t bytes;
  std::uint64_t checksum;
};
struct GoHead {
  std::uint64_t op;
  std::uint64_t region;
};
struct LentHead {
  std::uint64_t op;  // of the kBorrow, and the lease's number from here on
  std::uint64_t region;
  std::int64_t expires_ns;  // 0 = never
};
struct ByeHead {
  std::uint64_t lanes;  // bit n: lane n ends with a bye of its own
};
struct RegionHead {
  std::uint64_t region;
  std::uint64_t bytes;
};

// A body put together from a head, a table and text.
template <class Head, class Item = std::byte>
std::vector<std::byte> make_body(const Head& head, std::span<const Item> items = {}) {
  std::vector<std::byte> body(sizeof head + items.size_bytes());
  std::memcpy(body.data(), &head, sizeof head);
  if (!items.empty()) std::memcpy(body.data() + sizeof head, items.data(), items.size_bytes());
  return body;
}

// What a frame costs of the receiver's credits: the same for both sides.
inline bool costs(FrameType type) {
  return type == FrameType::kMessage || type == FrameType::kWrite ||
         type == FrameType::kReadRequest || type == FrameType::kBorrow;
}
inline std::uint64_t cost_of(std::uint64_t body_bytes, std::uint64_t payload_bytes) {
  return kFrameCost + body_bytes + payload_bytes;
}
inline constexpr std::uint64_t kMaxFrameCost = kFrameCost + kMaxBodyBytes + kMaxPayloadBytes;

// Magic, type, priority and sizes; `shm` links carry no payload. message_head: what a kMessage may
// have before the message itself, beside an OpHead.
Status check_prefix(const FramePrefix& prefix, bool shm, std::size_t message_head = 0);

struct WriteFrame {
  WriteHead head;
  std::vector<Piece> pieces;
};
struct DataFrame {
  OpHead head;
  std::vector<DataPiece> pieces;
};
struct ReadFrame {
  ReadHead head;
  std::vector<Range> ranges;
};
struct ResultFrame {
  ResultHead head;
  Status status;
};
Result<WriteFrame> parse_write(const FramePrefix& prefix, Bytes body, bool shm);
Result<DataFrame> parse_data(const FramePrefix& prefix, Bytes body);
Result<ReadFrame> parse_read(Bytes body);
Result<ResultFrame> parse_result(Bytes body);
std::vector<std::byte> make_result(std::uint64_t op, const Status& status);

// A body that is exactly one head.
template <class Head>
Result<Head> parse_head(Bytes body) {
  if (body.size() != sizeof(Head)) return Error{ErrorCode::kCorrupt, "frame body of a wrong size"};
  Head head;
  std::memcpy(&head, body.data(), sizeof head);
  return head;
}

}  // namespace kvcore::transport
