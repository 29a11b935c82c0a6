// Pool: hands out pages and the bytes behind them, counts who holds them, and tells kernels where
// they lie.
//
// Page ids stand in groups of extent_pages: id = group * extent_pages + i. alloc(n) gives whole
// groups, each with one run of bytes (a frame); alloc(n, 1) gives single pages with a run each, for
// sequences whose pages will be compressed. What is allocated together comes free together: a unit
// is a whole group, or a single page. A unit is free when all its pages have owner refs 0 and io
// refs 0; at that moment its generation grows by one, so an old (page, generation) pair is
// recognisably stale. Owner refs say "this page's content is wanted", io refs say "a transfer still
// reads or writes these bytes"; neither stands in for the other. A page nobody owns can gain no new
// refs. Sealed pages are immutable; a seal ends when the unit is freed.
//
// Every page has a class. Open pages (class 0) hold the spec's own format; begin_seal / end_seal
// move a page into a compressed class: other bytes, the same id. The bytes it leaves are free at
// once, or when the last io ref of the page goes (a transfer may still read them). Bytes of a frame
// are free when its last page has left it.
//
// Invariants (checked by the stateful tests): counts never go below zero and are never clamped; a
// call that fails changes nothing; free + open + compressed bytes = all bytes. Thread rules: every
// member function is thread-safe (one internal mutex); view() has a constant address, its records
// never move and change only by alloc and end_seal of that page, its num_classes grows by
// add_class. Who seals a page makes sure that no kernel reads it meanwhile. No clock, no threads,
// no system call after make(). Units: pages, frames, bytes as named.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <unordered_map>
#include <vector>

#include "base/fault.h"
#include "base/page_layout.h"
#include "base/result.h"
#include "pages/arena.h"
#include "pages/class_table.h"
#include "pages/page_ids.h"
#include "pages/page_spec.h"
#include "pages/space.h"

namespace kvcore::pages {

struct PoolStats {
  std::int64_t num_frames;   // that the bytes hold
  std::int64_t free_frames;  // that alloc could give now
  std::int64_t num_pages;    // page ids
  std::int64_t held_pages;   // with an owner ref
  std::int64_t io_pages;     // with an io ref
  std::int64_t sealed_pages;
  std::int64_t arena_bytes;
  std::int64_t arena_huge_bytes;
  std::int64_t free_bytes;  // of this pool
  std::int64_t open_bytes;  // with those that a transfer still reads
  std::int64_t compressed_bytes;
};

struct PageRefs {
  std::int32_t owner;
  std::int32_t io;
};

struct PagePlace {
  std::int64_t offset_bytes;        // of the slice of layer 0, from the arena's base
  std::int64_t layer_stride_bytes;  // to that of the next layer; 0: compressed, layers differ
  std::int32_t class_number;
};

// Pages that come free together.
struct Unit {
  std::int32_t first;
  std::int32_t count;
};

// A page on its way into another class.
struct SealJob {
  std::int32_t page;
  std::int32_t class_number;
  std::int32_t class_id;      // in view().classes
  std::int64_t offset_bytes;  // of the new run
};

class Pool {
 public:
  // arena: may be null, then the pool makes one of num_frames * frame_bytes. page_ids: 0 = as many
  // as the frames have pages; more where compressed pages are to outnumber those.
  static Result<std::shared_ptr<Pool>> make(const PageSpec& spec, std::int64_t num_frames,
                                            std::shared_ptr<Arena> arena, bool huge_pages,
                                            std::int64_t page_ids = 0);
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // All or nothing; each page gets owner ref 1. run_pages: 0 or extent_pages: ceil(num_pages /
  // extent_pages) whole groups, pages beyond num_pages are the rest of the last one and the
  // caller's too (a sequence grows into them). 1: num_pages single pages.
  Result<std::vector<std::int32_t>> alloc(std::int64_t num_pages, std::int32_t run_pages = 0);
  // num_pages single pages that are of a compressed class from the start, for content that comes as
  // it is kept; each with owner ref 1, its bytes not written. Who fills it seals it. All or
  // nothing.
  Result<std::vector<std::int32_t>> alloc_in_class(std::int64_t num_pages,
                                                   std::int32_t class_number);
  // Pages that alloc(n, run_pages) could give now. Asking for single ones joins free frames.
  Result<std::int64_t> free_pages(std::int32_t run_pages = 0);
  // The list may name a page several times; each time counts.
  Status incref(std::span<const std::int32_t> pages);
  Status decref(std::span<const std::int32_t> pages);
  Status io_acquire(std::span<const std::int32_t> pages);
  Status io_release(std::span<const std::int32_t> pages);
  Status seal(std::span<const std::int32_t> pages);

