// Pool: hands out pages, counts who holds them, and tells kernels where they lie.
//
// Page id = frame * extent_pages + i. Memory is given and taken back by whole frames: a frame is
// free when all its pages have owner refs 0 and io refs 0; at that moment its generation grows by
// one, so an old (page, generation) pair is recognisably stale. Owner refs say "this page's content
// is wanted", io refs say "a transfer still reads or writes these bytes"; neither stands in for the
// other. A page nobody owns can gain no new refs. Sealed pages are immutable; a seal ends when the
// frame is freed.
//
// Invariants (checked by the stateful tests): counts never go below zero and are never clamped; a
// call that fails changes nothing; free + held frames = num_frames. Thread rules: every member
// function is thread-safe (one internal mutex); view() is constant for the pool's life and its
// records never move. No clock, no threads, no system call after make(). Units: pages, frames,
// bytes as named.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "base/fault.h"
#include "base/page_layout.h"
#include "base/result.h"
#include "pages/arena.h"
#include "pages/page_spec.h"

namespace kvcore::pages {

struct PoolStats {
  std::int64_t num_frames;
  std::int64_t free_frames;
  std::int64_t num_pages;
  std::int64_t held_pages;  // with an owner ref
  std::int64_t io_pages;    // with an io ref
  std::int64_t sealed_pages;
  std::int64_t arena_bytes;
  std::int64_t arena_huge_bytes;
};

struct PageRefs {
  std::int32_t owner;
  std::int32_t io;
};

class Pool {
 public:
  // arena: may be null, then the pool makes one of num_frames * frame_bytes.
  static Result<std::shared_ptr<Pool>> make(const PageSpec& spec, std::int64_t num_frames,
                                            std::shared_ptr<Arena> arena, bool huge_pages);
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // ceil(num_pages / extent_pages) frames, all or nothing; each page gets owner ref 1. Pages beyond
  // num_pages are the rest of the last frame: the caller owns them too (a sequence grows into
  // them).
  Result<std::vector<std::int32_t>> alloc(std::int64_t num_pages);
  // The list may name a page several times; each time counts.
  Status incref(std::span<const std::int32_t> pages);
  Status decref(std::span<const std::int32_t> pages);
  Status io_acquire(std::span<const std::int32_t> pages);
  Status io_release(std::span<const std::int32_t> pages);
  Status seal(std::span<const std::int32_t> pages);

  Result<std::uint64_t> generation(std::int32_t page) const;
  Result<PageRefs> refs(std::int32_t page) const;
  Result<bool> is_sealed(std::int32_t page) const;
  // The refs of all pages of the frame `page` lies in; out has extent_pages entries.
  Status frame_refs(std::int32_t page, std::span<PageRefs> out) const;
  PoolStats stats() const;

  const PageSpec& spec() const noexcept { return spec_; }
  const std::shared_ptr<Arena>& arena() const noexcept { return arena_; }
  std::int64_t num_pages() const noexcept { return view_.num_pages; }
  const PagesView& view() const noexcept { return view_; }
  // Test hook: alloc fails as if out of pages where the plan says so (point "pool.alloc").
  void set_faults(std::shared_ptr<FaultPlan> faults);
  // First byte of a slice; the caller has checked page and layer.
  std::byte* slice(std::int32_t page, std::int32_t layer) const noexcept;

 private:
  Pool(const PageSpec& spec, std::int64_t num_frames, std::shared_ptr<Arena> arena,
       std::int64_t offset_bytes);
  enum class Count { kOwner, kIo };
  Status check_page(std::int32_t page) const;
  Status add(std::span<const std::int32_t> pages, Count count);
  Status drop(std::span<const std::int32_t> pages, Count count);
  void free_if_unheld(std::int64_t frame);

  const PageSpec spec_;
  const std::shared_ptr<Arena> arena_;
  const std::int64_t num_frames_;
  std::vector<PageRecord> records_;
  std::vector<HeadBlock> heads_;
  std::vector<LayerView> layers_;
  ClassView class_;
  PagesView view_;

  mutable std::mutex mutex_;
  std::vector<PageRefs> refs_;             // [num_pages]
  std::vector<std::uint8_t> sealed_;       // [num_pages]
  std::vector<std::uint64_t> generation_;  // [num_frames]
  std::vector<std::int32_t> live_pages_;   // [num_frames]: pages with any ref; -1 = free
  std::vector<std::int32_t> free_;         // frames, last freed on top (its bytes are warm)
  std::int64_t held_pages_ = 0;
  std::int64_t io_pages_ = 0;
  std::int64_t sealed_pages_ = 0;
  std::shared_ptr<FaultPlan> faults_;
};

}  // namespace kvcore::pages
