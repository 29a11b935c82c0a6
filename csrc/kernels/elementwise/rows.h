// The argument structs of the row-wise operations of a decoder layer, shared by the entry points and
// the per-ISA kernels. Plain data only: compiled with wide instructions, where no std type may appear.
// Strides are in elements between rows; all other dimensions are contiguous.
#pragma once

#include <cstdint>

#include "base/dtype.h"

namespace kvcore::kernels {

// x += delta (if there is one, rounded to dtype), then out = x / sqrt(mean(x^2) + eps) * weight.
struct NormRows {
  void* x = nullptr;            // [rows][dim]; written only if there is a delta
  std::int64_t x_stride = 0;
  const void* delta = nullptr;  // [rows][dim] contiguous, or null
  const void* weight = nullptr;  // [dim]
  void* out = nullptr;          // [rows][dim] contiguous; may not overlap x
  std::int64_t rows = 0;
  std::int64_t dim = 0;
  float eps = 0;
  DType dtype = DType::kF32;    // of x, delta, weight and out
};

// Rotates the first `q_heads + k_heads` heads of each row in place, element i with i + dim / 2; before
// that each head is normalised by its own rms and weight where weights are given.
struct RopeRows {
  void* x = nullptr;                // [rows][heads >= q_heads + k_heads][dim]
  std::int64_t x_stride = 0;
  const float* rotation = nullptr;  // [rows][2][dim / 2] contiguous: cos, sin
  const void* q_weight = nullptr;   // [dim], or null
  const void* k_weight = nullptr;   // [dim], or null
  std::int64_t rows = 0;
  std::int64_t q_heads = 0;
  std::int64_t k_heads = 0;
  std::int64_t dim = 0;             // even, up to kMaxRopeDim
  float eps = 0;
  DType dtype = DType::kF32;        // of x and the weights
};
constexpr std::int64_t kMaxRopeDim = 512;

// out = silu(gate) * up, gate and up being the halves of a row.
struct SiluMulRows {
  const void* gate_up = nullptr;  // [rows][2][dim] contiguous
  void* out = nullptr;            // [rows][dim] contiguous
  std::int64_t rows = 0;
  std::int64_t dim = 0;
  DType dtype = DType::kF32;
};

}  // namespace kvcore::kernels
