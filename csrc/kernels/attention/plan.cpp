#include <algorithm>
#include <atomic>
#include <cmath>
#include <span>
#include <utility>

#include "base/check.h"
#include "base/text.h"
#include "kernels/attention/attention.h"
#include "kernels/dispatch/table.h"

namespace kvcore::kernels {
namespace {

constexpr float kLog2e = 1.44269504088896340736f;

Status check_pages(const PagesView& p) {
  KVCORE_RETURN_IF_ERROR(check_range("head_dim_k", p.head_dim_k, 16, 1024));
  KVCORE_RETURN_IF_ERROR(check_range("head_dim_v", p.head_dim_v, 16, 1024));
  if (p.head_dim_k % 16 != 0 || p.head_dim_v % 16 != 0)
    return invalid_argument(text("head_dim_k=", p.head_dim_k, " and head_dim_v=", p.head_dim_v,
                                 " must be multiples of 16"));
  if (p.page_size != 16 && p.page_size != 32 && p.page_size != 64 && p.page_size != 128)
    return invalid_argument(text("page_size=", p.page_size, " is not allowed: 16, 32, 64 or 128"));
  return {};
}

Status check_options(const PagesView& p, const PlanOptions& o) {
  const std::size_t count = o.windows.size();
  if (count > 1 && count != static_cast<std::size_t>(p.num_layers))
    return invalid_argument(text("windows has ", count,
                                 " entries: allowed one for all layers, or one for each of ",
                                 p.num_layers));
  for (const std::int64_t window : o.windows)
    KVCORE_RETURN_IF_ERROR(check_range("window", window, 0, 1 << 30));
  if (!(o.soft_cap >= 0) || o.soft_cap > 1e6 || (o.soft_cap > 0 && o.soft_cap < 1e-3))
    return invalid_argument(
        text("soft_cap=", o.soft_cap, " is out of range: allowed 0 (none), or 1e-3 to 1e6"));
  return {};
}

}  // namespace

AttentionPlan::AttentionPlan(const PagesView* pages, std::int32_t num_q_heads, float scale,
                             ThreadPool* threads, PlanOptions options)
    : pages_(pages),
      num_q_heads_(num_q_heads),
      group_(num_q_heads / pages->num_kv_heads),
      scale_log2_(scale),
      options_(std::move(options)),
      threads_(threads) {
  if (options_.windows.empty()) options_.windows = {0};
  for (const std::int64_t window : options_.windows) {
    const auto known = std::find_if(schedules_.begin(), schedules_.end(),
                                    [&](const Schedule& s) { return s.window() == window; });
    layer_schedule_.push_back(static_cast<std::size_t>(known - schedules_.begin()));
    if (known == schedules_.end()) schedules_.emplace_back(window);
  }
  layer_schedule_.resize(static_cast<std::size_t>(pages->num_layers), layer_schedule_.front());
}

// The longest window of all layers: pages before it are not needed. 0: some layer sees everything.
std::int64_t AttentionPlan::longest_window() const {
  std::int64_t longest = 0;
  for (const std::int64_t window : options_.windows) {
    if (window == 0) return 0;
    longest = std::max(longest, window);
  }
  return longest;
}

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
                                                           ThreadPool* threads,
                                                           PlanOptions options) {
  KVCORE_RETURN_IF_ERROR(check_pages(*pages));
  KVCORE_RETURN_IF_ERROR(check_range("num_q_heads", num_q_heads, 1, 4096));
  if (num_q_heads % pages->num_kv_heads != 0)
    return invalid_argument(text("num_q_heads=", num_q_heads,
                                 " must be a multiple of num_kv_heads=", pages->num_kv_heads));
  if (!(scale >= 0) || scale > 1e6)
    return invalid_argument(text("scale=", scale,
                                 " is out of range: allowed 0 (1/sqrt(head_dim_k)) "
                                 "or above, up to 1e6"));
  KVCORE_RETURN_IF_ERROR(check_options(*pages, options));
  if (scale == 0) scale = 1 / std::sqrt(static_cast<double>(pages->head_dim_k));
  const auto scale_log2 = static_cast<float>(scale * 1.4426950408889634);
  return std::unique_ptr<AttentionPlan>(new AttentionPlan(
      pages, static_cast<std::int32_t>(num_q_heads), scale_log2, threads, std::move(options)));
}

