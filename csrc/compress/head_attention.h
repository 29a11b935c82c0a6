// HeadAttention: attention of a batch of pruned sequences over their head pages.
//
//   prepare(sequences, cu_seqlens_q)  takes their tables and lengths, as they are after grow()
//   append(layer, k, v)               writes the new tokens of every head into its open page
//   attend(layer, q, out, lse)        causal attention of the new tokens over what each head holds
//
// One layer is a batch of num_seqs * num_kv_heads sequences of one KV head for the usual kernels:
// each with a block table and a length of its own, and num_q_heads / num_kv_heads query heads. The
// rows of a head are gathered ([sequence][head][token]) and the results put back; next to reading
// the head's KV that is nothing. The layer's plan is made when its first call comes: lengths differ
// between layers, so there is one plan a layer and step either way, and one that is used again
// keeps its memory in the caches.
//
// Tensors are those of the unpruned sequence: q [tokens][num_q_heads][head_dim_k] and so on. A
// row's bits depend only on its query and its head's pages (kernels/attention/attention.h). Thread
// rules: one thread at a time; runs on the ThreadPool it was made with. The sequences' pages must
// be held until the last call after prepare(), and must not be sealed between.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/dtype.h"
#include "base/result.h"
#include "base/thread_pool.h"
#include "compress/head_pages.h"
#include "kernels/attention/attention.h"
#include "kernels/layout/layout.h"

namespace kvcore::compress {

class HeadAttention {
 public:
  // pool: of the head pages. scale 0 = 1 / sqrt(head_dim_k). threads null = the calling thread.
  static Result<std::unique_ptr<HeadAttention>> make(std::shared_ptr<pages::Pool> pool,
                                                     std::int32_t num_layers,
                                                     std::int32_t num_kv_heads,
                                                     std::int64_t num_q_heads, double scale = 0,
                                                     ThreadPool* threads = nullptr);

  // New tokens of sequence s are the last cu_seqlens_q[s + 1] - cu_seqlens_q[s] of every head, and
  // rows cu_seqlens_q[s] and up of the tensors.
  Status prepare(std::span<const std::shared_ptr<HeadPages>> sequences,
                 std::span<const std::int32_t> cu_seqlens_q);
  Status append(std::int64_t layer, kernels::TokenRows k, kernels::TokenRows v, DType dtype);
  Status attend(std::int64_t layer, const kernels::AttendArgs& args);

  std::int64_t num_seqs() const noexcept { return num_seqs_; }
  std::int64_t num_tokens() const noexcept { return num_tokens_; }
  std::int32_t num_layers() const noexcept { return num_layers_; }
  std::int32_t num_kv_heads() const noexcept { return num_kv_heads_; }
  std::int64_t num_q_heads() const noexcept { return std::int64_t{group_} * num_kv_heads_; }
  const pages::Pool& pool() const noexcept { return *pool_; }

 private:
  HeadAttention(std::shared_ptr<pages::Pool> pool, std::int32_t num_layers,
                std::int32_t num_kv_heads, std::unique_ptr<kernels::AttentionPlan> plan);
  Status check_batch(std::span<const std::shared_ptr<HeadPages>> sequences,
                     std::span<const std::int32_t> cu_seqlens_q) const;
  Status check_rows(const char* field, std::int64_t stride, std::int64_t width) const;
  Status turn_to(std::int64_t layer);
  template <class Move>
  void for_each_row(Move move) const;
  const char* gather(const void* rows, std::int64_t stride, std::int64_t head_bytes,
                     std::int64_t element, std::vector<std::byte>& to) const;

  const std::shared_ptr<pages::Pool> pool_;
  const std::int32_t num_layers_, num_kv_heads_, group_;
  const std::unique_ptr<kernels::AttentionPlan> plan_;
  std::int64_t num_seqs_ = 0, num_tokens_ = 0, width_ = 0;
  std::int64_t planned_layer_ = -1;         // what plan_ is prepared for
  std::vector<std::int32_t> first_token_;   // [num_seqs + 1] of the batch
  std::vector<std::int32_t> cu_seqlens_q_;  // [num_seqs * num_kv_heads + 1] of a layer's plan
  std::vector<std::int32_t> context_lens_;  // [num_layers][num_seqs][num_kv_heads]
  std::vector<std::int32_t> tables_;        // [num_layers][num_seqs][num_kv_heads][width]
  std::vector<std::byte> q_, k_, v_, out_;  // rows in the plan's order
  std::vector<float> lse_;
};

}  // namespace kvcore::compress
