#include "transport/core/leases.h"

#include <algorithm>
#include <limits>

#include "base/text.h"

namespace kvcore::transport {
namespace {
constexpr std::int64_t kLookNs = 20'000'000;  // at processes whose link is gone
}

Result<std::vector<Segment>> segments_to_borrow(std::span<const Range> ranges) {
  if (ranges.empty() || ranges.size() > kMaxSegments)
    return invalid_argument(
        text("ranges: ", ranges.size(), " given, must be in [1, ", kMaxSegments, "]"));
  const std::uint64_t most = kMaxOpBytes / ranges.size();
  std::vector<Segment> segments;
  segments.reserve(ranges.size());
  for (const Range& r : ranges) {
    if (r.bytes == 0 || r.bytes > most)
      return invalid_argument(
          text("range offset=", r.offset, " bytes=", r.bytes, " must have [1, ", most, "] bytes"));
    segments.push_back({0, r.offset, r.bytes});
  }
  return segments;
}

Result<GrantTable::Lent> Leases::lend(const Borrower& to, std::uint64_t lease, GrantRef grant,
                                      std::span<const Range> ranges, std::int64_t now) {
  if (!to.process)
    return Error{ErrorCode::kUnsupported,
                 "the borrower's process cannot be watched (another pid namespace?): its death "
                 "would go unseen, so nothing is lent to it"};
  const auto link = static_cast<std::uint64_t>(to.link);
  const auto count = per_link_.find(link);
  if (count != per_link_.end() && count->second >= kMaxLeases)
    return Error{ErrorCode::kTransport, text("kMaxLeases=", kMaxLeases, " are out on this link")};
  KVCORE_ASSIGN_OR_RETURN(const GrantTable::Lent lent,
                          grants_.lend(grant, ranges, now, to.identity));
  const Key key{link, lease};
  out_.emplace(key, Lease{grant, lent.expires_ns, to.process, to.poll_credit, to.cost});
  ++per_link_[link];
  if (lent.expires_ns != 0) expiries_.emplace(lent.expires_ns, key);
  return lent;
}

Leases::Out::iterator Leases::end_lease(Out::iterator it, Status status) {
  const Key key = it->first;
  const Lease lease = std::move(it->second);
  const auto next = out_.erase(it);
  expiries_.erase({lease.expires_ns, key});
  unlinked_.erase(key);
  if (const auto count = per_link_.find(key.first); --count->second == 0) per_link_.erase(count);
  const bool fenced = grants_.take_back(lease.grant);  // who has polled Returned may revoke at once
  events_.push(Returned{LinkId{key.first}, lease.grant, LeaseId{key.second}, std::move(status)},
               lease.poll_credit, lease.cost);
  if (fenced) events_.push(Fenced{lease.grant});
  return next;
}

void Leases::give_back(LinkId link, std::uint64_t lease) {
  const auto it = out_.find({static_cast<std::uint64_t>(link), lease});
  if (it != out_.end()) end_lease(it, {});
}

void Leases::link_ended(LinkId link, bool in_order) {
  const auto id = static_cast<std::uint64_t>(link);
  for (auto it = out_.lower_bound({id, 0}); it != out_.end() && it->first.first == id;) {
    if (in_order || it->second.process->ended()) {
      it = end_lease(it, {});
    } else {
      unlinked_.insert(it->first);
      ++it;
    }
  }
}

void Leases::work(std::int64_t now) {
  while (!expiries_.empty() && expiries_.begin()->first <= now)
    end_lease(out_.find(expiries_.begin()->second),
              Error{ErrorCode::kTimeout, "the lease expired before it was given back"});
  for (auto it = unlinked_.begin(); it != unlinked_.end();) {
    const auto lease = out_.find(*it++);  // its end takes it out of unlinked_
    if (lease->second.process->ended()) end_lease(lease, {});
  }
}

std::int64_t Leases::next_timer_ns(std::int64_t now) const {
  std::int64_t next = std::numeric_limits<std::int64_t>::max();
  if (!expiries_.empty()) next = expiries_.begin()->first;
  if (!unlinked_.empty()) next = std::min(next, now + kLookNs);
  return next;
}

void Leases::close() {
  for (auto it = out_.begin(); it != out_.end();)
    it = end_lease(it, Error{ErrorCode::kCancelled,
                             "the transport was closed while this was lent: the borrower may read "
                             "on, do not use the memory again"});
}

}  // namespace kvcore::transport
