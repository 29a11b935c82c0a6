// SequencePages: the pages of one sequence in order, and the one place that gives them back.
// release() may be called by any number of paths (finish, cancel, error, destructor): the first one
// drops the owner refs, the others do nothing.
//
// Invariants: holds exactly one owner ref of each entry of pages(); num_tokens <= capacity.
// Thread rules: one thread, except release(), of which the first of any threads wins. Units:
// tokens, pages.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "base/result.h"
#include "pages/pool.h"

namespace kvcore::pages {

class SequencePages {
 public:
  explicit SequencePages(std::shared_ptr<Pool> pool) : pool_(std::move(pool)) {}
  ~SequencePages();
  SequencePages(const SequencePages&) = delete;
  SequencePages& operator=(const SequencePages&) = delete;

  // Takes over the caller's owner refs of `prefix`, pages that hold the first `num_tokens` tokens
  // (what a prefix match returned). Only into an empty sequence.
  Status adopt(std::span<const std::int32_t> prefix, std::int64_t num_tokens);
  // Makes room for a total of num_tokens and counts them as held; all or nothing.
  Status grow(std::int64_t num_tokens);
  // Keeps the first `num_tokens` tokens, 0 to num_tokens(); pages past them go back, except what is
  // left of the frame the last kept token lies in when this sequence allocated it.
  Status truncate(std::int64_t num_tokens);
  // Points the first pages at equal ones (those of the prefix index): the new refs are taken before
  // the old ones are dropped.
  Status replace_prefix(std::span<const std::int32_t> pages);
  void release();

  const std::vector<std::int32_t>& pages() const noexcept { return pages_; }
  std::int64_t num_tokens() const noexcept { return num_tokens_; }
  std::int64_t capacity_tokens() const noexcept;
  bool released() const noexcept { return released_; }

 private:
  Status check_live() const;
  std::int64_t page_size() const noexcept { return pool_->spec().options().page_size; }

  std::shared_ptr<Pool> pool_;
  std::vector<std::int32_t> pages_;
  std::int64_t num_tokens_ = 0;
  std::atomic<bool> released_ = false;
};

}  // namespace kvcore::pages
