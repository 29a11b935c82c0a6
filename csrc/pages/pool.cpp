#include "pages/pool.h"

#include <algorithm>
#include <array>
#include <limits>
#include <utility>

#include "base/check.h"
#include "base/text.h"

namespace kvcore::pages {
namespace {

constexpr std::int32_t kMaxRefs = std::numeric_limits<std::int32_t>::max();
constexpr std::int64_t kMaxPages = std::numeric_limits<std::int32_t>::max();

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

}  // namespace

Result<std::shared_ptr<Pool>> Pool::make(const PageSpec& spec, std::int64_t num_frames,
                                         std::shared_ptr<Arena> arena, bool huge_pages,
                                         std::int64_t page_ids) {
  const std::int32_t extent = spec.options().extent_pages;
  const std::int64_t most = std::min(kMaxPages / extent, kMaxArenaBytes / spec.frame_bytes());
  KVCORE_RETURN_IF_ERROR(check_range("num_frames", num_frames, 1, most));
  const std::int64_t fewest = num_frames * extent;
  if (page_ids == 0) page_ids = fewest;
  const std::int64_t ids = kMaxPages / extent * extent;
  if (page_ids < fewest || page_ids > ids)
    return invalid_argument(text("page_ids=", page_ids, " is out of range: allowed 0 or ", fewest,
                                 " (num_frames * extent_pages) to ", ids));
  const std::int64_t bytes = num_frames * spec.frame_bytes();
  if (arena == nullptr) {
    KVCORE_ASSIGN_OR_RETURN(arena, Arena::make(bytes, huge_pages));
  }
  KVCORE_ASSIGN_OR_RETURN(const std::int64_t offset, arena->reserve(bytes));
  return std::shared_ptr<Pool>(
      new Pool(spec, num_frames, std::move(arena), offset, (page_ids + extent - 1) / extent));
}

Pool::Pool(const PageSpec& spec, std::int64_t num_frames, std::shared_ptr<Arena> arena,
           std::int64_t offset_bytes, std::int64_t num_groups)
    : spec_(spec),
      arena_(std::move(arena)),
      num_frames_(num_frames),
      extent_(spec.options().extent_pages),
      classes_(spec),
      frame_bytes_(spec.frame_bytes()),
      single_bytes_(classes_[0].run_bytes(1)),
      space_({frame_bytes_, single_bytes_}),
      ids_(extent_, num_frames, num_groups) {
  const PageSpecOptions& o = spec_.options();
  const std::int64_t num_pages = num_groups * extent_;
  records_.assign(at(num_pages), {offset_bytes, 0, 0});
  view_ = {arena_->data(), records_.data(), classes_.views(), num_pages,    classes_.num_views(),
           o.num_layers,   o.num_kv_heads,  o.head_dim_k,     o.head_dim_v, o.page_size};
  refs_.assign(at(num_pages), {0, 0});
  sealed_.assign(at(num_pages), 0);
  generation_.assign(at(num_pages), 1);
  live_pages_.assign(at(num_groups), -1);
  frame_at_.assign(at(num_groups), 0);
  in_frame_.assign(at(num_groups), 0);
  class_pages_.assign(ClassTable::kMaxClasses, 0);
  parked_.reserve(at(num_groups));
  for (std::int64_t group = num_frames; group-- > 0;) {
    frame_at_[at(group)] = offset_bytes + group * frame_bytes_;
    for (std::int32_t i = 0; i < extent_; ++i)
      records_[at(group * extent_ + i)].offset_bytes =
          frame_at_[at(group)] + i * spec_.slice_bytes();
    parked_.push_back(static_cast<std::int32_t>(group));
  }
}

// ---- giving out

Status Pool::check_run(std::int32_t run_pages) const {
  if (run_pages == 0 || run_pages == 1 || run_pages == extent_) return {};
  return invalid_argument(text("run_pages=", run_pages, " is out of range: allowed 0, 1 or ",
                               extent_, " (extent_pages)"));
}

std::int64_t Pool::free_frames() const {
  return static_cast<std::int64_t>(parked_.size()) + std::min(ids_.free_groups(), space_.fits(0));
}

std::int64_t Pool::free_singles() const { return std::min(ids_.free_ids(), space_.fits(1)); }

Result<std::int64_t> Pool::free_pages(std::int32_t run_pages) {
  KVCORE_RETURN_IF_ERROR(check_run(run_pages));
  std::lock_guard lock(mutex_);
  if (!in_singles(run_pages)) return free_frames() * extent_;
  unpark();
  return free_singles();
}

Error Pool::out_of_pages(std::int64_t num_pages, std::int32_t run_pages) const {
  if (in_singles(run_pages))
    return {ErrorCode::kOutOfPages,
            text("wanted ", num_pages, " single pages, but only ", free_singles(), " are free (",
                 space_.free_bytes(), " bytes of ", num_frames_ * frame_bytes_, ")")};
  return {
      ErrorCode::kOutOfPages,
      text("wanted ", num_pages, " pages = ", (num_pages + extent_ - 1) / extent_, " frames of ",
           extent_, " pages, but only ", free_frames(), " of ", num_frames_, " frames are free")};
}

// Bytes of free frames become free for runs of any length.
void Pool::unpark() {
  for (const std::int32_t group : parked_) {
    space_.give(frame_at_[at(group)], frame_bytes_);
    ids_.give_group(group);
  }
  parked_.clear();
}

std::int32_t Pool::take_frame() {
  if (!parked_.empty()) {
    const std::int32_t group = parked_.back();
    parked_.pop_back();
    return group;
  }
  const std::int32_t group = ids_.take_group();
  const std::int64_t frame = *space_.take(frame_bytes_, End::kLow);
  frame_at_[at(group)] = frame;
  for (std::int32_t i = 0; i < extent_; ++i)
    records_[at(group * extent_ + i)] = {frame + i * spec_.slice_bytes(), 0, 0};
  return group;
}

std::int32_t Pool::take_single() {
  const std::int32_t page = ids_.take_id();
  records_[at(page)] = {*space_.take(single_bytes_, End::kLow), classes_.single_id(0), 0};
  return page;
}

void Pool::own(std::int32_t page, std::vector<std::int32_t>& pages) {
  refs_[at(page)] = {1, 0};
  pages.push_back(page);
}

Result<std::vector<std::int32_t>> Pool::alloc(std::int64_t num_pages, std::int32_t run_pages) {
  if (num_pages < 0)
    return invalid_argument(text("num_pages=", num_pages, " is out of range: allowed 0 and up"));
  KVCORE_RETURN_IF_ERROR(check_run(run_pages));
  std::lock_guard lock(mutex_);
  const bool singles = in_singles(run_pages);
  const std::int64_t count = singles ? num_pages : num_pages / extent_ + (num_pages % extent_ != 0);
  if (singles) unpark();
  if (count > (singles ? free_singles() : free_frames()) || fails(faults_.get(), "pool.alloc"))
    return out_of_pages(num_pages, run_pages);
  std::vector<std::int32_t> pages;
  pages.reserve(at(singles ? count : count * extent_));
  for (std::int64_t i = 0; i < count; ++i) {
    if (singles) {
      own(take_single(), pages);
      continue;
    }
    const std::int32_t group = take_frame();
    live_pages_[at(group)] = in_frame_[at(group)] = extent_;
    for (std::int32_t slot = 0; slot < extent_; ++slot) own(group * extent_ + slot, pages);
  }
  open_bytes_ += count * (singles ? single_bytes_ : frame_bytes_);
  held_pages_ += static_cast<std::int64_t>(pages.size());
  class_pages_[0] += static_cast<std::int64_t>(pages.size());
  return pages;
}

Result<std::vector<std::int32_t>> Pool::alloc_in_class(std::int64_t num_pages,
                                                       std::int32_t class_number) {
  if (num_pages < 0)
    return invalid_argument(text("num_pages=", num_pages, " is out of range: allowed 0 and up"));
  std::lock_guard lock(mutex_);
  KVCORE_RETURN_IF_ERROR(check_class(class_number));
  unpark();
  const std::int64_t bytes = classes_[class_number].run_bytes(1);
  std::vector<std::int64_t> runs;
  const bool enough = num_pages <= ids_.free_ids() && !fails(faults_.get(), "pool.seal");
  while (enough && static_cast<std::int64_t>(runs.size()) < num_pages) {
    const auto run = space_.take(bytes, End::kHigh);
    if (!run) break;
    runs.push_back(*run);
  }
  if (static_cast<std::int64_t>(runs.size()) < num_pages || !enough) {
    const auto found = runs.size();
    for (const std::int64_t run : runs) space_.give(run, bytes);
    return Error{ErrorCode::kOutOfPages,
                 text("wanted ", num_pages, " pages of ", bytes, " bytes, but only ",
                      enough ? static_cast<std::int64_t>(found) : ids_.free_ids(), " are free (",
                      space_.free_bytes(), " bytes of ", num_frames_ * frame_bytes_, ")")};
  }
  std::vector<std::int32_t> pages;
  for (const std::int64_t run : runs) {
    const std::int32_t page = ids_.take_id();
    records_[at(page)] = {run, classes_.single_id(class_number), 0};
    own(page, pages);
  }
  compressed_bytes_ += num_pages * bytes;
  held_pages_ += num_pages;
  class_pages_[at(class_number)] += num_pages;
  return pages;
}

// ---- refs

Status Pool::check_page(std::int32_t page) const {
  return check_range("page", page, 0, view_.num_pages - 1);
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
    if (field(page) != 0) continue;
    field(page) = -1;  // settled: a later mention of the same page must not settle it again
    settle(page, count);
  }
  for (const std::int32_t page : pages) {
    if (field(page) == -1) field(page) = 0;
  }
  for (const std::int32_t page : pages) free_if_unheld(page);
  return {};
}