Status AttentionPlan::validate(const BatchArgs& b) const {
  KVCORE_RETURN_IF_ERROR(check_range("num_seqs", b.num_seqs, 0, 1 << 24));
  KVCORE_RETURN_IF_ERROR(check_range("max_pages", b.max_pages, 0, 1 << 30));
  if (b.num_seqs > 0 && b.cu_seqlens_q[0] != 0)
    return invalid_argument(text("cu_seqlens_q[0]=", b.cu_seqlens_q[0], " must be 0"));
  const std::int64_t page = pages_->page_size, longest = longest_window();
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
    const std::int64_t q_len = b.cu_seqlens_q[s + 1] - b.cu_seqlens_q[s];
    for (std::int64_t i = first_seen(longest, context, q_len, 0) / page;
         i < ceil_div(context, page); ++i)
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
  max_pages_ = b.max_pages;
  num_tokens_ = b.num_seqs > 0 ? b.cu_seqlens_q[b.num_seqs] : 0;
  for (std::int64_t s = 0; s < b.num_seqs; ++s) {
    sequences_.push_back({b.cu_seqlens_q[s], b.cu_seqlens_q[s + 1] - b.cu_seqlens_q[s],
                          b.context_lens[s], static_cast<std::int64_t>(page_ids_.size())});
    const std::int32_t* row = b.block_table + s * b.block_table_stride;
    page_ids_.insert(page_ids_.end(), row, row + ceil_div(b.context_lens[s], pages_->page_size));
  }
  for (Schedule& schedule : schedules_)
    schedule.build({pages_, num_q_heads_, num_threads(), sequences_, page_ids_.data()});
  reserve_scratch();
  place_masses();
  return {};
}

// One allocation for all threads' scratch and the partials; it only ever grows.
void AttentionPlan::reserve_scratch() {
  const std::int64_t dk = pages_->head_dim_k, dv = pages_->head_dim_v;
  // At least as many rows as hold a number of each q head: run_scores uses a row buffer for that.
  std::int64_t rows = ceil_div(num_q_heads_, 16), partial_rows = 0;
  for (const Schedule& schedule : schedules_) {
    rows = std::max(rows, schedule.max_rows());
    partial_rows = std::max(partial_rows, schedule.partial_rows());
  }
  const std::int64_t per_thread = whole_lines(rows * dk) + whole_lines(rows * dk / 2) +
                                  2 * whole_lines(rows * dv) + 3 * whole_lines(rows) +
                                  rows * kMaxLanes + whole_lines(kStepTokens * (2 * dk + dv)) +
                                  whole_lines(rows * dk / 2) + 2 * whole_lines(rows) +
                                  whole_lines(rows * dv) + whole_lines(2 * pages_->num_kv_heads);
  const std::int64_t total = kMaxLanes + num_threads() * per_thread + partial_rows * (dv + 2);
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
  partials_ = take_sums(partial_rows);
}

// The pages of the new tokens take single tokens.
Status AttentionPlan::check_appendable(std::int64_t layer) const {
  for (std::int64_t s = 0; s < num_seqs(); ++s) {
    const PlanSequence& seq = at(s);
    if (seq.q_len == 0) continue;
    for (std::int64_t i = (seq.context_len - seq.q_len) / pages_->page_size;
         i * pages_->page_size < seq.context_len; ++i)
      KVCORE_RETURN_IF_ERROR(check_writable(*pages_, page_ids(s)[i], layer));
  }
  return {};
}

