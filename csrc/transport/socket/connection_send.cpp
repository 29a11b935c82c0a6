// The order of what leaves: control, then class by class; inside a class as posted.
#include <algorithm>

#include "base/fault.h"
#include "base/text.h"
#include "transport/socket/connection.h"

namespace kvcore::transport {
namespace {

constexpr std::size_t kOutboxBytes = 256UL * 1024;  // built ahead of the socket
constexpr std::size_t kRoundBytes = 4096UL * 1024;  // then other links have their turn
constexpr std::size_t kBulkBytes = 256UL * 1024;    // both, of a lower class
constexpr std::uint64_t kTcpChunk = 256UL * 1024;   // its checksum and its copy meet in L2
// Twice what two sides with the most operations can owe each other.
constexpr std::size_t kMaxControl = 262144;
constexpr std::uint64_t kShmChunk = 16384UL * 1024;

}  // namespace

void Connection::control(Lane& lane, FrameType type, std::vector<std::byte> body,
                         Priority priority) {
  OutFrame frame{type, priority};
  frame.body = std::move(body);
  lane.control.push_back(std::move(frame));
  if (lane.control.size() > kMaxControl)
    fail(Error{ErrorCode::kTransport, text("the peer takes no answers: ", kMaxControl, " wait")});
}

void Connection::pump(Lane& lane, std::int64_t now) {
  std::size_t sent = 0;
  if (lane.number == 0) pace_until_ = 0;
  lane.more = false;
  if (!lane.fd || lane.state == Lane::State::kConnecting) return;
  const bool bulk = lane.number > 0;
  const std::size_t ahead = bulk ? kBulkBytes : kOutboxBytes;
  while (sent < (bulk ? kBulkBytes : kRoundBytes)) {
    while (lane.outbox.bytes() < ahead && build_next(lane, now)) {
    }
    if (lane.outbox.empty()) return;
    const auto n = lane.outbox.flush(lane.fd.get(), ahead);
    if (!n) {
      if (dial_again(lane, now)) return;
      lane.hung_up = true;
      receive(lane, now);  // what it said before its end, a goodbye perhaps
      return fail(n.error());
    }
    if (*n > 0) last_tx_ns_ = now;
    sent += *n;
    if (lane.outbox.blocked()) return;
  }
  lane.more = true;
}

bool Connection::build_next(Lane& lane, std::int64_t now) {
  if (lane.state != Lane::State::kUp || (state_ != State::kUp && state_ != State::kClosing))
    return false;
  if (!lane.control.empty()) {
    lane.outbox.push(&*lane.auth, std::move(lane.control.front()));
    lane.control.pop_front();
    return true;
  }
  if (announce_credits(lane)) return true;
  const bool all = num_lanes_ == 1;
  for (std::size_t c = all ? 0 : lane.number; c <= (all ? kNumPriorities - 1 : lane.number); ++c) {
    bool built = false;
    if (!build_from(lane, &tx_[c], static_cast<Priority>(c), now, &built)) return built;
  }
  return false;
}

// Returns whether the next class may be looked at: nothing is left here.
bool Connection::build_from(Lane& lane, std::deque<TxItem>* queue, Priority priority,
                            std::int64_t now, bool* built) {
  while (!queue->empty()) {
    TxItem& item = queue->front();
    if (item.kind == TxItem::Kind::kMessage) {
      const std::uint64_t head = item.op == 0 ? 0 : sizeof(OpHead);
      if (!credits_.may_send(cost_of(head + item.message.size(), 0), priority, now)) return false;
      OutFrame frame{FrameType::kMessage, priority};
      link_->queued_message_bytes -= item.message.size();
      if (item.op != 0) frame.flags |= kFlagAnswer;
      frame.body = item.op == 0
                       ? std::move(item.message)
                       : make_body(OpHead{item.op}, std::span<const std::byte>(item.message));
      queue->pop_front();
      push_charged(lane, std::move(frame));
      *built = true;
      return false;
    }
    Op* op = item.kind == TxItem::Kind::kOp ? find_op(item.op) : nullptr;
    const bool gone = item.kind == TxItem::Kind::kOp ? op == nullptr || op->giving_up
                                                     : !serving_.contains(item.op);
    if (gone) {
      queue->pop_front();
      continue;
    }
    if (op != nullptr && op->is_read) {
      const std::uint64_t body = sizeof(ReadHead) + op->segments.size() * sizeof(Range);
      if (!credits_.may_send(cost_of(body, 0), priority, now)) return false;
      push_read_request(lane, op, priority);
      queue->pop_front();
      *built = true;
      return false;
    }
    const std::int64_t ready = pacer_.ready_ns(now);
    if (ready > now) {
      pace_until_ = ready;
      return false;
    }
    bool finished = false;
    if (op != nullptr) {
      const std::uint64_t limit = credit_for_chunk(*op, priority, now);
      if (limit == 0) return false;
      push_chunk(lane, op, priority, limit);
      finished = op->done == op->bytes;
    } else {
      finished = push_serve_chunk(lane, item.op, priority);
    }
    if (finished) queue->pop_front();
    *built = true;
    return false;
  }
  return true;
}

void Connection::push_read_request(Lane& lane, Op* op, Priority priority) {
  std::vector<Range> ranges;
  ranges.reserve(op->segments.size());
  for (const Segment& s : op->segments) ranges.push_back({s.remote_offset, s.bytes});
  OutFrame frame{op->borrows ? FrameType::kBorrow : FrameType::kReadRequest, priority};
  frame.body =
      make_body(ReadHead{op->id, op->grant, ranges.size()}, std::span<const Range>(ranges));
  op->started = true;
  push_charged(lane, std::move(frame));
}

// The next pieces of a write: at most a chunk, each inside one segment.
void Connection::push_chunk(Lane& lane, Op* op, Priority priority, std::uint64_t credit) {
  const std::uint64_t limit = std::min(credit, pacer_.chunk_bytes(shm() ? kShmChunk : kTcpChunk));
  OutFrame frame{FrameType::kWrite, priority};
  std::vector<Piece> pieces;
  std::uint64_t total = 0;
  while (total < limit && pieces.size() < kMaxPieces && op->segment < op->segments.size()) {
    const Segment& s = op->segments[op->segment];
    const std::uint64_t n = std::min(limit - total, s.bytes - op->segment_done);
    const std::uint64_t local = s.local_offset + op->segment_done;
    Piece piece{s.remote_offset + op->segment_done, n, local};
    if (!shm()) {
      piece.source = op->options.checksum ? xxh3_64(op->base + local, n) : 0;
      frame.payload.push_back({op->base + local, n});
    }
    pieces.push_back(piece);
    total += n;
    op->segment_done += n;
    if (op->segment_done == s.bytes) {
      ++op->segment;
      op->segment_done = 0;
    }
  }
  op->done += total;
  op->started = true;
  link_->queued_bytes -= total;
  pacer_.spend(total);
  if (op->done == op->bytes) frame.flags |= kFlagLast;
  if (!op->options.checksum) frame.flags |= kFlagUnchecked;
  if (!op->options.notify) frame.flags |= kFlagQuiet;
  const WriteHead head{op->id, op->grant, op->tag, static_cast<std::uint32_t>(op->region),
                       static_cast<std::uint32_t>(pieces.size())};
  frame.body = make_body(head, std::span<const Piece>(pieces));
  frame.op = op->id;
  if (!shm() && fails(io_->shared.options.faults, "transport.flip_payload")) {
    for (const iovec& v : frame.payload) {
      const auto* p = static_cast<const std::byte*>(v.iov_base);
      frame.owned.insert(frame.owned.end(), p, p + v.iov_len);
    }
    frame.owned[frame.owned.size() / 2] ^= std::byte{1};
    frame.payload.assign(1, iovec{frame.owned.data(), frame.owned.size()});
  }
  push_charged(lane, std::move(frame));
}

// tcp: the next bytes of a read we serve, copied while the grant holds. Returns whether it is over.
bool Connection::push_serve_chunk(Lane& lane, std::uint64_t id, Priority priority) {
  Serve& serve = serving_.at(id);
  const std::uint64_t limit = pacer_.chunk_bytes(kTcpChunk);
  std::vector<Range> ranges;
  std::uint64_t total = 0;
  while (total < limit && ranges.size() < kMaxPieces && serve.range < serve.ranges.size()) {
    const Range& r = serve.ranges[serve.range];
    const std::uint64_t n = std::min(limit - total, r.bytes - serve.range_done);
    ranges.push_back({r.offset + serve.range_done, n});
    total += n;
    serve.range_done += n;
    if (serve.range_done == r.bytes) {
      ++serve.range;
      serve.range_done = 0;
    }
  }
  OutFrame frame{FrameType::kReadData, priority};
  frame.owned.reserve(total);
  std::vector<DataPiece> pieces;
  Status status = io_->shared.grants.with_ranges(
      serve.grant, Rights::kRead, ranges, now_ns(), peer_.identity,
      [&](std::span<std::byte* const> places) {
        for (std::size_t i = 0; i < places.size(); ++i) {
          pieces.push_back({ranges[i].bytes, xxh3_64(places[i], ranges[i].bytes)});
          frame.owned.insert(frame.owned.end(), places[i], places[i] + ranges[i].bytes);
        }
      });
  bool over = !status.ok() || serve.range == serve.ranges.size();
  if (status.ok()) {
    pacer_.spend(total);
    link_->bytes_out += total;
    if (over) frame.flags |= kFlagLast;
    frame.body = make_body(OpHead{id}, std::span<const DataPiece>(pieces));
    frame.payload.assign(1, iovec{frame.owned.data(), frame.owned.size()});
    lane.outbox.push(&*lane.auth, std::move(frame));
  }
  if (over) {
    OutFrame result{FrameType::kResult, priority};
    result.body = make_result(id, status);
    lane.outbox.push(&*lane.auth, std::move(result));
    end_serve(id);
  }
  return over;
}

}  // namespace kvcore::transport