// The last ref of one kind has gone.
void Pool::settle(std::int32_t page, Count count) {
  const PageRefs& r = refs_[at(page)];
  --(count == Count::kOwner ? held_pages_ : io_pages_);
  const bool unheld = (count == Count::kOwner ? r.io : r.owner) == 0;
  if (unheld && !ids_.is_split(page / extent_)) --live_pages_[at(page / extent_)];
  if (count == Count::kOwner || left_.empty()) return;
  if (const auto left = left_.extract(page)) leave_open_run(page, left.mapped());
}

void Pool::free_if_unheld(std::int32_t page) {
  const std::int32_t group = page / extent_;
  if (!ids_.is_split(group)) {
    if (live_pages_[at(group)] == 0) free_group(group);
    return;
  }
  const PageRefs& r = refs_[at(page)];
  if (r.owner != 0 || r.io != 0 || ids_.is_loose(page)) return;
  if (number_of(page) == 0) give(records_[at(page)].offset_bytes, single_bytes_, open_bytes_);
  forget(page);
  ids_.give_id(page);
}

void Pool::free_group(std::int32_t group) {
  live_pages_[at(group)] = -1;  // free: a second page of the same call must not free it again
  for (std::int32_t i = 0; i < extent_; ++i) forget(group * extent_ + i);
  if (in_frame_[at(group)] == extent_ && space_.num_spans() == 0) {
    open_bytes_ -= frame_bytes_;
    parked_.push_back(group);
    return;
  }
  if (in_frame_[at(group)] > 0) give(frame_at_[at(group)], frame_bytes_, open_bytes_);
  ids_.give_group(group);
}

