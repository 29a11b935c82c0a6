// shm: lending and borrowing where bytes lie. One frame asks, one answers, one gives back.
#include "base/text.h"
#include "transport/socket/connection.h"

namespace kvcore::transport {
namespace {
Error corrupt(std::string message) { return {ErrorCode::kCorrupt, std::move(message)}; }
}  // namespace

// ---- the lender

void Connection::on_borrow(Lane& lane, const FramePrefix& prefix, Bytes body) {
  const auto frame = parse_read(body);
  if (!frame) return fail(frame.error());
  const std::uint64_t op = frame->head.op;
  Leases& leases = io_->shared.leases;
  if (leases.contains(link_->id, op))
    return fail(corrupt(text("the peer asks twice for lease ", op)));
  const Leases::Borrower to{link_->id, peer_.identity, link_->process, link_->poll_credit,
                            kFrameCost};
  const auto lent = leases.lend(to, op, frame->head.grant, frame->ranges, now_ns());
  credits_.give_back(cost_of(prefix.body_bytes, 0) - (lent ? kFrameCost : 0));
  if (!lent) return control(lane, FrameType::kResult, make_result(op, lent.error()));
  // The command that tells of a fresh region may still be on its way.
  if (const auto view = io_->shared.grants.region(lent->region))
    announce_region(lent->region, *view);
  control(lane, FrameType::kLent,
          make_body(LentHead{op, static_cast<std::uint32_t>(lent->region), lent->expires_ns}));
}

void Connection::on_give_back(Bytes body) {
  const auto head = parse_head<OpHead>(body);
  if (!head) return fail(head.error());
  io_->shared.leases.give_back(link_->id, head->op);  // it may have expired meanwhile
}

// ---- the borrower

void Connection::on_lent(Bytes body) {
  const auto head = parse_head<LentHead>(body);
  if (!head) return fail(head.error());
  const Op* op = find_op(head->op);
  if (op == nullptr || !op->borrows) return;  // given up, and given back with that
  const auto region = peer_regions_.find(head->region);
  if (region == peer_regions_.end())
    return fail(
        corrupt(text("the peer lends of region ", head->region, ", which it never shared")));
  Borrowed out{link_->id, OpId{head->op}, LeaseId{head->op}, {}, region->second, head->expires_ns,
               {}};
  out.spans.reserve(op->segments.size());
  for (const Segment& s : op->segments) {
    if (!range_inside(s.remote_offset, s.bytes, region->second->bytes()))
      return fail(corrupt("the peer lends bytes outside the region that it shares"));
    out.spans.emplace_back(region->second->data() + s.remote_offset, s.bytes);
  }
  borrowed_.insert(head->op);
  end_borrow(std::move(out));
}

void Connection::end_borrow(Borrowed borrowed) {
  const auto it = ops_.find(static_cast<std::uint64_t>(borrowed.op));
  if (it->second->options.deadline_ns != 0)
    deadlines_.erase({it->second->options.deadline_ns, it->first});
  ops_.erase(it);
  link_->outstanding -= 1;
  io_->shared.events.push(std::move(borrowed));
}

void Connection::give_back(std::uint64_t lease) {
  if (borrowed_.erase(lease) > 0)
    control(lanes_[0], FrameType::kGiveBack, make_body(OpHead{lease}));
}

}  // namespace kvcore::transport
