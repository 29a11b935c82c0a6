// Credits of a link on its sockets: charging what leaves, announcing what was given back.
#include <algorithm>
#include <limits>

#include "transport/socket/connection.h"

namespace kvcore::transport {
namespace {

// An announcement stands behind what a peer must have read before: one that never reads gets none.
constexpr std::size_t kMaxUnsentControl = 1024;
constexpr std::uint64_t kLeastChunk = 16UL * 1024;  // smaller pieces of a write are not worth it

}  // namespace

void Connection::open_credits() {
  io_->shared.links_up += 1;
  send_window_.open({peer_.window, 0});
  link_->credit_bytes = send_window_.available(true);
}

void Connection::on_credit(Bytes body) {
  const auto credit = parse_head<Credit>(body);
  if (!credit) return fail(credit.error());
  if (!send_window_.plausible(*credit))
    return fail(Error{ErrorCode::kCorrupt, "the peer announces credits for what was not sent"});
  send_window_.open(*credit);
  link_->credit_bytes = send_window_.available(true);
}

// Takes what polls have given back, and asks for a wake-up when they have given back enough.
void Connection::collect_polled() {
  if (!was_up_) return;
  receive_window_.resize(io_->shared.window_of(io_->shared.links_up));
  PollCredit& credit = *link_->poll_credit;
  for (;;) {
    const std::uint64_t polled = credit.polled.load();
    receive_window_.give_back(polled - polled_seen_);
    polled_seen_ = polled;
    const std::uint64_t missing = receive_window_.until_due();
    credit.wake_at = missing == 0 ? PollCredit::kNever : polled + missing;
    if (missing == 0 || credit.polled.load() == polled) return;  // else: polled in between
  }
}

bool Connection::announce_credits(Lane& lane) {
  if (lane.number != 0 || receive_window_.until_due() > 0) return false;
  for (const Lane& l : lanes_)
    if (l.control.size() > kMaxUnsentControl) return false;
  OutFrame frame{FrameType::kCredit};
  frame.body = make_body(receive_window_.announce());
  lane.outbox.push(&*lane.auth, std::move(frame));
  return true;
}

bool Connection::may_send(std::uint64_t cost, Priority priority, std::int64_t now) {
  const bool fits = send_window_.fits(cost, priority == Priority::kStream);
  if (fits && link_->stalled_since_ns != 0) {
    link_->credit_stall_ns += static_cast<std::uint64_t>(now - link_->stalled_since_ns);
    link_->stalled_since_ns = 0;
  } else if (!fits && link_->stalled_since_ns == 0) {
    link_->stalled_since_ns = now;
  }
  return fits;
}

// How many bytes the next chunk of a write may have; 0 = none now.
std::uint64_t Connection::credit_for_chunk(const Op& op, Priority priority, std::int64_t now) {
  const std::size_t pieces = std::min(kMaxPieces, op.segments.size() - op.segment);
  const std::uint64_t head = cost_of(sizeof(WriteHead) + pieces * sizeof(Piece), 0);
  const std::uint64_t least = shm() ? 0 : std::min(kLeastChunk, op.bytes - op.done);
  if (!may_send(head + least, priority, now)) return 0;
  if (shm()) return std::numeric_limits<std::uint64_t>::max();
  const std::uint64_t available = send_window_.available(priority == Priority::kStream);
  return std::max(least, available - std::min(available, head));
}

void Connection::push_charged(Lane& lane, OutFrame frame) {
  std::uint64_t payload = 0;
  for (const iovec& v : frame.payload) payload += v.iov_len;
  send_window_.spend(cost_of(frame.body.size(), payload));
  link_->credit_bytes = send_window_.available(true);
  lane.outbox.push(&*lane.auth, std::move(frame));
}

}  // namespace kvcore::transport
