// Where the arrays of a compressed head block lie; docs/formats.md draws the layouts. Compiled with
// wide instructions as well, so: plain data, and functions that are never shared between files.
//
// A block = arrays in this order, each starting at a multiple of 64 bytes, zero bytes between:
//   int8  K  mean bf16 [D]  scale f16 [P]     codes u8 (code + 128) [P/TB][D/4][TB][4]
//         V                 scale f16 [P]     codes s8, per dim block [P/4][DB][4]
//   fp8   K  mean bf16 [D]  scale f16 [1]     codes e4m3 [P/TB][D/2][TB][2]
//         V                 scale f16 [1]     codes e4m3, per dim block [P/2][DB][2]
//   k4    K  grid f16 [2]   scale e4m3 [D]    minimum s8 [D]   nibbles [P/TB][D/8][TB][4]
//   v4    V                 norm f16 [P]      nibbles, per dim block [P/8][DB][4]
//   v3    V                 norm f16 [P]      per dim block [P/16]{low bits [DB][4], high bits
//                                             [DB/16 rounded up][4] u64}
// P = tokens of the page, D = head_dim, TB = min(P, 64), DB = min(D - first, 64).
#pragma once

#include <cstdint>

#include "base/page_layout.h"

namespace kvcore {

constexpr std::int64_t kArrayAlign = 64;
constexpr std::int64_t kMaxHeadDim = 1024;
constexpr std::int64_t kMaxCodecDim = 256;
constexpr std::int64_t kMaxCodecTokens = 128;

// Byte offsets of a block's arrays; an array that the format does not have is empty.
struct BlockArrays {
  std::int64_t mean;     // bf16 [D]
  std::int64_t grid;     // f16 [2]: of the scales, of the minima
  std::int64_t scale;    // f16 [P], f16 [1] or e4m3 [D]; also v4's and v3's norms
  std::int64_t minimum;  // s8 [D]
  std::int64_t codes;
  std::int64_t bytes;  // of the whole block
};

// Bytes of the codes of one dim block of `dims` dims of v3, for 16 tokens.
[[maybe_unused]] static constexpr std::int64_t v3_group_bytes(std::int64_t dims) noexcept {
  return 4 * dims + (dims + 15) / 16 * 32;
}

[[maybe_unused]] static constexpr std::int64_t code_bytes(Format f, std::int64_t tokens,
                                                          std::int64_t dim) noexcept {
  if (f == Format::kInt8 || f == Format::kFp8) return tokens * dim;
  if (f != Format::kV3) return tokens * dim / 2;
  const std::int64_t whole = dim / kDimBlock, rest = dim % kDimBlock;
  return tokens / 16 * (whole * v3_group_bytes(kDimBlock) + v3_group_bytes(rest));
}

[[maybe_unused]] static constexpr BlockArrays block_arrays(Format f, Part part, std::int64_t tokens,
                                                           std::int64_t dim) noexcept {
  const auto aligned = [](std::int64_t bytes) {
    return (bytes + kArrayAlign - 1) / kArrayAlign * kArrayAlign;
  };
  const bool centred = part == Part::kK && f != Format::kK4;
  const std::int64_t scales = f == Format::kFp8 ? 2 : f == Format::kK4 ? dim : 2 * tokens;
  BlockArrays at{};
  at.grid = aligned(centred ? 2 * dim : 0);
  at.scale = at.grid + aligned(f == Format::kK4 ? 4 : 0);
  at.minimum = at.scale + aligned(scales);
  at.codes = at.minimum + aligned(f == Format::kK4 ? dim : 0);
  at.bytes = at.codes + aligned(code_bytes(f, tokens, dim));
  return at;
}

}  // namespace kvcore