Status AttentionPlan::append(std::int64_t layer, TokenRows k, TokenRows v, DType dtype) {
  const PagesView& p = *pages_;
  KVCORE_RETURN_IF_ERROR(check_range("layer", layer, 0, p.num_layers - 1));
  const std::int64_t k_width = p.num_kv_heads * p.head_dim_k,
                     v_width = p.num_kv_heads * p.head_dim_v;
  if (num_tokens_ > 1 && (k.stride < k_width || (v.stride < v_width && !is_latent(p))))
    return invalid_argument(text("token strides of k=", k.stride, " and v=", v.stride,
                                 " elements: expected at least ", k_width, " and ", v_width));
  for (std::int64_t s = 0; s < num_seqs(); ++s)
    if (at(s).q_len > at(s).context_len)
      return invalid_argument(text("sequence ", s, " has q_len=", at(s).q_len, " > context_lens=",
                                   at(s).context_len, ": there is no place to append its tokens"));
  KVCORE_RETURN_IF_ERROR(check_appendable(layer));
  const std::int64_t bytes = size_of(dtype);
  for (std::int64_t s = 0; s < num_seqs(); ++s) {
    const PlanSequence& seq = at(s);
    for (std::int64_t i = 0; i < seq.q_len;) {
      const std::int64_t token = seq.context_len - seq.q_len + i, in_page = token % p.page_size;
      const std::int64_t n = std::min(seq.q_len - i, p.page_size - in_page);
      const std::int64_t row = seq.first_token + i;
      write_tokens(p, page_ids(s)[token / p.page_size], layer, in_page, n,
                   {k.data + row * k.stride * bytes, k.stride},
                   rows_after(v, row * v.stride * bytes), dtype);
      i += n;
    }
  }
  return {};
}

struct AttentionPlan::Call {
  const AttentionPlan* plan;
  const Schedule* schedule;
  const KernelTable* table;
  std::int32_t layer;
  const AttendArgs* args;
  std::atomic<std::size_t> next{0};
};

AttendUnit AttentionPlan::expand(const WorkUnit& unit, const Call& call,
                                 const Scratch& scratch) const {
  const Schedule& schedule = *call.schedule;
  const PlanSequence& seq = at(unit.sequence);
  const AttendArgs& a = *call.args;
  const std::int64_t bytes = size_of(a.dtype);
  const std::int64_t rows = (unit.h1 - unit.h0) * (unit.t1 - unit.t0) * group_;
  const bool partial = unit.partial_row >= 0 || unit.ref >= 0;
  // Rows over a common prefix see all of it.
  const bool shared = unit.member >= 0;
  const std::int64_t first_token = shared ? 0 : seq.first_token;
  const float cap = static_cast<float>(options_.soft_cap);
  return {
      .pages = pages_,
      .block_row = page_ids(unit.sequence),
      .tokens = shared ? schedule.members() + unit.member : nullptr,
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
      .first_visible = shared ? unit.segment1 * kSegmentTokens : seq.context_len - seq.q_len + 1,
      .segment0 = unit.segment0,
      .segment1 = unit.segment1,
      .window = shared ? 0 : schedule.window(),
      .first_seen = shared ? 0 : first_seen(schedule.window(), seq.context_len, seq.q_len, unit.t0),
      .scale_log2 = cap > 0 ? cap * kLog2e : scale_log2_,
      .cap_log2 = cap > 0 ? 2 * scale_log2_ / cap : 0,
      .k_pairs = k_pairs_,
      .k_floats = k_floats_,
      .k_words = k_words_,
      .partials = partial ? partials_ : RowSums{},
      .partial_row = unit.partial_row,
      .partial_rows = whole_lines(rows),
      .refs = unit.ref >= 0 ? schedule.refs() + unit.ref : nullptr,
      .masses =
          a.page_scores == nullptr || seq.q_len != 1 ? nullptr : const_cast<float*>(masses_.data()),
      .mass_at = mass_at_.data() + first_token,
      .mass_stride = whole_lines(num_q_heads_),
      .scratch = &scratch,
      .pack = pack_tokens,
      .decode = call.table->decode_block,
  };
}

void AttentionPlan::run_units(void* context, int thread) {
  Call& call = *static_cast<Call*>(context);
  const AttentionPlan& plan = *call.plan;
  const Scratch& scratch = plan.scratch_[static_cast<std::size_t>(thread)];
  const std::span<const WorkUnit> units = call.schedule->units();
  for (std::size_t i; (i = call.next.fetch_add(1, std::memory_order_relaxed)) < units.size();)
    call.table->attend_unit(plan.expand(units[i], call, scratch));
}

void AttentionPlan::run_folds(void* context, int thread) {
  Call& call = *static_cast<Call*>(context);
  const AttentionPlan& plan = *call.plan;
  const Scratch& scratch = plan.scratch_[static_cast<std::size_t>(thread)];
  const std::span<const WorkUnit> folds = call.schedule->folds();
  for (std::size_t i; (i = call.next.fetch_add(1, std::memory_order_relaxed)) < folds.size();)
    call.table->fold_unit(plan.expand(folds[i], call, scratch));
}

