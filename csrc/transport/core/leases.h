// What this side has lent to peers on its host: frames that must stay as they are while a peer
// reads them where they lie.
//
// A lease ends when it is given back, when its time is over, when its link was closed in order by
// the borrower, or when the borrower's process has ended. A link that only breaks ends none: the
// borrower may be alive and reading, so the ranges stay lent until its process ends or the lease
// expires. Each end is one Returned, and a Fenced behind the last one of a revoked grant.
// Thread rules: the I/O thread. Times as in link.h.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>

#include "transport/core/event_queue.h"
#include "transport/core/grants.h"
#include "transport/core/peer_process.h"
#include "transport/link.h"

namespace kvcore::transport {

inline constexpr std::size_t kMaxLeases = 16384;  // of one link

// What a borrow asks for, as the segments of an operation. InvalidArgument.
Result<std::vector<Segment>> segments_to_borrow(std::span<const Range> ranges);

class Leases {
 public:
  Leases(GrantTable* grants, EventQueue* events) : grants_(*grants), events_(*events) {}
  Leases(const Leases&) = delete;
  Leases& operator=(const Leases&) = delete;

  struct Borrower {
    LinkId link;
    std::string_view identity;
    std::shared_ptr<const PeerProcess> process;
    std::shared_ptr<PollCredit> poll_credit;  // holds `cost` from now until Returned is polled
    std::uint64_t cost;
  };
  // Stale, InvalidArgument (as GrantTable::check), Unsupported (no memfd, or a process that cannot
  // be watched), TransportError (kMaxLeases).
  Result<GrantTable::Lent> lend(const Borrower& to, std::uint64_t lease, GrantRef grant,
                                std::span<const Range> ranges, std::int64_t now);
  void give_back(LinkId link, std::uint64_t lease);  // unknown ones are ignored
  // in_order: the borrower has closed the link and reads nothing any more.
  void link_ended(LinkId link, bool in_order);
  void work(std::int64_t now);  // what has expired, and whose borrower has ended
  std::int64_t next_timer_ns(std::int64_t now) const;  // or INT64_MAX
  void close();  // nobody watches any more: every lease ends with Cancelled

  bool contains(LinkId link, std::uint64_t lease) const {
    return out_.contains({static_cast<std::uint64_t>(link), lease});
  }

 private:
  struct Lease {
    GrantRef grant;
    std::int64_t expires_ns;
    std::shared_ptr<const PeerProcess> process;
    std::shared_ptr<PollCredit> poll_credit;
    std::uint64_t cost;
  };
  using Key = std::pair<std::uint64_t, std::uint64_t>;  // link, lease
  using Out = std::map<Key, Lease>;
  Out::iterator end_lease(Out::iterator lease, Status status);

  GrantTable& grants_;
  EventQueue& events_;
  Out out_;
  std::map<std::uint64_t, std::size_t> per_link_;
  std::set<std::pair<std::int64_t, Key>> expiries_;
  std::set<Key> unlinked_;  // whose link is gone
};

}  // namespace kvcore::transport