// Ends a page; its open run is the caller's matter, a compressed one is given back here.
void Pool::forget(std::int32_t page) {
  const std::int32_t number = number_of(page);
  if (number != 0)
    give(records_[at(page)].offset_bytes, classes_[number].run_bytes(1), compressed_bytes_);
  --class_pages_[at(number)];
  ++generation_[at(page)];
  sealed_pages_ -= sealed_[at(page)];
  sealed_[at(page)] = 0;
}

void Pool::give(std::int64_t offset_bytes, std::int64_t bytes, std::int64_t& used) {
  unpark();
  used -= bytes;
  space_.give(offset_bytes, bytes);
}

Status Pool::incref(std::span<const std::int32_t> pages) { return add(pages, Count::kOwner); }
Status Pool::decref(std::span<const std::int32_t> pages) { return drop(pages, Count::kOwner); }
Status Pool::io_acquire(std::span<const std::int32_t> pages) { return add(pages, Count::kIo); }
Status Pool::io_release(std::span<const std::int32_t> pages) { return drop(pages, Count::kIo); }

// ---- seals

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

Result<std::int32_t> Pool::add_class(const PageClass& page_class) {
  std::lock_guard lock(mutex_);
  KVCORE_ASSIGN_OR_RETURN(const std::int32_t number, classes_.add(page_class));
  view_.num_classes = classes_.num_views();
  return number;
}