// Page scores are wanted of sequences that decode one token; each has its masses step after step.
void AttentionPlan::place_masses() {
  const std::int64_t page = pages_->page_size;
  const std::int64_t rows = 1 + (page < kStepTokens ? kStepTokens / page : 1);
  mass_at_.assign(static_cast<std::size_t>(num_tokens_), -1);
  mass_floats_ = 0;
  for (const PlanSequence& seq : sequences_) {
    if (seq.q_len != 1) continue;
    mass_at_[static_cast<std::size_t>(seq.first_token)] = mass_floats_;
    mass_floats_ += ceil_div(seq.context_len, kStepTokens) * rows * whole_lines(num_q_heads_);
  }
}

void AttentionPlan::reserve_masses(const AttendArgs& args) {
  if (static_cast<std::int64_t>(masses_.size()) < mass_floats_)
    masses_.resize(static_cast<std::size_t>(mass_floats_));
  const auto lses = static_cast<std::size_t>(num_tokens_ * num_q_heads_);
  if (args.lse == nullptr && own_lse_.size() < lses) own_lse_.resize(lses);
}

void AttentionPlan::run_scores(void* context, int thread) {
  Call& call = *static_cast<Call*>(context);
  const AttentionPlan& plan = *call.plan;
  const std::int64_t page = plan.pages_->page_size, heads = plan.num_q_heads_;
  for (std::size_t i;
       (i = call.next.fetch_add(1, std::memory_order_relaxed)) < plan.sequences_.size();) {
    const PlanSequence& seq = plan.sequences_[i];
    float* out = call.args->page_scores + static_cast<std::int64_t>(i) * plan.max_pages_;
    std::fill_n(out, plan.max_pages_, 0.f);
    if (seq.q_len != 1 || seq.context_len == 0) continue;
    const std::int64_t page0 =
        first_seen(call.schedule->window(), seq.context_len, seq.q_len, 0) / page;
    const auto token = static_cast<std::size_t>(seq.first_token);
    call.table->score_pages({.masses = plan.masses_.data() + plan.mass_at_[token],
                             .mass_stride = whole_lines(heads),
                             .lse = call.args->lse + seq.first_token * heads,
                             .work = plan.scratch_[static_cast<std::size_t>(thread)].q_floats,
                             .out = out + page0,
                             .num_q_heads = plan.num_q_heads_,
                             .page_size = plan.pages_->page_size,
                             .page0 = page0,
                             .page1 = ceil_div(seq.context_len, page),
                             .steps = ceil_div(seq.context_len, kStepTokens)});
  }
}

Status AttentionPlan::attend(std::int64_t layer, const AttendArgs& wanted) {
  const PagesView& p = *pages_;
  KVCORE_RETURN_IF_ERROR(check_range("layer", layer, 0, p.num_layers - 1));
  const std::int64_t q_width = std::int64_t{num_q_heads_} * p.head_dim_k;
  const std::int64_t out_width = std::int64_t{num_q_heads_} * p.head_dim_v;
  if (num_tokens_ > 1 && (wanted.q_stride < q_width || wanted.out_stride < out_width))
    return invalid_argument(text("token strides of q=", wanted.q_stride,
                                 " and out=", wanted.out_stride, " elements: expected at least ",
                                 q_width, " and ", out_width));
  KVCORE_ASSIGN_OR_RETURN(const KernelTable* table, kernel_table());
  see_classes();
  AttendArgs args = wanted;
  if (args.page_scores != nullptr) {
    reserve_masses(args);
    if (args.lse == nullptr) args.lse = own_lse_.data();
  }
  const Schedule& schedule = schedules_[layer_schedule_[static_cast<std::size_t>(layer)]];
  const auto run = [&](ThreadPool::Function function) {
    Call call{this, &schedule, table, static_cast<std::int32_t>(layer), &args};
    if (threads_ == nullptr)
      function(&call, 0);
    else
      threads_->run(function, &call);
  };
  run(run_units);
  if (!schedule.folds().empty()) run(run_folds);
  if (args.page_scores != nullptr) run(run_scores);
  return {};
}

}  // namespace kvcore::kernels
