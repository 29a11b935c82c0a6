// Sender: the state machine of one outgoing hand-over. Sans-I/O like Receiver: told what happened,
// it answers with actions. Bytes leave in the order they were published, at most max_inflight_bytes
// of them unacknowledged; publishing itself never waits.
//
//   connecting --up--> streaming --commit sent--> committed --done--> done
//        \________________\_____________\__abort, down, deadline, refusal--> failed
//
// A write refused as Stale means that the receiver has ended the hand-over; its message with the
// reason is under way, so the sender waits kReasonGraceNs for it before it fails with Stale.
// Invariants: ReleasePages exactly once, after the state is done or failed and every posted write
// has its completion (until then the link may still read the pages); exactly one Ended event.
// Thread rules: none (one thread). Units: bytes, nanoseconds.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <variant>
#include <vector>

#include "base/result.h"
#include "stream/message.h"
#include "stream/run.h"
#include "transport/link.h"

namespace kvcore::stream {

inline constexpr std::int64_t kReasonGraceNs = 200'000'000;

struct SenderLimits {
  std::int64_t max_inflight_bytes = std::int64_t{16} << 20;  // of one hand-over
  // Of one write; at least one slice. Where little waits writes are smaller (kShareOfQueue).
  std::int64_t max_write_bytes = std::int64_t{1} << 20;
};

// A write takes at most this share of what waits: while the link keeps pace with the prefill, most
// of a layer's chunk has arrived and is counted before the last of it leaves; a backlog goes in
// large writes.
inline constexpr std::int64_t kShareOfQueue = 8;
inline constexpr std::int64_t kLeastWriteBytes = std::int64_t{64} << 10;

class Sender {
 public:
  enum class State { kConnecting, kStreaming, kCommitted, kDone, kFailed };

  struct Send {
    StreamMessage message;
  };
  struct CancelWrite {
    transport::OpId op;
  };
  struct ReleasePages {};
  struct Ended {
    Status status;
    std::int64_t bytes;
  };
  using Action = std::variant<Send, CancelWrite, ReleasePages, Ended>;

  Sender(const RequestId& id, const Shape& shape, transport::GrantRef grant, HostId host,
         std::int64_t deadline_ns, SenderLimits limits, bool makes_sums = true);

  void on_up();
  // Runs come validated: inside the shape, each slice once.
  void publish(const SliceRun& run);
  void mark(std::int64_t at_ns);
  void commit(std::vector<std::byte> payload, std::int64_t at_ns);
  void abort(Error error);

  // The next write to post, if the limits and the state allow one: slots that are all open or all
  // sealed. The owner answers with on_posted or on_refused before asking again.
  std::optional<SliceRun> next_write();
  void on_posted(transport::OpId op, const SliceRun& run);
  void on_refused(Error error);
  void on_completion(transport::OpId op, const Status& status, std::int64_t now_ns);
  void on_message(const StreamMessage& message);
  void on_down(const Error& error);
  void on_time(std::int64_t now_ns);

  std::vector<Action> take_actions();
  State state() const noexcept { return state_; }
  bool ended() const noexcept { return state_ >= State::kDone; }
  // Nothing is left to happen: the owner may forget it.
  bool finished() const noexcept { return ended() && released_ && !farewell_; }
  const Status& status() const noexcept { return status_; }
  std::int64_t acked_bytes() const noexcept { return acked_bytes_; }
  std::int64_t inflight_bytes() const noexcept { return inflight_bytes_; }
  std::int64_t deadline_ns() const noexcept { return deadline_ns_; }
  const RequestId& id() const noexcept { return id_; }
  transport::GrantRef grant() const noexcept { return grant_; }
  const Shape& shape() const noexcept { return shape_; }

 private:
  void commit_if_sent();
  void end(State state, Status status);
  void release_if_idle();
  std::int64_t take_slots(const SliceRun& from, std::int64_t max_bytes) const;
  StreamMessage message(MessageKind kind) const {
    return {.kind = kind, .request_id = id_, .grant = grant_};
  }

  const RequestId id_;
  const Shape shape_;
  const transport::GrantRef grant_;
  const HostId host_;
  std::int64_t deadline_ns_;
  const SenderLimits limits_;
  const bool makes_sums_;
  State state_ = State::kConnecting;
  Status status_;
  bool up_ = false;
  bool released_ = false;
  std::deque<SliceRun> queue_;
  std::map<transport::OpId, std::int64_t> inflight_;  // bytes of each posted write
  std::int64_t inflight_bytes_ = 0;
  std::int64_t acked_bytes_ = 0;
  std::int64_t queued_bytes_ = 0;  // of queue_
  std::int64_t posted_slices_ = 0;
  std::optional<Error> revoked_;           // the grant is gone; the receiver's message says why
  std::optional<StreamMessage> farewell_;  // abort before up: the receiver is told when up
  std::optional<StreamMessage> mark_;      // waits for up
  std::optional<StreamMessage> commit_;    // waits until every slice is posted
  std::vector<Action> actions_;
};

}  // namespace kvcore::stream
