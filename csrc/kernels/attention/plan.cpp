#include <algorithm>
#include <atomic>
#include <cmath>
#include <span>
#include <utility>

#include "base/text.h"
#include "kernels/attention/attention.h"
#include "kernels/dispatch/table.h"

namespace kvcore::kernels {
namespace {

constexpr std::int64_t kWideRows = 256;   // up to here one unit takes all KV heads, page after page
constexpr std::int64_t kBlockRows = 192;  // rows of a unit of one KV head: o and q stay in L2
constexpr std::int64_t kUnitsPerThread = 4;
constexpr std::int64_t kSharedTokens = 64;  // sequences of a unit over a common prefix, at most

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
std::int64_t whole_lines(std::int64_t floats) { return ceil_div(floats, kMaxLanes) * kMaxLanes; }

Status check(const char* field, std::int64_t value, std::int64_t low, std::int64_t high) {
  if (value >= low && value <= high) return {};
  return invalid_argument(text(field, "=", value, " is out of range: allowed ", low, " to ", high));
}

Status check_pages(const PagesView& p) {
  KVCORE_RETURN_IF_ERROR(check("head_dim_k", p.head_dim_k, 16, 1024));
  KVCORE_RETURN_IF_ERROR(check("head_dim_v", p.head_dim_v, 16, 1024));
  if (p.head_dim_k % 16 != 0 || p.head_dim_v % 16 != 0)
    return invalid_argument(text("head_dim_k=", p.head_dim_k, " and head_dim_v=", p.head_dim_v,
                                 " must be multiples of 16"));
  if (p.page_size != 16 && p.page_size != 32 && p.page_size != 64 && p.page_size != 128)
    return invalid_argument(text("page_size=", p.page_size, " is not allowed: 16, 32, 64 or 128"));
  return {};
}

}  // namespace

AttentionPlan::AttentionPlan(const PagesView* pages, std::int32_t num_q_heads, float scale,
                             ThreadPool* threads)
    : pages_(pages),
      num_q_heads_(num_q_heads),
      group_(num_q_heads / pages->num_kv_heads),
      scale_log2_(scale),
      threads_(threads) {}

// The forms of queries that the classes ask for. Classes may be added while a plan lives.
void AttentionPlan::see_classes() {
  for (; classes_seen_ < pages_->num_classes; ++classes_seen_)
    for (std::int32_t l = 0; l < pages_->num_layers; ++l)
      for (std::int32_t h = 0; h < pages_->num_kv_heads; ++h) {
        const Format k = pages_->classes[classes_seen_].layers[l].heads[h].k_format;
        (k == Format::kBf16 ? k_pairs_ : k_floats_) = true;
        k_words_ |= k == Format::kInt8;
      }
}

Result<std::unique_ptr<AttentionPlan>> AttentionPlan::make(const PagesView* pages,
                                                           std::int64_t num_q_heads, double scale,
                                                           ThreadPool* threads) {
  KVCORE_RETURN_IF_ERROR(check_pages(*pages));
  KVCORE_RETURN_IF_ERROR(check("num_q_heads", num_q_heads, 1, 4096));
  if (num_q_heads % pages->num_kv_heads != 0)
    return invalid_argument(text("num_q_heads=", num_q_heads,
                                 " must be a multiple of num_kv_heads=", pages->num_kv_heads));
  if (!(scale >= 0) || scale > 1e6)
    return invalid_argument(text("scale=", scale,
                                 " is out of range: allowed 0 (1/sqrt(head_dim_k)) "
                                 "or above, up to 1e6"));
  if (scale == 0) scale = 1 / std::sqrt(static_cast<double>(pages->head_dim_k));
  const auto scale_log2 = static_cast<float>(scale * 1.4426950408889634);
  return std::unique_ptr<AttentionPlan>(
      new AttentionPlan(pages, static_cast<std::int32_t>(num_q_heads), scale_log2, threads));
}

Status AttentionPlan::validate(const BatchArgs& b) const {
  KVCORE_RETURN_IF_ERROR(check("num_seqs", b.num_seqs, 0, 1 << 24));
  KVCORE_RETURN_IF_ERROR(check("max_pages", b.max_pages, 0, 1 << 30));
  if (b.num_seqs > 0 && b.cu_seqlens_q[0] != 0)
    return invalid_argument(text("cu_seqlens_q[0]=", b.cu_seqlens_q[0], " must be 0"));
  const std::int64_t page = pages_->page_size;
  for (std::int64_t s = 0; s < b.num_seqs; ++s) {
    if (b.cu_seqlens_q[s + 1] < b.cu_seqlens_q[s])
      return invalid_argument(text("cu_seqlens_q[", s + 1, "]=", b.cu_seqlens_q[s + 1],
                                   " is less than cu_seqlens_q[", s, "]=", b.cu_seqlens_q[s]));
    const std::int64_t context = b.context_lens[s];
    if (context < 0 || context > b.max_pages * page)
      return invalid_argument(text("context_lens[", s, "]=", context,
                                   " is out of range: allowed 0 to ", b.max_pages * page,
                                   " (max_pages=", b.max_pages, " of page_size=", page, ")"));
    const std::int32_t* row = b.block_table + s * b.block_table_stride;
    for (std::int64_t i = 0; i < ceil_div(context, page); ++i)
      if (row[i] < 0 || row[i] >= pages_->num_pages)
        return invalid_argument(text("block_table[", s, ", ", i, "]=", row[i],
                                     " is out of range: allowed 0 to ", pages_->num_pages - 1));
  }
  return {};
}

Status AttentionPlan::prepare(const BatchArgs& b) {
  KVCORE_RETURN_IF_ERROR(validate(b));
  sequences_.clear();
  page_ids_.clear();
  units_.clear();
  folds_.clear();
  num_tokens_ = b.num_seqs > 0 ? b.cu_seqlens_q[b.num_seqs] : 0;
  max_rows_ = partial_rows_ = 0;
  for (std::int64_t s = 0; s < b.num_seqs; ++s) {
    sequences_.push_back({b.cu_seqlens_q[s], b.cu_seqlens_q[s + 1] - b.cu_seqlens_q[s],
                          b.context_lens[s], static_cast<std::int64_t>(page_ids_.size())});
    const std::int32_t* row = b.block_table + s * b.block_table_stride;
    page_ids_.insert(page_ids_.end(), row, row + ceil_div(b.context_lens[s], pages_->page_size));
  }
  find_shared();
  for (std::int64_t s = 0; s < num_seqs(); ++s) cut(s);
  reserve_scratch();
  return {};
}

// Leading segments that lie whole in both sequences, on the same pages.
std::int64_t AttentionPlan::common_segments(std::int64_t a, std::int64_t b) const {
  const std::int64_t pages = kSegmentTokens / pages_->page_size;
  const std::int64_t most = std::min(at(a).context_len, at(b).context_len) / kSegmentTokens;
  const std::int32_t *x = page_ids(a), *y = page_ids(b);
  const auto differ = std::mismatch(x, x + most * pages, y).first;
  return (differ - x) / pages;
}

// Sequences that decode over the same leading pages attend to them together: the pages are read once
// and multiplied with all their queries. Rows and segments stay what they are, so no bit changes.
void AttentionPlan::find_shared() {
  order_.clear();
  members_.clear();
  refs_.clear();
  shared_.resize(sequences_.size());
  for (std::int64_t s = 0; s < num_seqs(); ++s) {
    shared_[static_cast<std::size_t>(s)].clear();
    if (at(s).q_len == 1 && at(s).context_len >= kSegmentTokens)
      order_.push_back(static_cast<std::int32_t>(s));
  }
  if (order_.size() < 2) return;
  const auto whole_pages = [this](std::int32_t s) {
    return std::span(page_ids(s), static_cast<std::size_t>(at(s).context_len / pages_->page_size));
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
void AttentionPlan::share(std::int64_t first, std::int64_t last, std::int64_t segment) {
  for (std::int64_t i = first, n; i < last; i += n) {
    n = std::min(last - i, kSharedTokens);
    const std::int64_t rows = n * num_q_heads_;
    units_.push_back({.sequence = order_[static_cast<std::size_t>(i)],
                      .t0 = 0,
                      .t1 = n,
                      .h0 = 0,
                      .h1 = pages_->num_kv_heads,
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

bool AttentionPlan::few_units() const {
  return num_threads() > 1 && num_seqs() < kUnitsPerThread * num_threads();
}

// Cuts a sequence into units. How it is cut changes no bit of the result: rows are independent, and
// segments are always the same and folded in the same order.
void AttentionPlan::cut(std::int64_t s) {
  const Sequence& seq = at(s);
  const std::int64_t heads = pages_->num_kv_heads;
  const bool few = few_units();
  const auto shared = static_cast<std::int64_t>(shared_[static_cast<std::size_t>(s)].size());
  if (shared > 0) {
    add_unit({.sequence = s, .t0 = 0, .t1 = 1, .h0 = 0, .h1 = pages_->num_kv_heads}, few, shared);
    return;
  }
  if (seq.q_len * num_q_heads_ <= std::max<std::int64_t>(kWideRows, num_q_heads_)) {
    const std::int64_t segments = ceil_div(seq.context_len, kSegmentTokens);
    const bool by_segment = few && segments > 1;
    // A short context on several threads is cut by heads instead.
    const std::int64_t parts =
        few && !by_segment ? std::min<std::int64_t>(heads, num_threads()) : 1;
    for (std::int64_t i = 0; i < parts; ++i)
      add_unit({.sequence = s,
                .t0 = 0,
                .t1 = seq.q_len,
                .h0 = static_cast<std::int32_t>(heads * i / parts),
                .h1 = static_cast<std::int32_t>(heads * (i + 1) / parts)},
               by_segment, 0);
    return;
  }
  const std::int64_t block = std::max<std::int64_t>(1, kBlockRows / group_);
  for (std::int32_t h = 0; h < heads; ++h)
    for (std::int64_t t = 0; t < seq.q_len; t += block)
      add_unit(
          {.sequence = s, .t0 = t, .t1 = std::min(seq.q_len, t + block), .h0 = h, .h1 = h + 1},
          false, 0);
}

// by_segment: a unit for each segment after the shared ones, otherwise one unit for all.
void AttentionPlan::add_unit(const Unit& unit, bool by_segment, std::int64_t shared_segments) {
  if (unit.t0 == unit.t1) return;
  const Sequence& seq = at(unit.sequence);
  const std::int64_t visible = std::max<std::int64_t>(0, seq.context_len - seq.q_len + unit.t1);
  const std::int64_t segments = ceil_div(visible, kSegmentTokens);
  const std::int64_t rows = (unit.h1 - unit.h0) * (unit.t1 - unit.t0) * group_;
  max_rows_ = std::max(max_rows_, rows);
  Unit whole = unit;
  whole.segment1 = segments;
  if (!by_segment && shared_segments == 0) {
    units_.push_back(whole);
    return;
  }
  whole.ref = static_cast<std::int64_t>(refs_.size());
  folds_.push_back(whole);
  const auto& shared = shared_[static_cast<std::size_t>(unit.sequence)];
  refs_.insert(refs_.end(), shared.begin(), shared.end());
  for (std::int64_t i = shared_segments; i < segments;) {
    Unit part = unit;
    part.segment0 = i;
    part.segment1 = by_segment ? i + 1 : segments;
    part.partial_row = partial_rows_;
    units_.push_back(part);
    for (; i < part.segment1; ++i, partial_rows_ += whole_lines(rows))
      refs_.push_back({partial_rows_, static_cast<std::int32_t>(unit.t1 - unit.t0), 0});
  }
}

// One allocation for all threads' scratch and the partials; it only ever grows.
void AttentionPlan::reserve_scratch() {
  const std::int64_t rows = max_rows_, dk = pages_->head_dim_k, dv = pages_->head_dim_v;
  const std::int64_t per_thread = whole_lines(rows * dk) + whole_lines(rows * dk / 2) +
                                  2 * whole_lines(rows * dv) + 3 * whole_lines(rows) +
                                  rows * kMaxLanes + whole_lines(kStepTokens * (2 * dk + dv)) +
                                  whole_lines(rows * dk / 2) + 2 * whole_lines(rows) +
                                  whole_lines(rows * dv) + whole_lines(2 * pages_->num_kv_heads);
  const std::int64_t total =
      kMaxLanes + num_threads() * per_thread + partial_rows_ * (dv + 2);
  if (static_cast<std::int64_t>(memory_.size()) < total)
    memory_.resize(static_cast<std::size_t>(total));
  float* next = memory_.data();
  next += (64 - reinterpret_cast<std::uintptr_t>(next) % 64) % 64 / sizeof(float);
  const auto take = [&next](std::int64_t n) { return std::exchange(next, next + whole_lines(n)); };
  const auto take_sums = [&](std::int64_t n) { return RowSums{take(n * dv), take(n), take(n)}; };
  scratch_.clear();
  for (int i = 0; i < num_threads(); ++i) {
    Scratch s;
    s.q_floats = take(rows * dk);
    s.q_pairs = reinterpret_cast<std::uint32_t*>(take(rows * dk / 2));
    s.segment = take_sums(rows);
    s.l_lanes = take(rows * kMaxLanes);
    s.out = take(rows * dv);
    s.lse = take(rows);
    s.packed = reinterpret_cast<char*>(take(kStepTokens * (dk + dv)));
    s.decoded = take(kStepTokens * dk);
    s.q_words = reinterpret_cast<std::int16_t*>(take(rows * dk / 2));
    s.q_factor = take(rows);
    s.q_bias = reinterpret_cast<std::int32_t*>(take(rows));
    s.rotated = take(rows * dv);
    s.rotated_from = reinterpret_cast<std::int64_t*>(take(std::int64_t{2} * pages_->num_kv_heads));
    scratch_.push_back(s);
  }
  partials_ = take_sums(partial_rows_);
}

// The pages of the new tokens take single tokens.
Status AttentionPlan::check_appendable(std::int64_t layer) const {
  for (std::int64_t s = 0; s < num_seqs(); ++s) {
    const Sequence& seq = at(s);
    if (seq.q_len == 0) continue;
    for (std::int64_t i = (seq.context_len - seq.q_len) / pages_->page_size;
         i * pages_->page_size < seq.context_len; ++i)
      KVCORE_RETURN_IF_ERROR(check_writable(*pages_, page_ids(s)[i], layer));
  }
  return {};
}

Status AttentionPlan::append(std::int64_t layer, TokenRows k, TokenRows v, DType dtype) {
  const PagesView& p = *pages_;
  KVCORE_RETURN_IF_ERROR(check("layer", layer, 0, p.num_layers - 1));
  const std::int64_t k_width = p.num_kv_heads * p.head_dim_k,
                     v_width = p.num_kv_heads * p.head_dim_v;
  if (num_tokens_ > 1 && (k.stride < k_width || v.stride < v_width))
    return invalid_argument(text("token strides of k=", k.stride, " and v=", v.stride,
                                 " elements: expected at least ", k_width, " and ", v_width));
  for (std::int64_t s = 0; s < num_seqs(); ++s)
    if (at(s).q_len > at(s).context_len)
      return invalid_argument(text("sequence ", s, " has q_len=", at(s).q_len, " > context_lens=",
                                   at(s).context_len, ": there is no place to append its tokens"));
  KVCORE_RETURN_IF_ERROR(check_appendable(layer));
  const std::int64_t bytes = size_of(dtype);
  for (std::int64_t s = 0; s < num_seqs(); ++s) {
    const Sequence& seq = at(s);
    for (std::int64_t i = 0; i < seq.q_len;) {
      const std::int64_t token = seq.context_len - seq.q_len + i, in_page = token % p.page_size;
      const std::int64_t n = std::min(seq.q_len - i, p.page_size - in_page);
      const std::int64_t row = seq.first_token + i;
      write_tokens(p, page_ids(s)[token / p.page_size], layer, in_page, n,
                   {k.data + row * k.stride * bytes, k.stride},
                   {v.data + row * v.stride * bytes, v.stride}, dtype);
      i += n;
    }
  }
  return {};
}

struct AttentionPlan::Call {
  const AttentionPlan* plan;
  const KernelTable* table;
  std::int32_t layer;
  const AttendArgs* args;
  std::atomic<std::size_t> next{0};
};

AttendUnit AttentionPlan::expand(const Unit& unit, const Call& call, const Scratch& scratch) const {
  const Sequence& seq = at(unit.sequence);
  const AttendArgs& a = *call.args;
  const std::int64_t bytes = size_of(a.dtype);
  const std::int64_t rows = (unit.h1 - unit.h0) * (unit.t1 - unit.t0) * group_;
  const bool partial = unit.partial_row >= 0 || unit.ref >= 0;
  const std::int64_t first_token = unit.member >= 0 ? 0 : seq.first_token;
  return {
      .pages = pages_,
      .block_row = page_ids(unit.sequence),
      .tokens = unit.member >= 0 ? members_.data() + unit.member : nullptr,
      .layer = call.layer,
      .dtype = a.dtype,
      .q = static_cast<const char*>(a.q) + first_token * a.q_stride * bytes,
      .q_stride = a.q_stride,
      .out = static_cast<char*>(a.out) + first_token * a.out_stride * bytes,
      .out_stride = a.out_stride,
      .lse = a.lse == nullptr ? nullptr : a.lse + first_token * num_q_heads_,
      .num_q_heads = num_q_heads_,
      .group = group_,
      .t0 = unit.t0,
      .t1 = unit.t1,
      .h0 = unit.h0,
      .h1 = unit.h1,
      // Rows over a common prefix see all of it.
      .first_visible = unit.member >= 0 ? unit.segment1 * kSegmentTokens
                                        : seq.context_len - seq.q_len + 1,
      .segment0 = unit.segment0,
      .segment1 = unit.segment1,
      .scale_log2 = scale_log2_,
      .k_pairs = k_pairs_,
      .k_floats = k_floats_,
      .k_words = k_words_,
      .partials = partial ? partials_ : RowSums{},
      .partial_row = unit.partial_row,
      .partial_rows = whole_lines(rows),
      .refs = unit.ref >= 0 ? refs_.data() + unit.ref : nullptr,
      .scratch = &scratch,
      .pack = pack_tokens,
      .decode = call.table->decode_block,
  };
}

void AttentionPlan::run_units(void* context, int thread) {
  Call& call = *static_cast<Call*>(context);
  const AttentionPlan& plan = *call.plan;
  const Scratch& scratch = plan.scratch_[static_cast<std::size_t>(thread)];
  for (std::size_t i; (i = call.next.fetch_add(1, std::memory_order_relaxed)) < plan.units_.size();)
    call.table->attend_unit(plan.expand(plan.units_[i], call, scratch));
}

void AttentionPlan::run_folds(void* context, int thread) {
  Call& call = *static_cast<Call*>(context);
  const AttentionPlan& plan = *call.plan;
  const Scratch& scratch = plan.scratch_[static_cast<std::size_t>(thread)];
  for (std::size_t i; (i = call.next.fetch_add(1, std::memory_order_relaxed)) < plan.folds_.size();)
    call.table->fold_unit(plan.expand(plan.folds_[i], call, scratch));
}

Status AttentionPlan::attend(std::int64_t layer, const AttendArgs& args) {
  const PagesView& p = *pages_;
  KVCORE_RETURN_IF_ERROR(check("layer", layer, 0, p.num_layers - 1));
  const std::int64_t q_width = std::int64_t{num_q_heads_} * p.head_dim_k;
  const std::int64_t out_width = std::int64_t{num_q_heads_} * p.head_dim_v;
  if (num_tokens_ > 1 && (args.q_stride < q_width || args.out_stride < out_width))
    return invalid_argument(text("token strides of q=", args.q_stride, " and out=", args.out_stride,
                                 " elements: expected at least ", q_width, " and ", out_width));
  KVCORE_ASSIGN_OR_RETURN(const KernelTable* table, kernel_table());
  see_classes();
  const auto run = [&](ThreadPool::Function function) {
    Call call{this, table, static_cast<std::int32_t>(layer), &args};
    if (threads_ == nullptr)
      function(&call, 0);
    else
      threads_->run(function, &call);
  };
  run(run_units);
  if (!folds_.empty()) run(run_folds);
  return {};
}

}  // namespace kvcore::kernels
