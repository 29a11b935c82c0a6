#include "pages/pool.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "base/text.h"

namespace kvcore::pages {
namespace {

constexpr std::int32_t kMaxRefs = std::numeric_limits<std::int32_t>::max();
constexpr std::int64_t kMaxPages = std::numeric_limits<std::int32_t>::max();

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

}  // namespace

Result<std::shared_ptr<Pool>> Pool::make(const PageSpec& spec, std::int64_t num_frames,
                                         std::shared_ptr<Arena> arena, bool huge_pages) {
  const std::int64_t most =
      std::min(kMaxPages / spec.options().extent_pages, kMaxArenaBytes / spec.frame_bytes());
  if (num_frames < 1 || num_frames > most)
    return invalid_argument(
        text("num_frames=", num_frames, " is out of range: allowed 1 to ", most));
  const std::int64_t bytes = num_frames * spec.frame_bytes();
  if (arena == nullptr) {
    KVCORE_ASSIGN_OR_RETURN(arena, Arena::make(bytes, huge_pages));
  }
  KVCORE_ASSIGN_OR_RETURN(const std::int64_t offset, arena->reserve(bytes));
  return std::shared_ptr<Pool>(new Pool(spec, num_frames, std::move(arena), offset));
}

Pool::Pool(const PageSpec& spec, std::int64_t num_frames, std::shared_ptr<Arena> arena,
           std::int64_t offset_bytes)
    : spec_(spec), arena_(std::move(arena)), num_frames_(num_frames) {
  const PageSpecOptions& o = spec_.options();
  const std::int64_t num_pages = num_frames * o.extent_pages;
  records_.reserve(at(num_pages));
  for (std::int64_t page = 0; page < num_pages; ++page) {
    const std::int64_t frame = page / o.extent_pages;
    const std::int64_t slot = page % o.extent_pages;
    records_.push_back(
        {offset_bytes + frame * spec_.frame_bytes() + slot * spec_.slice_bytes(), 0, 0});
  }
  for (std::int32_t head = 0; head < o.num_kv_heads; ++head)
    heads_.push_back(spec_.head_block(head));
  for (std::int32_t layer = 0; layer < o.num_layers; ++layer)
    layers_.push_back({layer * spec_.layer_stride_bytes(), spec_.slice_bytes(), heads_.data()});
  class_ = {layers_.data(), o.layout, true};
  view_ = {arena_->data(), records_.data(), &class_,      num_pages,    1,
           o.num_layers,   o.num_kv_heads,  o.head_dim_k, o.head_dim_v, o.page_size};
  refs_.assign(at(num_pages), {0, 0});
  sealed_.assign(at(num_pages), 0);
  generation_.assign(at(num_frames), 1);
  live_pages_.assign(at(num_frames), -1);
  free_.reserve(at(num_frames));
  for (std::int64_t frame = num_frames; frame-- > 0;)
    free_.push_back(static_cast<std::int32_t>(frame));
}

Result<std::vector<std::int32_t>> Pool::alloc(std::int64_t num_pages) {
  if (num_pages < 0)
    return invalid_argument(text("num_pages=", num_pages, " is out of range: allowed 0 and up"));
  const std::int32_t extent = spec_.options().extent_pages;
  const std::int64_t frames = num_pages / extent + (num_pages % extent != 0);
  std::lock_guard lock(mutex_);
  if (frames > static_cast<std::int64_t>(free_.size()) || fails(faults_.get(), "pool.alloc"))
    return Error{ErrorCode::kOutOfPages,
                 text("wanted ", num_pages, " pages = ", frames, " frames of ", extent,
                      " pages, but only ", free_.size(), " of ", num_frames_, " frames are free")};
  std::vector<std::int32_t> pages;
  pages.reserve(at(frames * extent));
  for (std::int64_t i = 0; i < frames; ++i) {
    const std::int32_t frame = free_.back();
    free_.pop_back();
    live_pages_[at(frame)] = extent;
    for (std::int32_t slot = 0; slot < extent; ++slot) {
      const std::int32_t page = frame * extent + slot;
      refs_[at(page)] = {1, 0};
      pages.push_back(page);
    }
  }
  held_pages_ += frames * extent;
  return pages;
}

Status Pool::check_page(std::int32_t page) const {
  if (page >= 0 && page < view_.num_pages) return {};
  return invalid_argument(
      text("page=", page, " is out of range: allowed 0 to ", view_.num_pages - 1));
}

Status Pool::add(std::span<const std::int32_t> pages, Count count) {
  std::lock_guard lock(mutex_);
  for (const std::int32_t page : pages) {
    KVCORE_RETURN_IF_ERROR(check_page(page));
    const PageRefs& r = refs_[at(page)];
    // An io ref may follow another one (a transfer splits), an owner ref needs an owner.
    if (r.owner == 0 && (count == Count::kOwner || r.io == 0))
      return invalid_argument(text("page=", page, " has no owner: a free page cannot gain refs"));
    const std::int32_t held = count == Count::kOwner ? r.owner : r.io;
    if (static_cast<std::int64_t>(held) + static_cast<std::int64_t>(pages.size()) > kMaxRefs)
      return invalid_argument(text("page=", page, " has ", held, " refs: too many"));
  }
  for (const std::int32_t page : pages) {
    PageRefs& r = refs_[at(page)];
    if (count == Count::kOwner) {
      ++r.owner;
    } else if (r.io++ == 0) {
      ++io_pages_;
    }
  }
  return {};
}

Status Pool::drop(std::span<const std::int32_t> pages, Count count) {
  std::lock_guard lock(mutex_);
  const auto field = [&](std::int32_t page) -> std::int32_t& {
    return count == Count::kOwner ? refs_[at(page)].owner : refs_[at(page)].io;
  };
  // Counts first, so that a page named more often than it is held is seen before anything is freed.
  for (std::size_t i = 0; i < pages.size(); ++i) {
    Status status = check_page(pages[i]);
    if (status && field(pages[i]) == 0)
      status = invalid_argument(text("page=", pages[i], " has no ",
                                     count == Count::kOwner ? "owner" : "io",
                                     " ref left to drop (position ", i, " of ", pages.size(), ")"));
    if (!status) {
      for (std::size_t j = 0; j < i; ++j) ++field(pages[j]);
      return status;
    }
    --field(pages[i]);
  }
  for (const std::int32_t page : pages) {
    PageRefs& r = refs_[at(page)];
    std::int64_t& held = count == Count::kOwner ? held_pages_ : io_pages_;
    if (field(page) != 0) continue;
    field(page) = -1;  // settled: a later mention of the same page must not settle it again
    --held;
    if ((count == Count::kOwner ? r.io : r.owner) == 0)
      --live_pages_[at(page / spec_.options().extent_pages)];
  }
  for (const std::int32_t page : pages) {
    if (field(page) == -1) field(page) = 0;
  }
  for (const std::int32_t page : pages) free_if_unheld(page / spec_.options().extent_pages);
  return {};
}

void Pool::free_if_unheld(std::int64_t frame) {
  if (live_pages_[at(frame)] != 0) return;
  live_pages_[at(frame)] = -1;  // free: a second page of the same call must not free it again
  ++generation_[at(frame)];
  free_.push_back(static_cast<std::int32_t>(frame));
  const std::int32_t extent = spec_.options().extent_pages;
  for (std::int64_t page = frame * extent; page < (frame + 1) * extent; ++page) {
    sealed_pages_ -= sealed_[at(page)];
    sealed_[at(page)] = 0;
  }
}

Status Pool::incref(std::span<const std::int32_t> pages) { return add(pages, Count::kOwner); }
Status Pool::decref(std::span<const std::int32_t> pages) { return drop(pages, Count::kOwner); }
Status Pool::io_acquire(std::span<const std::int32_t> pages) { return add(pages, Count::kIo); }
Status Pool::io_release(std::span<const std::int32_t> pages) { return drop(pages, Count::kIo); }

Status Pool::seal(std::span<const std::int32_t> pages) {
  std::lock_guard lock(mutex_);
  for (const std::int32_t page : pages) {
    KVCORE_RETURN_IF_ERROR(check_page(page));
    if (refs_[at(page)].owner == 0)
      return invalid_argument(text("page=", page, " has no owner: only held pages can be sealed"));
  }
  for (const std::int32_t page : pages) {
    sealed_pages_ += sealed_[at(page)] == 0;
    sealed_[at(page)] = 1;
  }
  return {};
}

Result<std::uint64_t> Pool::generation(std::int32_t page) const {
  KVCORE_RETURN_IF_ERROR(check_page(page));
  std::lock_guard lock(mutex_);
  return generation_[at(page / spec_.options().extent_pages)];
}

Result<PageRefs> Pool::refs(std::int32_t page) const {
  KVCORE_RETURN_IF_ERROR(check_page(page));
  std::lock_guard lock(mutex_);
  return refs_[at(page)];
}

Result<bool> Pool::is_sealed(std::int32_t page) const {
  KVCORE_RETURN_IF_ERROR(check_page(page));
  std::lock_guard lock(mutex_);
  return sealed_[at(page)] != 0;
}

Status Pool::frame_refs(std::int32_t page, std::span<PageRefs> out) const {
  KVCORE_RETURN_IF_ERROR(check_page(page));
  const std::int32_t extent = spec_.options().extent_pages;
  if (out.size() != at(extent))
    return invalid_argument(text("out has ", out.size(), " entries: allowed ", extent));
  std::lock_guard lock(mutex_);
  std::copy_n(refs_.begin() + page / extent * extent, extent, out.begin());
  return {};
}

void Pool::set_faults(std::shared_ptr<FaultPlan> faults) {
  std::lock_guard lock(mutex_);
  faults_ = std::move(faults);
}

PoolStats Pool::stats() const {
  std::lock_guard lock(mutex_);
  return {num_frames_,     static_cast<std::int64_t>(free_.size()),
          view_.num_pages, held_pages_,
          io_pages_,       sealed_pages_,
          arena_->bytes(), arena_->huge_bytes()};
}

std::byte* Pool::slice(std::int32_t page, std::int32_t layer) const noexcept {
  return view_.arena + records_[at(page)].offset_bytes + layer * spec_.layer_stride_bytes();
}

}  // namespace kvcore::pages
