#include "compress/head_attention.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/check.h"
#include "base/text.h"

namespace kvcore::compress {
namespace {

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

}  // namespace

Result<std::unique_ptr<HeadAttention>> HeadAttention::make(std::shared_ptr<pages::Pool> pool,
                                                           std::int32_t num_layers,
                                                           std::int32_t num_kv_heads,
                                                           std::int64_t num_q_heads, double scale,
                                                           ThreadPool* threads) {
  KVCORE_RETURN_IF_ERROR(HeadPages::make(pool, num_layers, num_kv_heads));
  if (num_q_heads < 1 || num_q_heads % num_kv_heads != 0)
    return invalid_argument(
        text("num_q_heads=", num_q_heads, " must be a multiple of num_kv_heads=", num_kv_heads));
  KVCORE_ASSIGN_OR_RETURN(
      std::unique_ptr<kernels::AttentionPlan> plan,
      kernels::AttentionPlan::make(&pool->view(), num_q_heads / num_kv_heads, scale, threads));
  return std::unique_ptr<HeadAttention>(
      new HeadAttention(std::move(pool), num_layers, num_kv_heads, std::move(plan)));
}

HeadAttention::HeadAttention(std::shared_ptr<pages::Pool> pool, std::int32_t num_layers,
                             std::int32_t num_kv_heads,
                             std::unique_ptr<kernels::AttentionPlan> plan)
    : pool_(std::move(pool)),
      num_layers_(num_layers),
      num_kv_heads_(num_kv_heads),
      group_(plan->num_q_heads()),
      plan_(std::move(plan)) {}

Status HeadAttention::check_batch(std::span<const std::shared_ptr<HeadPages>> sequences,
                                  std::span<const std::int32_t> starts) const {
  if (starts.size() != sequences.size() + 1 || starts[0] != 0)
    return invalid_argument(text("cu_seqlens_q has ", starts.size(), " entries: allowed ",
                                 sequences.size() + 1, " (num_seqs + 1), the first of them 0"));
  for (std::size_t s = 0; s < sequences.size(); ++s) {
    const HeadPages& heads = *sequences[s];
    if (heads.released()) return invalid_argument(text("sequence ", s, " was released"));
    if (heads.pool() != pool_ || heads.num_layers() != num_layers_ ||
        heads.num_kv_heads() != num_kv_heads_)
      return invalid_argument(text("sequence ", s, " has ", heads.num_layers(), " layers of ",
                                   heads.num_kv_heads(), " KV heads: allowed ", num_layers_, " of ",
                                   num_kv_heads_, ", in pages of the same pool"));
    if (starts[s + 1] < starts[s])
      return invalid_argument(text("cu_seqlens_q[", s + 1, "]=", starts[s + 1],
                                   " is less than cu_seqlens_q[", s, "]=", starts[s]));
  }
  return {};
}

Status HeadAttention::prepare(std::span<const std::shared_ptr<HeadPages>> sequences,
                              std::span<const std::int32_t> cu_seqlens_q) {
  KVCORE_RETURN_IF_ERROR(check_batch(sequences, cu_seqlens_q));
  planned_layer_ = -1;
  num_seqs_ = static_cast<std::int64_t>(sequences.size());
  num_tokens_ = cu_seqlens_q.back();
  first_token_.assign(cu_seqlens_q.begin(), cu_seqlens_q.end());
  cu_seqlens_q_.assign(1, 0);
  std::size_t width = 0;
  for (std::int64_t s = 0; s < num_seqs_; ++s) {
    const HeadPages& heads = *sequences[at(s)];
    for (std::size_t i = 0; i < heads.num_heads(); ++i)
      width = std::max(width, heads.pages(i).size());
    for (std::int32_t h = 0; h < num_kv_heads_; ++h)
      cu_seqlens_q_.push_back(cu_seqlens_q_.back() + cu_seqlens_q[at(s + 1)] - cu_seqlens_q[at(s)]);
  }
  width_ = static_cast<std::int64_t>(width);
  context_lens_.resize(at(num_layers_ * num_seqs_ * num_kv_heads_));
  tables_.resize(context_lens_.size() * width);
  std::size_t row = 0;
  for (std::int32_t layer = 0; layer < num_layers_; ++layer) {
    for (const std::shared_ptr<HeadPages>& heads : sequences) {
      for (std::int32_t h = 0; h < num_kv_heads_; ++h, ++row) {
        const std::size_t head = at(layer * num_kv_heads_ + h);
        const std::vector<std::int32_t>& pages = heads->pages(head);
        context_lens_[row] = static_cast<std::int32_t>(heads->num_tokens(head));
        std::copy(pages.begin(), pages.end(), tables_.data() + row * width);
      }
    }
  }
  return {};
}

Status HeadAttention::turn_to(std::int64_t layer) {
  KVCORE_RETURN_IF_ERROR(check_range("layer", layer, 0, num_layers_ - 1));
  if (layer == planned_layer_) return {};
  const std::int64_t rows = num_seqs_ * num_kv_heads_;
  planned_layer_ = -1;
  KVCORE_RETURN_IF_ERROR(plan_->prepare({.num_seqs = rows,
                                         .cu_seqlens_q = cu_seqlens_q_.data(),
                                         .context_lens = context_lens_.data() + layer * rows,
                                         .block_table = tables_.data() + layer * rows * width_,
                                         .max_pages = width_,
                                         .block_table_stride = width_}));
  planned_layer_ = layer;
  return {};
}

Status HeadAttention::check_rows(const char* field, std::int64_t stride, std::int64_t width) const {
  if (num_tokens_ <= 1 || stride >= width) return {};
  return invalid_argument(text(field, " has a token stride of ", stride,
                               " elements: expected at least heads * head_dim = ", width));
}

// move(row of the plan, token of the batch, KV head) for each.
template <class Move>
void HeadAttention::for_each_row(Move move) const {
  std::int64_t row = 0;
  for (std::int64_t s = 0; s < num_seqs_; ++s)
    for (std::int32_t h = 0; h < num_kv_heads_; ++h)
      for (std::int64_t t = first_token_[at(s)]; t < first_token_[at(s + 1)]; ++t)
        move(row++, t, h);
}

const char* HeadAttention::gather(const void* rows, std::int64_t stride, std::int64_t head_bytes,
                                  std::int64_t element, std::vector<std::byte>& to) const {
  to.resize(std::max(to.size(), at(num_tokens_ * num_kv_heads_ * head_bytes)));
  const auto* from = static_cast<const std::byte*>(rows);
  for_each_row([&](std::int64_t row, std::int64_t token, std::int32_t head) {
    std::memcpy(to.data() + row * head_bytes, from + token * stride * element + head * head_bytes,
                at(head_bytes));
  });
  return reinterpret_cast<const char*>(to.data());
}

Status HeadAttention::append(std::int64_t layer, kernels::TokenRows k, kernels::TokenRows v,
                             DType dtype) {
  const PagesView& p = pool_->view();
  KVCORE_RETURN_IF_ERROR(check_rows("k", k.stride, std::int64_t{num_kv_heads_} * p.head_dim_k));
  KVCORE_RETURN_IF_ERROR(check_rows("v", v.stride, std::int64_t{num_kv_heads_} * p.head_dim_v));
  KVCORE_RETURN_IF_ERROR(turn_to(layer));
  const std::int64_t element = size_of(dtype);
  const char* k_rows = gather(k.data, k.stride, p.head_dim_k * element, element, k_);
  const char* v_rows = gather(v.data, v.stride, p.head_dim_v * element, element, v_);
  return plan_->append(0, {k_rows, p.head_dim_k}, {v_rows, p.head_dim_v}, dtype);
}

Status HeadAttention::attend(std::int64_t layer, const kernels::AttendArgs& args) {
  const PagesView& p = pool_->view();
  KVCORE_RETURN_IF_ERROR(check_rows("q", args.q_stride, num_q_heads() * p.head_dim_k));
  KVCORE_RETURN_IF_ERROR(check_rows("out", args.out_stride, num_q_heads() * p.head_dim_v));
  KVCORE_RETURN_IF_ERROR(turn_to(layer));
  const std::int64_t element = size_of(args.dtype), rows = num_tokens_ * num_kv_heads_;
  const std::int64_t q_width = std::int64_t{group_} * p.head_dim_k;
  const std::int64_t out_width = std::int64_t{group_} * p.head_dim_v;
  const std::int64_t out_bytes = out_width * element;
  kernels::AttendArgs heads = args;
  heads.q = gather(args.q, args.q_stride, q_width * element, element, q_);
  heads.q_stride = q_width;
  out_.resize(std::max(out_.size(), at(rows * out_bytes)));
  heads.out = out_.data();
  heads.out_stride = out_width;
  if (args.lse != nullptr) {
    lse_.resize(std::max(lse_.size(), at(rows * group_)));
    heads.lse = lse_.data();
  }
  KVCORE_RETURN_IF_ERROR(plan_->attend(0, heads));
  auto* out = static_cast<std::byte*>(args.out);
  for_each_row([&](std::int64_t row, std::int64_t token, std::int32_t head) {
    std::memcpy(out + token * args.out_stride * element + head * out_bytes,
                out_.data() + row * out_bytes, at(out_bytes));
    if (args.lse != nullptr)
      std::copy_n(lse_.data() + row * group_, group_,
                  args.lse + token * num_q_heads() + head * group_);
  });
  return {};
}

}  // namespace kvcore::compress
