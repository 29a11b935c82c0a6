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

void Connection::on_credit(Bytes body) {
  const auto credit = parse_head<Credit>(body);
  if (!credit) return fail(credit.error());
  if (const Status status = credits_.on_announced(*credit); !status) fail(status);
}

bool Connection::announce_credits(Lane& lane) {
  if (lane.number != 0 || !credits_.due()) return false;
  for (const Lane& l : lanes_)
    if (l.control.size() > kMaxUnsentControl) return false;
  OutFrame frame{FrameType::kCredit};
  frame.body = make_body(credits_.announce());
  lane.outbox.push(&*lane.auth, std::move(frame));
  return true;
}

// How many bytes the next chunk of a write may have; 0 = none now.
std::uint64_t Connection::credit_for_chunk(const Op& op, Priority priority, std::int64_t now) {
  const std::size_t pieces = std::min(kMaxPieces, op.segments.size() - op.segment);
  const std::uint64_t head = cost_of(sizeof(WriteHead) + pieces * sizeof(Piece), 0);
  const std::uint64_t least = shm() ? 0 : std::min(kLeastChunk, op.bytes - op.done);
  if (!credits_.may_send(head + least, priority, now)) return 0;
  if (shm()) return std::numeric_limits<std::uint64_t>::max();
  const std::uint64_t available = credits_.available(priority);
  return std::max(least, available - std::min(available, head));
}

void Connection::push_charged(Lane& lane, OutFrame frame) {
  std::uint64_t payload = 0;
  for (const iovec& v : frame.payload) payload += v.iov_len;
  credits_.spend(cost_of(frame.body.size(), payload));
  lane.outbox.push(&*lane.auth, std::move(frame));
}

}  // namespace kvcore::transport
