// Merging partial attention results by their log-sum-exp, with the same arithmetic that attention
// uses between its segments. Thread rules: none, a pure function.
#pragma once

#include <cstdint>

#include "base/dtype.h"
#include "base/result.h"

namespace kvcore::kernels {

struct MergeArgs {
  const void* out_a = nullptr;   // [rows, dim] contiguous, normalised
  const float* lse_a = nullptr;  // [rows], natural log; -inf: the part is empty
  const void* out_b = nullptr;
  const float* lse_b = nullptr;
  void* out = nullptr;   // [rows, dim]; may be out_a or out_b
  float* lse = nullptr;  // [rows]; may be lse_a or lse_b
  std::int64_t rows = 0;
  std::int64_t dim = 0;       // a multiple of 16, up to 1024
  DType dtype = DType::kF32;  // of the three outs
};

// A row whose one part is empty is the other part bit for bit; two empty parts give (0, -inf).
Status merge_states(const MergeArgs& args);

}  // namespace kvcore::kernels