Result<PageClass> Pool::page_class(std::int32_t class_number) const {
  std::lock_guard lock(mutex_);
  if (classes_.knows(class_number)) return classes_[class_number];
  return invalid_argument(
      text("class_number=", class_number, " is out of range: allowed 0 to ", classes_.size() - 1));
}

Status Pool::check_class(std::int32_t class_number) const {
  if (class_number >= 1 && classes_.knows(class_number)) return {};
  return invalid_argument(text("class_number=", class_number, " is out of range: allowed 1 to ",
                               classes_.size() - 1, " (from add_class)"));
}

Result<SealJob> Pool::begin_seal(std::int32_t page, std::int32_t class_number) {
  KVCORE_RETURN_IF_ERROR(check_page(page));
  std::lock_guard lock(mutex_);
  KVCORE_RETURN_IF_ERROR(check_class(class_number));
  if (refs_[at(page)].owner == 0)
    return invalid_argument(text("page=", page, " has no owner: only held pages can be sealed"));
  if (const std::int32_t now = number_of(page); now != 0)
    return invalid_argument(
        text("page=", page, " is of class ", now, " already: only open pages can be sealed"));
  const std::int64_t bytes = classes_[class_number].run_bytes(1);
  if (fails(faults_.get(), "pool.seal"))
    return Error{ErrorCode::kOutOfPages, text("page=", page, " finds no run of ", bytes, " bytes")};
  auto offset = space_.take(bytes, End::kHigh);
  if (!offset) {
    unpark();
    offset = space_.take(bytes, End::kHigh);
  }
  if (!offset)
    return Error{ErrorCode::kOutOfPages,
                 text("page=", page, " finds no run of ", bytes, " bytes: ", space_.free_bytes(),
                      " bytes are free in ", space_.num_spans(), " places")};
  compressed_bytes_ += bytes;
  ++refs_[at(page)].owner;
  return SealJob{page, class_number, classes_.single_id(class_number), *offset};
}

Status Pool::end_seal(const SealJob& job, bool done) {
  Status status;
  {
    std::lock_guard lock(mutex_);
    PageRecord& record = records_[at(job.page)];
    if (done && number_of(job.page) != 0)
      status = invalid_argument(text("page=", job.page, " was sealed by someone else meanwhile"));
    if (!done || !status) {
      give(job.offset_bytes, classes_[job.class_number].run_bytes(1), compressed_bytes_);
    } else {
      if (refs_[at(job.page)].io == 0) {
        leave_open_run(job.page, record.offset_bytes);
      } else {
        left_.emplace(job.page, record.offset_bytes);
      }
      record = {job.offset_bytes, job.class_id, 0};
      --class_pages_[0];
      ++class_pages_[at(job.class_number)];
      sealed_pages_ += sealed_[at(job.page)] == 0;
      sealed_[at(job.page)] = 1;
    }
  }
  const Status dropped = drop(std::array{job.page}, Count::kOwner);
  return status ? dropped : status;
}

// The open bytes that `page` had are no longer its own.
void Pool::leave_open_run(std::int32_t page, std::int64_t offset_bytes) {
  const std::int32_t group = page / extent_;
  if (ids_.is_split(group)) {
    give(offset_bytes, single_bytes_, open_bytes_);
  } else if (--in_frame_[at(group)] == 0) {
    give(frame_at_[at(group)], frame_bytes_, open_bytes_);
  }
}

