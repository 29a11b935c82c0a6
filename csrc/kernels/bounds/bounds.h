// Page bounds: the least and the largest number of each channel of a page's keys, and what a query
// can at most score on the page because of them. docs/kernels.md says what for.
// Thread rules: none, pure functions on caller memory.
#pragma once

#include <cstdint>
#include <span>

#include "base/dtype.h"
#include "base/page_layout.h"
#include "base/result.h"

namespace kvcore::kernels {

struct PageBoundsArgs {
  std::int64_t layer = 0;
  std::span<const std::int32_t> page_ids;      // one is not looked at where there are no tokens
  std::span<const std::int32_t> valid_tokens;  // of each page, from 0 to page_size
  float* out = nullptr;                        // [pages][num_kv_heads][low, high][head_dim_k]
};

// Of K as attention reads it: decoded. Pages without tokens get (+inf, -inf). k4 bounds all tokens
// of its page by its minima and scales; everything else is exact for the valid tokens.
Status page_bounds(const PagesView& pages, const PageBoundsArgs& args);

struct BoundScoresArgs {
  const void* q = nullptr;    // [rows][num_q_heads][head_dim]
  std::int64_t q_stride = 0;  // elements between rows; heads and dims contiguous
  DType dtype = DType::kF32;  // of q
  std::int64_t rows = 0;
  std::int64_t num_q_heads = 0;
  const float* bounds = nullptr;  // [pages][num_kv_heads][low, high][head_dim]
  std::int64_t pages = 0;
  std::int64_t num_kv_heads = 0;
  std::int64_t head_dim = 0;  // a multiple of 16, up to 1024
  double scale = 0;           // of the softmax; above 0
  float* out = nullptr;       // [rows][num_kv_heads][pages]
};

// Pages are read per KV head, so a score is the largest of the head's group. Pages without tokens
// get -inf. A row's bits depend on its query and the page alone, at a given instruction set level.
Status page_score_bounds(const BoundScoresArgs& args);

}  // namespace kvcore::kernels
