// Regions and grants of one Transport, and the fence between them and landing bytes.
//
// Thread rules: all methods from any thread. Two locks: `mu_` (tables, held for microseconds) and
// `landing_` (held while bytes land under a grant, <= kLandingBytes at a time; revoke and remove
// take it, which is the fence). Posting takes only `mu_`, so a post never waits for a copy. Bounds:
// every check is written so that no sum can overflow. A back end whose hardware can still write
// after a revoke (rdma) sets a hook: it fences itself, or says kPending and calls fenced() later.
#pragma once

#include <atomic>
#include <functional>
#include <mutex>
#include <span>
#include <unordered_map>
#include <vector>

#include "transport/link.h"

namespace kvcore::transport {

inline constexpr std::uint64_t kLandingBytes = 1024UL * 1024;

constexpr bool range_inside(std::uint64_t offset, std::uint64_t bytes,
                            std::uint64_t limit) noexcept {
  return offset <= limit && bytes <= limit - offset;
}

struct RegionView {
  std::byte* base;
  std::uint64_t bytes;
  int fd;  // read-only, owned by the table; -1 = none
};

class GrantTable {
 public:
  // random: of the refs; null = the operating system's. Must outlive the table.
  explicit GrantTable(RandomSource* random = nullptr);
  ~GrantTable();
  GrantTable(const GrantTable&) = delete;
  GrantTable& operator=(const GrantTable&) = delete;

  Result<RegionId> add_region(const RegionSpec& spec);
  Status remove_region(RegionId id);
  Result<RegionView> region(RegionId id) const;
  std::vector<std::pair<RegionId, RegionView>> regions() const;

  // A local operation: checks the segments' local side and pins the region until unpin.
  Result<RegionView> pin(RegionId id, std::span<const Segment> segments);
  void unpin(RegionId id);

  Result<Grant> create(RegionId region, std::span<const Range> ranges, Rights rights,
                       std::int64_t expires_ns, std::string_view peer = {});
  Fence revoke(GrantRef ref) { return revoke(ref, false); }

  // Called for each grant that is revoked, without any lock.
  using OnRevoke = std::function<Fence(GrantRef)>;
  void set_on_revoke(OnRevoke hook) { on_revoke_ = std::move(hook); }
  // What the hook left pending has ended. True: so has the fence, Fenced is due.
  [[nodiscard]] bool fenced(GrantRef ref);

  // check() for reading, and a lease of the grant is out until take_back: a revoke waits for it.
  // Unsupported: the region has no memfd, peers cannot map it.
  struct Lent {
    RegionId region;
    std::int64_t expires_ns;  // with the grant; 0 = never
  };
  Result<Lent> lend(GrantRef ref, std::span<const Range> ranges, std::int64_t now,
                    std::string_view peer);
  // One lease of it has ended. True: it was the last thing a revoke waited for, Fenced is due.
  [[nodiscard]] bool take_back(GrantRef ref);

  // Does `ref` allow `peer` (its identity) this `right` on all of these ranges now? Stale,
  // InvalidArgument (bounds, rights).
  Status check(GrantRef ref, Rights right, std::span<const Range> ranges, std::int64_t now,
               std::string_view peer) const;

  // A live grant as a whole. Stale.
  Result<Grant> find(GrantRef ref, std::int64_t now, std::string_view peer) const;

  // The region of a live grant, if peers can map it (shm). Stale, Unsupported.
  Result<RegionId> shared_region(GrantRef ref) const;

  // check() of ranges of <= kLandingBytes in all, then use(pointers to them) while the fence is
  // held: a revoke_grant that has returned before this call makes it Stale; one during it waits.
  using Use = std::function<void(std::span<std::byte* const>)>;
  Status with_ranges(GrantRef ref, Rights right, std::span<const Range> ranges, std::int64_t now,
                     std::string_view peer, const Use& use) const;

  // Revokes grants that have expired, once in a while: a look at one costs nothing, a sweep is paid
  // for by as many new grants. No Fenced follows: nobody waits for it.
  void forget_expired(std::int64_t now);

  std::size_t num_grants() const;

 private:
  struct Region {
    RegionView view;
    std::uint64_t pins = 0;
    std::uint64_t pending_fences = 0;
  };
  Result<const Grant*> live(GrantRef ref, Rights right, std::int64_t now,
                            std::string_view peer) const;
  Result<std::byte*> locate(const Grant& grant, Range range) const;
  Fence revoke(GrantRef ref, bool silent);
  struct Pending {  // a revoke that something still stands in the way of
    RegionId region;
    bool device = true;   // the hook's part
    bool silent = false;  // nobody waits for Fenced
  };
  bool end_if_fenced(std::uint64_t id);  // under mu_

  // A fence goes before the next landing, however fast landings follow each other.
  std::unique_lock<std::mutex> fence();

  mutable std::mutex landing_;  // taken before mu_
  std::atomic<int> fences_waiting_{0};
  mutable std::mutex mu_;
  std::unordered_map<std::uint32_t, Region> regions_;
  std::unordered_map<std::uint64_t, Grant> grants_;            // by GrantRef::id
  std::unordered_map<std::uint64_t, Pending> pending_fences_;  // by GrantRef::id
  std::unordered_map<std::uint64_t, std::uint64_t> lent_;  // GrantRef::id -> leases that are out
  SystemRandom system_random_;
  RandomSource& random_;
  OnRevoke on_revoke_;
  std::uint32_t next_region_ = 1;
  std::size_t sweep_at_ = 1024;  // grants
};

}  // namespace kvcore::transport
