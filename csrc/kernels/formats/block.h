// The constants of the codecs, and the argument structs between the entry points (any instruction
// set) and the per-ISA codecs. Plain data only: compiled with wide instructions, where no std type
// may appear.
#pragma once

#include <cstdint>

#include "base/block_arrays.h"
#include "base/dtype.h"

namespace kvcore::kernels {

constexpr std::int32_t kMaxMagnitudeBits = 0x477fe000;  // float bits of 65504, the largest f16

// Positive levels of v4 and v3: Lloyd-Max of the normal distribution times `units`, as integers.
// A code below half the number of levels is negative: code c of 2n has level c < n ? -level[n-1-c]
// : level[c-n].
constexpr std::int32_t kV4Levels[8] = {6, 18, 30, 43, 57, 74, 95, 125};
constexpr std::int32_t kV3Levels[4] = {13, 40, 71, 114};
constexpr float kV4Units = 45.75f;
constexpr float kV3Units = 53.f;
// Signs of the dims in front of v4's and v3's Hadamard transform: bit d % 64 of word d / 64 set =
// minus. The first 256 bits of the fraction of pi.
constexpr std::uint64_t kSignWords[4] = {0x243f6a8885a308d3u, 0x13198a2e03707344u,
                                         0xa4093822299f31d0u, 0x082efa98ec4e6c89u};
// Dims of one Hadamard block: the largest power of two that divides the head_dim.
[[maybe_unused]] static constexpr std::int64_t hadamard_width(std::int64_t dim) noexcept {
  return dim & -dim;
}

struct EncodeBlock {
  const char* rows;           // [tokens][dim] of dtype, contiguous dims
  std::int64_t stride_bytes;  // between tokens
  DType dtype;
  Format format;
  Part part;
  std::int32_t tokens;  // 16, 32, 64 or 128
  std::int32_t dim;     // a multiple of 8 up to kMaxCodecDim
  char* block;          // block_arrays().bytes; padding is written as well
  // Bytes from rows and from block to those that come next, which are brought into L2; 0: none.
  std::int64_t ahead = 0, block_ahead = 0;
};

struct DecodeBlock {
  const char* block;
  Format format;
  Part part;
  std::int32_t tokens;
  std::int32_t dim;
  std::int32_t first, count;                // tokens wanted, both multiples of 16
  DType dtype;                              // of rows
  char* rows;                               // [count][dim]
  std::int64_t stride_bytes;                // between tokens
  std::int64_t ahead = 0, block_ahead = 0;  // as above
};

}  // namespace kvcore::kernels
