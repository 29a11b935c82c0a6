// How one prepared batch is cut into work units, for the layers of one window. What is computed,
// and each row's bits, do not depend on it. Thread rules: built by one thread; const afterwards.
// Units: tokens, rows of (token, q head).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/page_layout.h"
#include "kernels/attention/unit.h"

namespace kvcore::kernels {

inline std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
inline std::int64_t whole_lines(std::int64_t floats) {
  return ceil_div(floats, kMaxLanes) * kMaxLanes;
}

// The first token that new token t of a sequence sees, at least 0; window 0 hides nothing.
inline std::int64_t first_seen(std::int64_t window, std::int64_t context_len, std::int64_t q_len,
                               std::int64_t t) {
  const std::int64_t first = context_len - q_len + 1 + t - window;
  return window == 0 || first < 0 ? 0 : first;
}

struct PlanSequence {
  std::int64_t first_token, q_len, context_len;
  std::int64_t first_page;  // in the plan's page ids
};

// A part of one sequence's rows, or of all rows that see the same pages. Cut along segments,
// several units share a fold.
struct WorkUnit {
  std::int64_t sequence;
  std::int64_t t0, t1;
  std::int32_t h0, h1;
  std::int64_t segment0 = 0, segment1 = 0;
  std::int64_t partial_row = -1;  // into partials; -1: the unit writes out itself
  std::int64_t member = -1;       // t counts members from here: one token of each sequence
  std::int64_t ref = -1;          // of a fold: into refs, one a segment
};

struct PlanBatch {  // belongs to the plan
  const PagesView* pages;
  std::int32_t num_q_heads;
  std::int64_t num_threads;
  std::span<const PlanSequence> sequences;
  const std::int32_t* page_ids;
};

class Schedule {
 public:
  // window: tokens that a row sees, its own included; 0: all up to its own.
  explicit Schedule(std::int64_t window) : window_(window) {}

  void build(const PlanBatch& batch);

  std::int64_t window() const noexcept { return window_; }
  std::span<const WorkUnit> units() const noexcept { return units_; }
  std::span<const WorkUnit> folds() const noexcept { return folds_; }
  const std::int32_t* members() const noexcept { return members_.data(); }
  const PartialRef* refs() const noexcept { return refs_.data(); }
  std::int64_t max_rows() const noexcept { return max_rows_; }  // of one unit
  std::int64_t partial_rows() const noexcept { return partial_rows_; }

 private:
  const PlanSequence& at(std::int64_t s) const {
    return batch_.sequences[static_cast<std::size_t>(s)];
  }
  std::int64_t num_seqs() const { return static_cast<std::int64_t>(batch_.sequences.size()); }
  std::int32_t group() const { return batch_.num_q_heads / batch_.pages->num_kv_heads; }
  const std::int32_t* page_ids(std::int64_t s) const { return batch_.page_ids + at(s).first_page; }
  std::int64_t first_of(std::int64_t s, std::int64_t t) const {
    return first_seen(window_, at(s).context_len, at(s).q_len, t);
  }
  void cut(std::int64_t s);
  void add_unit(const WorkUnit& unit, bool by_segment, std::int64_t shared_segments);
  void find_shared();
  void share(std::int64_t first, std::int64_t last, std::int64_t segment);
  std::int64_t common_segments(std::int64_t a, std::int64_t b) const;
  bool few_units() const;

  std::int64_t window_;
  PlanBatch batch_{};
  std::vector<WorkUnit> units_, folds_;
  // Sequences of one new token each, ordered by their pages, so that equal prefixes are neighbours;
  // the segments each has in common with the next; their tokens.
  std::vector<std::int32_t> order_, common_, members_;
  std::vector<std::vector<PartialRef>> shared_;  // of each sequence, its shared segments
  std::vector<PartialRef> refs_;                 // of the folds
  std::int64_t max_rows_ = 0, partial_rows_ = 0;
};

}  // namespace kvcore::kernels
