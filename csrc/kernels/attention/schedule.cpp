#include "kernels/attention/schedule.h"

#include <algorithm>

namespace kvcore::kernels {
namespace {

constexpr std::int64_t kWideRows = 256;   // up to here one unit takes all KV heads, page after page
constexpr std::int64_t kBlockRows = 192;  // rows of a unit of one KV head: o and q stay in L2
constexpr std::int64_t kUnitsPerThread = 4;
constexpr std::int64_t kSharedTokens = 64;  // sequences of a unit over a common prefix, at most

}  // namespace

void Schedule::build(const PlanBatch& batch) {
  batch_ = batch;
  units_.clear();
  folds_.clear();
  max_rows_ = partial_rows_ = 0;
  find_shared();
  for (std::int64_t s = 0; s < num_seqs(); ++s) cut(s);
}

// Leading segments that lie whole in both sequences, on the same pages.
std::int64_t Schedule::common_segments(std::int64_t a, std::int64_t b) const {
  const std::int64_t pages = kSegmentTokens / batch_.pages->page_size;
  const std::int64_t most = std::min(at(a).context_len, at(b).context_len) / kSegmentTokens;
  const std::int32_t *x = page_ids(a), *y = page_ids(b);
  const auto differ = std::mismatch(x, x + most * pages, y).first;
  return (differ - x) / pages;
}

// Sequences that decode over the same leading pages attend to them together: the pages are read
// once and multiplied with all their queries. Rows and segments stay what they are, so no bit
// changes. A sequence whose window has left its first token behind reads its own pages alone.
void Schedule::find_shared() {
  order_.clear();
  members_.clear();
  refs_.clear();
  shared_.resize(batch_.sequences.size());
  for (std::int64_t s = 0; s < num_seqs(); ++s) {
    shared_[static_cast<std::size_t>(s)].clear();
    if (at(s).q_len == 1 && at(s).context_len >= kSegmentTokens && first_of(s, 0) == 0)
      order_.push_back(static_cast<std::int32_t>(s));
  }
  if (order_.size() < 2) return;
  const auto whole_pages = [this](std::int32_t s) {
    return std::span(page_ids(s),
                     static_cast<std::size_t>(at(s).context_len / batch_.pages->page_size));
  };
  std::sort(order_.begin(), order_.end(), [&](std::int32_t a, std::int32_t b) {
    const auto x = whole_pages(a), y = whole_pages(b);
    return std::lexicographical_compare(x.begin(), x.end(), y.begin(), y.end());
  });
  common_.clear();
  for (std::size_t i = 0; i + 1 < order_.size(); ++i)
    common_.push_back(static_cast<std::int32_t>(common_segments(order_[i], order_[i + 1])));
  common_.push_back(0);
  for (std::int64_t segment = 0;; ++segment) {
    bool any = false;
    const auto last = static_cast<std::int64_t>(order_.size());
    for (std::int64_t i = 0, from; (from = i) < last; i = std::max(i, from + 1)) {
      while (common_[static_cast<std::size_t>(i)] > segment) ++i;
      if (i == from) continue;
      share(from, ++i, segment);
      any = true;
    }
    if (!any) return;
  }
}

// One segment of the sequences [first, last) of order_, in units of at most kSharedTokens of them.
void Schedule::share(std::int64_t first, std::int64_t last, std::int64_t segment) {
  for (std::int64_t i = first, n; i < last; i += n) {
    n = std::min(last - i, kSharedTokens);
    const std::int64_t rows = n * batch_.num_q_heads;
    units_.push_back({.sequence = order_[static_cast<std::size_t>(i)],
                      .t0 = 0,
                      .t1 = n,
                      .h0 = 0,
                      .h1 = batch_.pages->num_kv_heads,
                      .segment0 = segment,
                      .segment1 = segment + 1,
                      .partial_row = partial_rows_,
                      .member = static_cast<std::int64_t>(members_.size())});
    for (std::int64_t j = 0; j < n; ++j) {
      const std::int32_t s = order_[static_cast<std::size_t>(i + j)];
      members_.push_back(static_cast<std::int32_t>(at(s).first_token));
      shared_[static_cast<std::size_t>(s)].push_back(
          {partial_rows_, static_cast<std::int32_t>(n), static_cast<std::int32_t>(j)});
    }
    max_rows_ = std::max(max_rows_, rows);
    partial_rows_ += whole_lines(rows);
  }
}

bool Schedule::few_units() const {
  return batch_.num_threads > 1 && num_seqs() < kUnitsPerThread * batch_.num_threads;
}

// Cuts a sequence into units. How it is cut changes no bit of the result: rows are independent, and
// segments are always the same and folded in the same order.
void Schedule::cut(std::int64_t s) {
  const PlanSequence& seq = at(s);
  const std::int64_t heads = batch_.pages->num_kv_heads;
  const bool few = few_units();
  const auto shared = static_cast<std::int64_t>(shared_[static_cast<std::size_t>(s)].size());
  if (shared > 0) {
    add_unit({.sequence = s, .t0 = 0, .t1 = 1, .h0 = 0, .h1 = batch_.pages->num_kv_heads}, few,
             shared);
    return;
  }
  if (seq.q_len * batch_.num_q_heads <= std::max<std::int64_t>(kWideRows, batch_.num_q_heads)) {
    const std::int64_t segments =
        ceil_div(seq.context_len, kSegmentTokens) - first_of(s, 0) / kSegmentTokens;
    const bool by_segment = few && segments > 1;
    // A short context on several threads is cut by heads instead.
    const std::int64_t parts =
        few && !by_segment ? std::min<std::int64_t>(heads, batch_.num_threads) : 1;
    for (std::int64_t i = 0; i < parts; ++i)
      add_unit({.sequence = s,
                .t0 = 0,
                .t1 = seq.q_len,
                .h0 = static_cast<std::int32_t>(heads * i / parts),
                .h1 = static_cast<std::int32_t>(heads * (i + 1) / parts)},
               by_segment, 0);
    return;
  }
  const std::int64_t block = std::max<std::int64_t>(1, kBlockRows / group());
  for (std::int32_t h = 0; h < heads; ++h)
    for (std::int64_t t = 0; t < seq.q_len; t += block)
      add_unit({.sequence = s, .t0 = t, .t1 = std::min(seq.q_len, t + block), .h0 = h, .h1 = h + 1},
               false, 0);
}

// by_segment: a unit for each segment after the shared ones, otherwise one unit for all.
void Schedule::add_unit(const WorkUnit& unit, bool by_segment, std::int64_t shared_segments) {
  if (unit.t0 == unit.t1) return;
  const PlanSequence& seq = at(unit.sequence);
  const std::int64_t visible = std::max<std::int64_t>(0, seq.context_len - seq.q_len + unit.t1);
  const std::int64_t segments = ceil_div(visible, kSegmentTokens);
  const std::int64_t rows = (unit.h1 - unit.h0) * (unit.t1 - unit.t0) * group();
  max_rows_ = std::max(max_rows_, rows);
  WorkUnit whole = unit;
  whole.segment0 = first_of(unit.sequence, unit.t0) / kSegmentTokens;
  whole.segment1 = segments;
  if (!by_segment && shared_segments == 0) {
    units_.push_back(whole);
    return;
  }
  whole.ref = static_cast<std::int64_t>(refs_.size());
  folds_.push_back(whole);
  const auto& shared = shared_[static_cast<std::size_t>(unit.sequence)];
  refs_.insert(refs_.end(), shared.begin(), shared.end());
  for (std::int64_t i = std::max(whole.segment0, shared_segments); i < segments;) {
    WorkUnit part = unit;
    part.segment0 = i;
    part.segment1 = by_segment ? i + 1 : segments;
    part.partial_row = partial_rows_;
    units_.push_back(part);
    for (; i < part.segment1; ++i, partial_rows_ += whole_lines(rows))
      refs_.push_back({partial_rows_, static_cast<std::int32_t>(unit.t1 - unit.t0), 0});
  }
}

}  // namespace kvcore::kernels