// ---- questions

std::int32_t Pool::number_of(std::int32_t page) const {
  return classes_.number_of(records_[at(page)].class_id);
}

Result<std::uint64_t> Pool::generation(std::int32_t page) const {
  KVCORE_RETURN_IF_ERROR(check_page(page));
  std::lock_guard lock(mutex_);
  return generation_[at(page)];
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

Result<PagePlace> Pool::place(std::int32_t page) const {
  KVCORE_RETURN_IF_ERROR(check_page(page));
  std::lock_guard lock(mutex_);
  const std::int32_t number = number_of(page);
  const bool single = ids_.is_split(page / extent_);
  const std::int64_t stride = single ? spec_.slice_bytes() : spec_.layer_stride_bytes();
  return PagePlace{records_[at(page)].offset_bytes, number == 0 ? stride : 0, number};
}

Result<Unit> Pool::unit_refs(std::int32_t page, std::span<PageRefs> out) const {
  KVCORE_RETURN_IF_ERROR(check_page(page));
  if (out.size() != at(extent_))
    return invalid_argument(text("out has ", out.size(), " entries: allowed ", extent_));
  std::lock_guard lock(mutex_);
  const Unit unit =
      ids_.is_split(page / extent_) ? Unit{page, 1} : Unit{page / extent_ * extent_, extent_};
  std::copy_n(refs_.begin() + unit.first, unit.count, out.begin());
  return unit;
}

Result<std::int64_t> Pool::bytes_held_only_by(std::span<const std::uint8_t> refs) const {
  if (refs.size() != refs_.size())
    return invalid_argument(text("refs has ", refs.size(), " entries: allowed ", refs_.size()));
  std::lock_guard lock(mutex_);
  const auto is_only = [&](std::int32_t page) {
    return refs_[at(page)].io == 0 && refs_[at(page)].owner == refs[at(page)];
  };
  const auto compressed = [&](std::int32_t page) {
    const std::int32_t number = number_of(page);
    return number == 0 ? 0 : classes_[number].run_bytes(1);
  };
  std::int64_t bytes = 0;
  for (std::int32_t group = 0; group < static_cast<std::int32_t>(live_pages_.size()); ++group) {
    const std::int32_t first = group * extent_, last = first + extent_;
    if (ids_.is_split(group)) {
      for (std::int32_t page = first; page < last; ++page) {
        if (!ids_.is_loose(page) && is_only(page))
          bytes += number_of(page) == 0 ? single_bytes_ : compressed(page);
      }
    } else if (live_pages_[at(group)] > 0) {
      std::int64_t here = in_frame_[at(group)] > 0 ? frame_bytes_ : 0;
      bool only = true;
      for (std::int32_t page = first; page < last && only; ++page) {
        only = is_only(page);
        here += compressed(page);
      }
      bytes += only ? here : 0;
    }
  }
  return bytes;
}

void Pool::set_faults(std::shared_ptr<FaultPlan> faults) {
  std::lock_guard lock(mutex_);
  faults_ = std::move(faults);
}

PoolStats Pool::stats() const {
  std::lock_guard lock(mutex_);
  return {num_frames_,
          std::min(free_frames(), num_frames_),
          view_.num_pages,
          held_pages_,
          io_pages_,
          sealed_pages_,
          arena_->bytes(),
          arena_->huge_bytes(),
          num_frames_ * frame_bytes_ - open_bytes_ - compressed_bytes_,
          open_bytes_,
          compressed_bytes_};
}

std::vector<std::int64_t> Pool::class_pages() const {
  std::lock_guard lock(mutex_);
  return {class_pages_.begin(), class_pages_.begin() + classes_.size()};
}

std::byte* Pool::slice(std::int32_t page, std::int32_t layer) const noexcept {
  const PageRecord& record = records_[at(page)];
  return view_.arena + record.offset_bytes + view_.classes[record.class_id].layers[layer].run_bytes;
}

}  // namespace kvcore::pages
