// The argument structs between the entry points of bounds.h (any instruction set) and the per-ISA
// kernels. Plain data only: compiled with wide instructions, where no std type may appear.
#pragma once

#include <cstdint>

#include "base/page_layout.h"

namespace kvcore::kernels {

// Widens [low, high] of each channel by the first `tokens` tokens of one head's K block.
struct WidenBounds {
  const char* k;
  Format format;           // elements, or k4, whose channels are bounded without its codes
  LayoutId layout;         // of elements
  std::int64_t row_bytes;  // between tokens of canonical elements
  std::int32_t page_size;
  std::int32_t tokens;  // from 1 to page_size; k4: all of them, whatever this says
  std::int32_t dim;     // a multiple of 16, up to 1024
  float* low;           // [dim]
  float* high;          // [dim]
};

// out[head][page] = scale * max over the group's q heads of sum over d of max(q low, q high).
struct ScoreBounds {
  const float* q;       // [num_kv_heads][group][dim]
  const float* bounds;  // [pages][num_kv_heads][low, high][dim]
  float* out;           // [num_kv_heads][pages]
  std::int64_t pages;
  std::int32_t num_kv_heads;
  std::int32_t group;
  std::int32_t dim;  // a multiple of 16
  float scale;       // above 0
};

}  // namespace kvcore::kernels
