// Sealer: full pages that wait to be sealed, first come, first sealed, and how faithful pages are.
//
// A sequence reads pages by a *table*: 0 = open pages only, then a compressed class each, in the
// order they were offered. Each table has a rank, 0 the most faithful: open pages, then the classes
// given to make(), the most faithful first. A page counts as the rank of what it will be from add()
// on, and as the worst rank of the pages it was computed over; one that arrived compressed counts
// as its class. offer() gives later sequences other tables of the same ranks; sequences and pages
// of earlier ones keep theirs.
//
// Pages freed or sealed meanwhile are passed over; one that holds a number which cannot be encoded
// stays open for good (refused() counts it). Counts of readers never go below zero. Thread rules:
// one thread; no kernel reads the pages while step() or run() does. Units: pages.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <vector>

#include "base/result.h"
#include "compress/page_meter.h"
#include "pages/pool.h"

namespace kvcore::compress {

class Sealer {
 public:
  // Offers the classes, the most faithful first. measure: look at a sample of the pages sealed.
  static Result<std::unique_ptr<Sealer>> make(std::shared_ptr<pages::Pool> pool,
                                              std::span<const pages::PageClass> classes,
                                              bool measure);
  // Adds the classes to the pool, as many as make() got: from now on tables() names them. A rank
  // whose class stays the same keeps its table.
  Status offer(std::span<const pages::PageClass> classes);

  // A sequence of `table` holds `pages` until drop(): they are not sealed below its rank.
  Status hold(std::span<const std::int32_t> pages, std::int32_t table);
  Status drop(std::span<const std::int32_t> pages, std::int32_t table);
  // How many leading pages a sequence of `table` can take.
  Result<std::int64_t> faithful(std::span<const std::int32_t> pages, std::int32_t table) const;
  // `pages`, in order, are one sequence: each counts as the least faithful before it.
  Status computed(std::span<const std::int32_t> pages);
  // Queues pages, all tokens of which are in place; how many of them are new here. table 0: the
  // least faithful one. Pages stay as they are that a reader of a better rank holds. high_first:
  // from the highest address down instead of in their order: runs take the high end of a hole, so
  // that it grows into one piece below them, where the other way round slivers stay between them.
  Result<std::int64_t> add(std::span<const std::int32_t> pages, std::int32_t table,
                           bool high_first);
  // A step's share of the queue; busy: sequences decode, so keep it short.
  Status step(bool busy);
  // Seals up to max_pages; fewer when none are left or no bytes are free for one.
  Result<std::int64_t> run(std::int64_t max_pages);

  // Pages of the table's class in place of open single ones that hold nothing yet, for content that
  // arrives compressed; a sequence of `table` holds them as it held those. Table 0, or no bytes for
  // them: open ones.
  Result<std::vector<std::int32_t>> exchange(std::span<const std::int32_t> pages,
                                             std::int32_t table);

  const pages::Pool& pool() const noexcept { return *pool_; }
  // By rank, open pages first: the table and class number that new sequences get.
  const std::vector<std::int32_t>& tables() const noexcept { return current_; }
  std::int32_t class_number(std::int32_t rank) const noexcept {
    return tables_[at(current_[at(rank)])].class_number;
  }
  std::int32_t least() const noexcept { return static_cast<std::int32_t>(current_.size()) - 1; }
  std::int64_t waiting() const noexcept { return static_cast<std::int64_t>(queue_.size()); }
  std::int64_t held() const noexcept { return held_; }  // pages, once for each reader counted
  std::int64_t sealed() const noexcept { return sealed_; }
  std::int64_t refused() const noexcept { return refused_; }
  PageMeter* meter() noexcept { return meter_.get(); }    // null unless make() was asked to measure
  bool under_way() const noexcept { return under_way_; }  // the last step made the queue shorter
  std::int64_t step_pages() const noexcept { return step_pages_; }
  void set_step_pages(std::int64_t pages) noexcept { step_pages_ = pages; }

 private:
  static constexpr std::uint64_t kNever = ~std::uint64_t{0};
  struct Table {
    std::int32_t rank;
    std::int32_t class_number;
  };
  struct PageState {
    std::uint64_t queued = kNever;  // generation
    std::uint64_t marked = kNever;  // generation that `rank` is of
    std::int32_t rank = 0;
  };
  struct Waiting {
    std::int32_t page;
    std::int32_t class_number;
    std::uint64_t generation;
  };
  static std::size_t at(std::int32_t i) noexcept { return static_cast<std::size_t>(i); }
  explicit Sealer(std::shared_ptr<pages::Pool> pool);
  Result<std::int32_t> rank_of(std::int32_t table) const;
  Status check(std::span<const std::int32_t> pages) const;
  Result<std::int32_t> counts_as(std::int32_t page) const;
  std::int32_t rank_of_class(std::int32_t class_number) const noexcept;
  Status mark(std::int32_t page, std::int32_t rank);
  bool read_better(std::int32_t page, std::int32_t rank) const noexcept;
  Status queue(std::int32_t page, const Table& table);
  Result<bool> still_open(const Waiting& next) const;

  const std::shared_ptr<pages::Pool> pool_;
  std::unique_ptr<PageMeter> meter_;
  std::vector<Table> tables_;
  std::vector<std::int32_t> current_;               // by rank
  std::vector<PageState> state_;                    // [num_pages]
  std::vector<std::vector<std::int32_t>> readers_;  // by rank but the least, [num_pages]
  std::deque<Waiting> queue_;
  std::int64_t step_pages_;
  std::int64_t held_ = 0;
  std::int64_t sealed_ = 0;
  std::int64_t refused_ = 0;
  bool under_way_ = false;
};

}  // namespace kvcore::compress