  // A class that pages can be sealed into: its number. An equal one is found again.
  Result<std::int32_t> add_class(const PageClass& page_class);
  // Bytes for `page` in a class; the page gains an owner ref until end_seal. Refuses pages that are
  // free, not owned or compressed. OutOfPages where no run is free (also at fault point
  // "pool.seal").
  Result<SealJob> begin_seal(std::int32_t page, std::int32_t class_number);
  // done: the new run is written, the page is that from now on. Else the new run is given back.
  Status end_seal(const SealJob& job, bool done);

  Result<std::uint64_t> generation(std::int32_t page) const;
  Result<PageRefs> refs(std::int32_t page) const;
  Result<bool> is_sealed(std::int32_t page) const;
  Result<PagePlace> place(std::int32_t page) const;
  // The unit `page` lies in and the refs of its pages, in out[0..count); out has extent_pages
  // entries.
  Result<Unit> unit_refs(std::int32_t page, std::span<PageRefs> out) const;
  // Bytes that came free if each page lost refs[page] owner refs. refs has num_pages entries.
  Result<std::int64_t> bytes_held_only_by(std::span<const std::uint8_t> refs) const;
  PoolStats stats() const;
  std::vector<std::int64_t> class_pages() const;  // allocated, by class number

  const PageSpec& spec() const noexcept { return spec_; }
  const std::shared_ptr<Arena>& arena() const noexcept { return arena_; }
  std::int64_t num_pages() const noexcept { return view_.num_pages; }
  const PagesView& view() const noexcept { return view_; }
  // The class of a number that add_class gave, or 0.
  Result<PageClass> page_class(std::int32_t class_number) const;
  // Test hook: alloc and begin_seal fail as if out of bytes where the plan says so (points
  // "pool.alloc", "pool.seal").
  void set_faults(std::shared_ptr<FaultPlan> faults);
  // First byte of a slice; the caller has checked page and layer.
  std::byte* slice(std::int32_t page, std::int32_t layer) const noexcept;

 private:
  Pool(const PageSpec& spec, std::int64_t num_frames, std::shared_ptr<Arena> arena,
       std::int64_t offset_bytes, std::int64_t num_groups);
  enum class Count { kOwner, kIo };
  Status check_page(std::int32_t page) const;
  Status check_run(std::int32_t run_pages) const;
  Status check_class(std::int32_t class_number) const;
  bool in_singles(std::int32_t run_pages) const { return run_pages == 1 && extent_ > 1; }
  std::int32_t number_of(std::int32_t page) const;
  Error out_of_pages(std::int64_t num_pages, std::int32_t run_pages) const;
  std::int64_t free_frames() const;
  std::int64_t free_singles() const;
  void own(std::int32_t page, std::vector<std::int32_t>& pages);
  std::int32_t take_frame();
  std::int32_t take_single();
  void unpark();
  Status add(std::span<const std::int32_t> pages, Count count);
  Status drop(std::span<const std::int32_t> pages, Count count);
  void settle(std::int32_t page, Count count);
  void free_if_unheld(std::int32_t page);
  void free_group(std::int32_t group);
  void forget(std::int32_t page);
  void give(std::int64_t offset_bytes, std::int64_t bytes, std::int64_t& used);
  void leave_open_run(std::int32_t page, std::int64_t offset_bytes);

  const PageSpec spec_;
  const std::shared_ptr<Arena> arena_;
  const std::int64_t num_frames_;
  const std::int32_t extent_;
  ClassTable classes_;
  const std::int64_t frame_bytes_;
  const std::int64_t single_bytes_;  // of an open page in a run of one
  std::vector<PageRecord> records_;
  PagesView view_;

  mutable std::mutex mutex_;
  Space space_;
  PageIds ids_;
  // Free groups with a frame, last freed on top (it is warm). While only frames come and go, all
  // free bytes are here; as soon as some lie in space_, all do.
  std::vector<std::int32_t> parked_;
  std::vector<std::int64_t> frame_at_;     // [num_groups]: offset of a whole group's frame
  std::vector<std::int32_t> in_frame_;     // [num_groups]: pages that have not left the frame
  std::vector<std::int32_t> live_pages_;   // [num_groups]: of whole groups, with any ref; -1 = free
  std::vector<PageRefs> refs_;             // [num_pages]
  std::vector<std::uint8_t> sealed_;       // [num_pages]
  std::vector<std::uint64_t> generation_;  // [num_pages]
  std::unordered_map<std::int32_t, std::int64_t> left_;  // open runs that transfers still read
  std::vector<std::int64_t> class_pages_;
  std::int64_t held_pages_ = 0;
  std::int64_t io_pages_ = 0;
  std::int64_t sealed_pages_ = 0;
  std::int64_t open_bytes_ = 0;
  std::int64_t compressed_bytes_ = 0;
  std::shared_ptr<FaultPlan> faults_;
};

}  // namespace kvcore::pages
