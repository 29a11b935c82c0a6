// AttentionPlan: paged attention of one batch, prepared once and run for every layer.
//
//   prepare(batch)               validates, copies what it needs of the batch, cuts it into work
//   units append(layer, k, v)          writes the new tokens' K and V into their pages
//   attend(layer, q, out, lse)   causal attention of every new token over its sequence's pages
//
// Sequence s has q_len = cu_seqlens_q[s+1] - cu_seqlens_q[s] new tokens and context_lens[s] tokens
// in KV, the new ones last: new token i is token context_len - q_len + i and sees all up to itself.
// A token that sees nothing (q_len > context_len) gets out = 0 and lse = -inf.
//
// Row invariance: a row's bits depend only on its query and its pages, at a given instruction set
// level: not on the batch, the chunking, the page size or the number of threads. With a window,
// "its pages" are those that it sees.
// Thread rules: one plan is used by one thread at a time; it runs on the ThreadPool it was made
// with. The PagesView and the pool must outlive the plan. No memory is allocated after prepare(),
// but for page scores when they are first asked for.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/dtype.h"
#include "base/page_layout.h"
#include "base/result.h"
#include "base/thread_pool.h"
#include "kernels/attention/schedule.h"
#include "kernels/attention/unit.h"
#include "kernels/layout/layout.h"

namespace kvcore::kernels {

struct BatchArgs {
  std::int64_t num_seqs = 0;
  const std::int32_t* cu_seqlens_q = nullptr;  // [num_seqs + 1], from 0, not decreasing
  const std::int32_t* context_lens = nullptr;  // [num_seqs], new tokens included
  const std::int32_t* block_table = nullptr;   // [num_seqs, max_pages] page ids
  std::int64_t max_pages = 0;
  std::int64_t block_table_stride = 0;  // elements between rows
};

struct AttendArgs {
  const void* q = nullptr;    // [tokens, num_q_heads, head_dim_k]
  std::int64_t q_stride = 0;  // elements between tokens; heads and dims contiguous
  void* out = nullptr;        // [tokens, num_q_heads, head_dim_v]
  std::int64_t out_stride = 0;
  float* lse = nullptr;        // [tokens, num_q_heads] natural log, contiguous; may be null
  DType dtype = DType::kBf16;  // of q and out, whatever the pages' format
  // [num_seqs, max_pages] contiguous; may be null. Of sequences with one new token: the probability
  // mass of each page, summed over q heads (a row sums to num_q_heads); 0 for other sequences.
  float* page_scores = nullptr;
};

struct PlanOptions {
  // Sliding window, of all layers or of each: a token at position p sees (p - window, p]; 0, or no
  // entry: all up to p. Pages that no row's window reaches in any layer are never touched, and
  // their entries of the block table not looked at.
  std::vector<std::int64_t> windows;
  double soft_cap = 0;  // c: scaled scores s become c tanh(s / c); 0: they stay as they are
};

class AttentionPlan {
 public:
  // scale 0 = 1 / sqrt(head_dim_k). threads null = the calling thread alone.
  static Result<std::unique_ptr<AttentionPlan>> make(const PagesView* pages,
                                                     std::int64_t num_q_heads, double scale = 0,
                                                     ThreadPool* threads = nullptr,
                                                     PlanOptions options = {});

  Status prepare(const BatchArgs& batch);
  Status append(std::int64_t layer, TokenRows k, TokenRows v, DType dtype);
  Status attend(std::int64_t layer, const AttendArgs& args);

  std::int64_t num_seqs() const noexcept { return static_cast<std::int64_t>(sequences_.size()); }
  std::int64_t num_tokens() const noexcept { return num_tokens_; }
  std::int64_t max_pages() const noexcept { return max_pages_; }
  std::int32_t num_q_heads() const noexcept { return num_q_heads_; }
  // The softmax scale; make() with it gives the same bits.
  double scale() const noexcept { return scale_log2_ / 1.4426950408889634; }
  const PagesView& pages() const noexcept { return *pages_; }
  const PlanOptions& options() const noexcept { return options_; }
  // Of sequence s: tokens in KV, new tokens, and its page ids.
  std::int64_t context_len(std::int64_t s) const { return at(s).context_len; }
  std::int64_t q_len(std::int64_t s) const { return at(s).q_len; }
  const std::int32_t* page_ids(std::int64_t s) const { return page_ids_.data() + at(s).first_page; }

 private:
  struct Call;

  AttentionPlan(const PagesView* pages, std::int32_t num_q_heads, float scale, ThreadPool* threads,
                PlanOptions options);
  Status validate(const BatchArgs& batch) const;
  Status check_appendable(std::int64_t layer) const;
  void see_classes();
  std::int64_t longest_window() const;
  const PlanSequence& at(std::int64_t s) const { return sequences_[static_cast<std::size_t>(s)]; }
  int num_threads() const { return threads_ == nullptr ? 1 : threads_->num_threads(); }
  void reserve_scratch();
  void place_masses();
  void reserve_masses(const AttendArgs& args);
  AttendUnit expand(const WorkUnit& unit, const Call& call, const Scratch& scratch) const;
  static void run_units(void* call, int thread);
  static void run_folds(void* call, int thread);
  static void run_scores(void* call, int thread);

  const PagesView* pages_;
  std::int32_t num_q_heads_;
  std::int32_t group_;
  float scale_log2_;
  PlanOptions options_;
  ThreadPool* threads_;
  std::int32_t classes_seen_ = 0;
  bool k_pairs_ = false, k_floats_ = false, k_words_ = false;

  std::int64_t num_tokens_ = 0, max_pages_ = 0;
  std::vector<PlanSequence> sequences_;
  std::vector<std::int32_t> page_ids_;
  std::vector<Schedule> schedules_;  // one for each window
  std::vector<std::size_t> layer_schedule_;
  std::vector<float> memory_;  // scratch of all threads, then partials
  std::vector<Scratch> scratch_;
  RowSums partials_{};
  std::vector<std::int64_t> mass_at_;    // [tokens] into masses_; -1: not a decoding sequence's
  std::int64_t mass_floats_ = 0;         // that they take
  std::vector<float> masses_, own_lse_;  // for page scores; they only ever grow
};

}  // namespace kvcore::kernels
