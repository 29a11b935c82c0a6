#include "transport/core/grants.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <thread>

#include "base/random.h"
#include "base/text.h"

namespace kvcore::transport {

namespace {

// A duplicate for peers, which cannot be mapped writable: neither can the file any more, whoever
// opens it again.
Result<int> seal_and_share(int memfd, std::uint64_t bytes) {
  const off_t size = ::lseek(memfd, 0, SEEK_END);
  if (size < 0 || static_cast<std::uint64_t>(size) < bytes)
    return invalid_argument(
        text("region bytes=", bytes, " exceeds its memfd, which has ", size, " bytes"));
  constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_FUTURE_WRITE;
  const int seals = ::fcntl(memfd, F_GET_SEALS);
  if (seals < 0 || ((seals & kSeals) != kSeals && ::fcntl(memfd, F_ADD_SEALS, kSeals) != 0))
    return invalid_argument(text("memfd=", memfd,
                                 " must be a memfd that has, or can get, the seals SHRINK and ",
                                 "FUTURE_WRITE (has ", seals, ")"));
  const int fd = ::open(text("/proc/self/fd/", memfd).c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return Error{ErrorCode::kIo, text("open(/proc/self/fd): errno ", errno)};
  return fd;
}

}  // namespace

GrantTable::GrantTable(RandomSource* random)
    : random_(random != nullptr ? *random : system_random_) {}

GrantTable::~GrantTable() {
  for (auto& [id, region] : regions_) {
    if (region.view.fd >= 0) ::close(region.view.fd);
  }
}

Result<RegionId> GrantTable::add_region(const RegionSpec& spec) {
  if (spec.memory != Memory::kHost)
    return Error{ErrorCode::kUnsupported, "region memory=cuda: these links move host memory only"};
  if (spec.base == nullptr) return invalid_argument("region base=null must point to memory");
  if (spec.bytes == 0 || spec.bytes > (std::uint64_t{1} << 62))
    return invalid_argument(text("region bytes=", spec.bytes, " must be in [1, 2^62]"));
  int fd = -1;
  if (spec.memfd >= 0) {
    KVCORE_ASSIGN_OR_RETURN(fd, seal_and_share(spec.memfd, spec.bytes));
  }
  const std::lock_guard lock(mu_);
  const std::uint32_t id = next_region_++;
  regions_.emplace(id, Region{{spec.base, spec.bytes, fd}});
  return RegionId{id};
}

Status GrantTable::remove_region(RegionId id) {
  std::vector<GrantRef> refs;
  {
    const std::lock_guard lock(mu_);
    const auto it = regions_.find(static_cast<std::uint32_t>(id));
    if (it == regions_.end())
      return Error{ErrorCode::kNotFound,
                   text("region ", static_cast<std::uint32_t>(id), " is unknown")};
    if (it->second.pins > 0)
      return invalid_argument(text("region ", static_cast<std::uint32_t>(id), " is used by ",
                                   it->second.pins, " operations; cancel them first"));
    for (const auto& [ref_id, grant] : grants_)
      if (grant.region == id) refs.push_back(grant.ref);
  }
  for (const GrantRef& ref : refs) (void)revoke(ref);  // what stays pending is counted below
  const auto fenced = fence();
  const std::lock_guard lock(mu_);
  const auto it = regions_.find(static_cast<std::uint32_t>(id));
  if (it == regions_.end() || it->second.pins > 0)
    return invalid_argument(
        text("region ", static_cast<std::uint32_t>(id), " was used meanwhile by another thread"));
  if (it->second.pending_fences > 0)
    return invalid_argument(text("region ", static_cast<std::uint32_t>(id), " has ",
                                 it->second.pending_fences,
                                 " pending fences; unregister it after their Fenced"));
  std::erase_if(grants_, [&](const auto& g) { return g.second.region == id; });
  if (it->second.view.fd >= 0) ::close(it->second.view.fd);
  regions_.erase(it);
  return {};
}

Result<RegionView> GrantTable::region(RegionId id) const {
  const std::lock_guard lock(mu_);
  const auto it = regions_.find(static_cast<std::uint32_t>(id));
  if (it == regions_.end())
    return Error{ErrorCode::kNotFound,
                 text("region ", static_cast<std::uint32_t>(id), " is unknown")};
  return it->second.view;
}

std::vector<std::pair<RegionId, RegionView>> GrantTable::regions() const {
  const std::lock_guard lock(mu_);
  std::vector<std::pair<RegionId, RegionView>> out;
  for (const auto& [id, region] : regions_) out.emplace_back(RegionId{id}, region.view);
  return out;
}

Result<RegionView> GrantTable::pin(RegionId id, std::span<const Segment> segments) {
  if (segments.empty() || segments.size() > kMaxSegments)
    return invalid_argument(
        text("segments: ", segments.size(), " given, must be in [1, ", kMaxSegments, "]"));
  const std::lock_guard lock(mu_);
  const auto it = regions_.find(static_cast<std::uint32_t>(id));
  if (it == regions_.end())
    return Error{ErrorCode::kNotFound,
                 text("region ", static_cast<std::uint32_t>(id), " is unknown")};
  std::uint64_t total = 0;
  for (const Segment& s : segments) {
    if (s.bytes == 0 || !range_inside(s.local_offset, s.bytes, it->second.view.bytes))
      return invalid_argument(text("segment local_offset=", s.local_offset, " bytes=", s.bytes,
                                   " must be non-empty and inside the region of ",
                                   it->second.view.bytes, " bytes"));
    if (s.bytes > kMaxOpBytes - total)
      return invalid_argument(text("segments have more than ", kMaxOpBytes, " bytes in all"));
    total += s.bytes;
  }
  ++it->second.pins;
  return it->second.view;
}

void GrantTable::unpin(RegionId id) {
  const std::lock_guard lock(mu_);
  const auto it = regions_.find(static_cast<std::uint32_t>(id));
  if (it != regions_.end() && it->second.pins > 0) --it->second.pins;
}

namespace {
Result<std::vector<Range>> normalised(std::span<const Range> ranges, std::uint64_t region_bytes) {
  if (ranges.empty()) return invalid_argument("grant ranges: none given");
  std::vector<Range> sorted(ranges.begin(), ranges.end());
  std::ranges::sort(sorted, {}, &Range::offset);
  std::vector<Range> merged;
  for (const Range& r : sorted) {
    if (r.bytes == 0 || !range_inside(r.offset, r.bytes, region_bytes))
      return invalid_argument(text("grant range offset=", r.offset, " bytes=", r.bytes,
                                   " must be non-empty and inside the region of ", region_bytes,
                                   " bytes"));
    if (!merged.empty()) {
      Range& last = merged.back();
      if (r.offset < last.offset + last.bytes)
        return invalid_argument(text("grant range offset=", r.offset, " overlaps the one before"));
      if (r.offset == last.offset + last.bytes) {
        last.bytes += r.bytes;
        continue;
      }
    }
    merged.push_back(r);
  }
  return merged;
}
}  // namespace

Result<Grant> GrantTable::create(RegionId region, std::span<const Range> ranges, Rights rights,
                                 std::int64_t expires_ns, std::string_view peer) {
  if (peer.size() > kMaxIdentityBytes)
    return invalid_argument(
        text("grant peer has ", peer.size(), " bytes, at most ", kMaxIdentityBytes));
  KVCORE_ASSIGN_OR_RETURN(const RegionView view, this->region(region));
  KVCORE_ASSIGN_OR_RETURN(auto merged, normalised(ranges, view.bytes));
  GrantRef ref;
  KVCORE_RETURN_IF_ERROR(random_.fill(std::as_writable_bytes(std::span(&ref, 1))));
  Grant grant{ref, region, rights, expires_ns, std::move(merged), std::string(peer)};
  const std::lock_guard lock(mu_);
  if (!regions_.contains(static_cast<std::uint32_t>(region)))
    return Error{ErrorCode::kNotFound, "region was unregistered meanwhile"};
  grants_.insert_or_assign(ref.id, grant);
  return grant;
}

Fence GrantTable::revoke(GrantRef ref, bool silent) {
  {
    const auto fenced = fence();
    const std::lock_guard lock(mu_);
    const auto it = grants_.find(ref.id);
    if (it == grants_.end() || it->second.ref != ref) return Fence::kDone;
    const RegionId region = it->second.region;
    grants_.erase(it);
    if (!on_revoke_ && !lent_.contains(ref.id)) return Fence::kDone;
    // Before the hook: what it waits for, and leases, may end elsewhere meanwhile.
    pending_fences_.emplace(ref.id, Pending{region, true, silent});
    ++regions_.at(static_cast<std::uint32_t>(region)).pending_fences;
  }
  if (on_revoke_ && on_revoke_(ref) == Fence::kPending) return Fence::kPending;
  const std::lock_guard lock(mu_);
  pending_fences_.at(ref.id).device = false;
  if (lent_.contains(ref.id)) return Fence::kPending;
  end_if_fenced(ref.id);
  return Fence::kDone;
}

// Returns whether Fenced is due.
bool GrantTable::end_if_fenced(std::uint64_t id) {
  const auto pending = pending_fences_.find(id);
  if (pending == pending_fences_.end() || pending->second.device || lent_.contains(id))
    return false;
  const Pending ended = pending->second;
  pending_fences_.erase(pending);
  --regions_.at(static_cast<std::uint32_t>(ended.region)).pending_fences;
  return !ended.silent;
}

bool GrantTable::fenced(GrantRef ref) {
  const std::lock_guard lock(mu_);
  const auto pending = pending_fences_.find(ref.id);
  if (pending == pending_fences_.end()) return false;
  pending->second.device = false;
  return end_if_fenced(ref.id);
}

Result<GrantTable::Lent> GrantTable::lend(GrantRef ref, std::span<const Range> ranges,
                                          std::int64_t now, std::string_view peer) {
  const std::lock_guard lock(mu_);
  KVCORE_ASSIGN_OR_RETURN(const Grant* const grant, live(ref, Rights::kRead, now, peer));
  for (const Range& range : ranges) {
    if (auto p = locate(*grant, range); !p) return p.error();
  }
  if (regions_.at(static_cast<std::uint32_t>(grant->region)).view.fd < 0)
    return Error{ErrorCode::kUnsupported, "the region of a grant that is lent needs a memfd"};
  ++lent_[ref.id];
  return Lent{grant->region, grant->expires_ns};
}

bool GrantTable::take_back(GrantRef ref) {
  const std::lock_guard lock(mu_);
  const auto it = lent_.find(ref.id);
  if (it == lent_.end() || --it->second > 0) return false;
  lent_.erase(it);
  return end_if_fenced(ref.id);
}

Result<const Grant*> GrantTable::live(GrantRef ref, Rights right, std::int64_t now,
                                      std::string_view peer) const {
  const auto it = grants_.find(ref.id);
  if (it == grants_.end() || it->second.ref != ref ||
      (!it->second.peer.empty() && it->second.peer != peer))
    return Error{ErrorCode::kStale,
                 "grant is unknown, revoked, of an old generation or another peer's"};
  const Grant& grant = it->second;
  if (grant.expires_ns != 0 && now >= grant.expires_ns)
    return Error{ErrorCode::kStale, "grant has expired"};
  if ((static_cast<unsigned>(grant.rights) & static_cast<unsigned>(right)) == 0)
    return invalid_argument(
        text("grant does not allow ", right == Rights::kRead ? "reading" : "writing"));
  return &grant;
}

Result<std::byte*> GrantTable::locate(const Grant& grant, Range range) const {
  auto pos = std::ranges::upper_bound(grant.ranges, range.offset, {}, &Range::offset);
  if (pos == grant.ranges.begin() || range.bytes == 0 ||
      !range_inside(range.offset - std::prev(pos)->offset, range.bytes, std::prev(pos)->bytes))
    return invalid_argument(text("remote range offset=", range.offset, " bytes=", range.bytes,
                                 " is not inside one granted range"));
  return regions_.at(static_cast<std::uint32_t>(grant.region)).view.base + range.offset;
}

Status GrantTable::check(GrantRef ref, Rights right, std::span<const Range> ranges,
                         std::int64_t now, std::string_view peer) const {
  const std::lock_guard lock(mu_);
  KVCORE_ASSIGN_OR_RETURN(const Grant* const grant, live(ref, right, now, peer));
  for (const Range& range : ranges) {
    if (auto p = locate(*grant, range); !p) return p.error();
  }
  return {};
}

Result<Grant> GrantTable::find(GrantRef ref, std::int64_t now, std::string_view peer) const {
  const std::lock_guard lock(mu_);
  KVCORE_ASSIGN_OR_RETURN(const Grant* const grant, live(ref, Rights::kReadWrite, now, peer));
  return *grant;
}

Result<RegionId> GrantTable::shared_region(GrantRef ref) const {
  const std::lock_guard lock(mu_);
  const auto it = grants_.find(ref.id);
  if (it == grants_.end() || it->second.ref != ref)
    return Error{ErrorCode::kStale, "grant is unknown, revoked or of an old generation"};
  if (regions_.at(static_cast<std::uint32_t>(it->second.region)).view.fd < 0)
    return Error{ErrorCode::kUnsupported, "shm: the region of a grant that is read needs a memfd"};
  return it->second.region;
}

Status GrantTable::with_ranges(GrantRef ref, Rights right, std::span<const Range> ranges,
                               std::int64_t now, std::string_view peer, const Use& use) const {
  while (fences_waiting_.load(std::memory_order_relaxed) > 0) std::this_thread::yield();
  const std::lock_guard landing(landing_);
  std::vector<std::byte*> targets;
  targets.reserve(ranges.size());
  {
    const std::lock_guard lock(mu_);
    KVCORE_ASSIGN_OR_RETURN(const Grant* const grant, live(ref, right, now, peer));
    for (const Range& range : ranges) {
      KVCORE_ASSIGN_OR_RETURN(std::byte* const target, locate(*grant, range));
      targets.push_back(target);
    }
  }
  use(targets);
  return {};
}

std::unique_lock<std::mutex> GrantTable::fence() {
  fences_waiting_.fetch_add(1, std::memory_order_relaxed);
  std::unique_lock lock(landing_);
  fences_waiting_.fetch_sub(1, std::memory_order_relaxed);
  return lock;
}

void GrantTable::forget_expired(std::int64_t now) {
  std::vector<GrantRef> expired;
  {
    const std::lock_guard lock(mu_);
    if (grants_.size() < sweep_at_) return;
    for (const auto& [id, grant] : grants_)
      if (grant.expires_ns != 0 && now >= grant.expires_ns) expired.push_back(grant.ref);
    sweep_at_ = std::max<std::size_t>(1024, 2 * (grants_.size() - expired.size()));
  }
  for (const GrantRef& ref : expired) (void)revoke(ref, true);
}

std::size_t GrantTable::num_grants() const {
  const std::lock_guard lock(mu_);
  return grants_.size();
}

}  // namespace kvcore::transport
