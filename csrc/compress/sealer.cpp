#include "compress/sealer.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/text.h"
#include "compress/seal.h"

namespace kvcore::compress {
namespace {

// Of open pages between two steps: about two milliseconds, a core seals 3 bytes per nanosecond.
constexpr std::int64_t kStepBytes = 6 << 20;
constexpr std::int64_t kIdleSteps = 8;  // where no sequence waits for the next step

}  // namespace

Sealer::Sealer(std::shared_ptr<pages::Pool> pool)
    : pool_(std::move(pool)),
      tables_{{0, 0}},
      current_{0},
      state_(static_cast<std::size_t>(pool_->num_pages())),
      step_pages_(std::max<std::int64_t>(1, kStepBytes / pool_->spec().page_bytes())) {}

Result<std::unique_ptr<Sealer>> Sealer::make(std::shared_ptr<pages::Pool> pool,
                                             std::span<const pages::PageClass> classes,
                                             bool measure) {
  if (classes.empty()) return invalid_argument("classes is empty: allowed 1 and more");
  std::unique_ptr<Sealer> sealer(new Sealer(std::move(pool)));
  sealer->current_.resize(1 + classes.size());
  sealer->readers_.assign(classes.size(), std::vector<std::int32_t>(sealer->state_.size()));
  if (measure) sealer->meter_ = std::make_unique<PageMeter>(sealer->pool_->spec());
  KVCORE_RETURN_IF_ERROR(sealer->offer(classes));
  return sealer;
}

Status Sealer::offer(std::span<const pages::PageClass> classes) {
  if (classes.size() + 1 != current_.size())
    return invalid_argument(
        text("classes has ", classes.size(), " entries: allowed ", current_.size() - 1));
  std::vector<std::int32_t> numbers;
  for (const pages::PageClass& page_class : classes) {
    KVCORE_ASSIGN_OR_RETURN(const std::int32_t number, pool_->add_class(page_class));
    numbers.push_back(number);
  }
  for (std::size_t rank = 1; rank < current_.size(); ++rank) {
    if (tables_[at(current_[rank])].class_number == numbers[rank - 1]) continue;
    current_[rank] = static_cast<std::int32_t>(tables_.size());
    tables_.push_back({static_cast<std::int32_t>(rank), numbers[rank - 1]});
  }
  return {};
}

Status Sealer::hold(std::span<const std::int32_t> pages, std::int32_t table) {
  KVCORE_ASSIGN_OR_RETURN(const std::int32_t rank, rank_of(table));
  KVCORE_RETURN_IF_ERROR(check(pages));
  if (rank == least()) return {};  // any page may be sealed under these
  for (const std::int32_t page : pages) ++readers_[at(rank)][at(page)];
  held_ += static_cast<std::int64_t>(pages.size());
  return {};
}

Status Sealer::drop(std::span<const std::int32_t> pages, std::int32_t table) {
  KVCORE_ASSIGN_OR_RETURN(const std::int32_t rank, rank_of(table));
  KVCORE_RETURN_IF_ERROR(check(pages));
  if (rank == least()) return {};
  for (const std::int32_t page : pages) {
    std::int32_t& readers = readers_[at(rank)][at(page)];
    if (readers == 0) return invalid_argument(text("page=", page, " is not held by table ", table));
    --readers;
    --held_;
  }
  return {};
}

Result<std::int64_t> Sealer::faithful(std::span<const std::int32_t> pages,
                                      std::int32_t table) const {
  KVCORE_ASSIGN_OR_RETURN(const std::int32_t rank, rank_of(table));
  KVCORE_RETURN_IF_ERROR(check(pages));
  std::int64_t count = 0;
  if (rank == least()) return static_cast<std::int64_t>(pages.size());
  for (const std::int32_t page : pages) {
    KVCORE_ASSIGN_OR_RETURN(const std::int32_t found, counts_as(page));
    if (found > rank) break;
    ++count;
  }
  return count;
}

Status Sealer::computed(std::span<const std::int32_t> pages) {
  KVCORE_RETURN_IF_ERROR(check(pages));
  std::int32_t worst = 0;
  for (const std::int32_t page : pages) {
    KVCORE_ASSIGN_OR_RETURN(const std::int32_t found, counts_as(page));
    worst = std::max(worst, found);
    if (worst > found) KVCORE_RETURN_IF_ERROR(mark(page, worst));
  }
  return {};
}

Result<std::int64_t> Sealer::add(std::span<const std::int32_t> pages, std::int32_t table,
                                 bool high_first) {
  KVCORE_RETURN_IF_ERROR(rank_of(table));
  KVCORE_RETURN_IF_ERROR(check(pages));
  const Table& wanted = tables_[at(table == 0 ? current_.back() : table)];
  std::vector<std::int32_t> order(pages.begin(), pages.end());
  if (high_first)
    std::stable_sort(order.begin(), order.end(), [this](std::int32_t a, std::int32_t b) {
      return pool_->slice(a, 0) > pool_->slice(b, 0);
    });
  const std::int64_t before = waiting();
  for (const std::int32_t page : order) KVCORE_RETURN_IF_ERROR(queue(page, wanted));
  return waiting() - before;
}

Result<std::vector<std::int32_t>> Sealer::exchange(std::span<const std::int32_t> pages,
                                                   std::int32_t table) {
  KVCORE_RETURN_IF_ERROR(rank_of(table));
  KVCORE_RETURN_IF_ERROR(check(pages));
  if (table == 0 || pages.empty()) return std::vector<std::int32_t>(pages.begin(), pages.end());
  const std::int32_t number = tables_[at(table)].class_number;
  // The open ones first: their bytes hold the compressed ones, whatever else is free.
  KVCORE_RETURN_IF_ERROR(drop(pages, table));
  KVCORE_RETURN_IF_ERROR(pool_->decref(pages));
  const auto count = static_cast<std::int64_t>(pages.size());
  auto fresh = pool_->alloc_in_class(count, number);
  if (!fresh) fresh = pool_->alloc(count, 1);  // no run is long enough: as it was
  if (fresh) KVCORE_RETURN_IF_ERROR(hold(*fresh, table));
  return fresh;
}

Status Sealer::step(bool busy) {
  KVCORE_ASSIGN_OR_RETURN(const std::int64_t done, run(step_pages_ * (busy ? 1 : kIdleSteps)));
  under_way_ = done > 0 && !queue_.empty();
  return {};
}

Result<std::int64_t> Sealer::run(std::int64_t max_pages) {
  const std::int64_t before = sealed_;
  while (!queue_.empty() && sealed_ - before < max_pages) {
    const Waiting next = queue_.front();
    KVCORE_ASSIGN_OR_RETURN(const bool open, still_open(next));
    if (open) {
      if (meter_) meter_->pass(*pool_, next.page);
      const Status status = seal_pages(*pool_, {&next.page, 1}, next.class_number);
      if (status)
        ++sealed_;
      else if (status.error().code == ErrorCode::kInvalidArgument)
        ++refused_;
      else if (status.error().code == ErrorCode::kOutOfPages)
        break;
      else
        return status.error();
    }
    queue_.pop_front();
  }
  return sealed_ - before;
}

Result<std::int32_t> Sealer::rank_of(std::int32_t table) const {
  KVCORE_RETURN_IF_ERROR(
      check_range("table", table, 0, static_cast<std::int64_t>(tables_.size()) - 1));
  return tables_[at(table)].rank;
}

Status Sealer::check(std::span<const std::int32_t> pages) const {
  for (const std::int32_t page : pages)
    KVCORE_RETURN_IF_ERROR(
        check_range("page", page, 0, static_cast<std::int64_t>(state_.size()) - 1));
  return {};
}

Result<std::int32_t> Sealer::counts_as(std::int32_t page) const {
  const PageState& state = state_[at(page)];
  KVCORE_ASSIGN_OR_RETURN(const pages::PagePlace place, pool_->place(page));
  const std::int32_t held_as = place.class_number == 0 ? 0 : rank_of_class(place.class_number);
  if (state.rank == 0) return held_as;
  KVCORE_ASSIGN_OR_RETURN(const std::uint64_t generation, pool_->generation(page));
  return state.marked == generation ? std::max(state.rank, held_as) : held_as;
}

// Of pages that arrived compressed. A class that was never offered counts as the least faithful.
std::int32_t Sealer::rank_of_class(std::int32_t class_number) const noexcept {
  for (const Table& table : tables_)
    if (table.class_number == class_number) return table.rank;
  return least();
}

Status Sealer::mark(std::int32_t page, std::int32_t rank) {
  KVCORE_ASSIGN_OR_RETURN(const std::uint64_t generation, pool_->generation(page));
  state_[at(page)].marked = generation;
  state_[at(page)].rank = rank;
  return {};
}

bool Sealer::read_better(std::int32_t page, std::int32_t rank) const noexcept {
  for (std::int32_t better = 0; better < rank; ++better)
    if (readers_[at(better)][at(page)] > 0) return true;
  return false;
}

Status Sealer::queue(std::int32_t page, const Table& table) {
  KVCORE_ASSIGN_OR_RETURN(const std::uint64_t generation, pool_->generation(page));
  KVCORE_ASSIGN_OR_RETURN(const pages::PagePlace place, pool_->place(page));
  PageState& state = state_[at(page)];
  if (state.queued == generation || place.class_number != 0 || read_better(page, table.rank))
    return {};
  KVCORE_ASSIGN_OR_RETURN(const std::int32_t now, counts_as(page));
  state = {generation, generation, std::max(now, table.rank)};
  queue_.push_back({page, table.class_number, generation});
  return {};
}

Result<bool> Sealer::still_open(const Waiting& next) const {
  KVCORE_ASSIGN_OR_RETURN(const pages::PageRefs refs, pool_->refs(next.page));
  KVCORE_ASSIGN_OR_RETURN(const std::uint64_t generation, pool_->generation(next.page));
  KVCORE_ASSIGN_OR_RETURN(const pages::PagePlace place, pool_->place(next.page));
  return refs.owner > 0 && generation == next.generation && place.class_number == 0;
}

}  // namespace kvcore::compress
