// Encoders and decoders of v4 and v3: signs, Hadamard transform, nearest level of a codebook, norm.
#pragma once

#include "kernels/formats/codec_impl.h"

namespace kvcore::kernels::KVCORE_ISA_NS {
namespace {

struct alignas(64) Signs {
  std::int32_t bits[kMaxCodecDim];  // the sign bit of a float, or 0
};
constexpr Signs make_signs() {
  Signs s{};
  for (std::int64_t d = 0; d < kMaxCodecDim; ++d)
    s.bits[d] = (kSignWords[d / 64] >> (d % 64) & 1) != 0 ? std::int32_t{-0x7fffffff - 1} : 0;
  return s;
}
constexpr Signs kSigns = make_signs();

// What differs between v4 and v3, as tables that a vector can look up. Encoders measure in cells of
// `width` levels; each cell holds at most one boundary between two levels.
struct alignas(64) Codebook {
  std::int32_t levels;  // positive ones
  float units;          // cells per standard deviation
  float boundary[16];   // of a cell, in cells: between levels c and c + 1
  float square[16];     // of the level of a magnitude
  float all[16];        // levels of codes
};
template <int kN>
constexpr Codebook make_codebook(const std::int32_t (&levels)[kN], float units, float width) {
  Codebook b{kN, units / width, {}, {}, {}};
  for (int i = 0; i < 16; ++i) b.boundary[i] = __builtin_inff();
  for (int i = 0; i < kN; ++i) {
    const auto level = static_cast<float>(levels[i]);
    b.square[i] = level * level;
    b.all[kN + i] = level;
    b.all[kN - 1 - i] = -level;
    if (i + 1 < kN) b.boundary[i] = static_cast<float>(levels[i] + levels[i + 1]) / (2.f * width);
  }
  return b;
}
// Widths are powers of two, so that counting in cells rounds as counting in levels does.
constexpr Codebook kV4Book = make_codebook(kV4Levels, kV4Units, 16.f);
constexpr Codebook kV3Book = make_codebook(kV3Levels, kV3Units, 32.f);
constexpr bool one_boundary_per_cell(const Codebook& b) {
  for (int i = 0; i + 1 < b.levels; ++i)
    if (static_cast<int>(b.boundary[i]) != i) return false;
  return true;
}
static_assert(one_boundary_per_cell(kV4Book) && one_boundary_per_cell(kV3Book));

// --- Hadamard transform over dims, tokens as lanes --------------------------------------------

// kStages butterfly stages, of distances h, 2h, ...; (a, b) becomes (a + b, a - b).
template <int kStages>
void butterflies(Tile& tile, std::int64_t dim, std::int64_t h) {
  constexpr int kN = 1 << kStages;
  for (std::int64_t base = 0; base < dim; base += kN * h)
    for (std::int64_t i = base; i < base + h; ++i)
      for (int v = 0; v < kVecs16; ++v) {
        F x[kN];
#pragma GCC unroll 16
        for (int n = 0; n < kN; ++n) x[n] = tile.get(i + n * h, v);
#pragma GCC unroll 4
        for (int step = 1; step < kN; step *= 2)
#pragma GCC unroll 16
          for (int n = 0; n < kN; ++n)
            if ((n & step) == 0) {
              const F a = x[n], b = x[n + step];
              x[n] = a + b;
              x[n + step] = a - b;
            }
#pragma GCC unroll 16
        for (int n = 0; n < kN; ++n) tile.put(i + n * h, v, x[n]);
      }
}

inline void hadamard(Tile& tile, std::int64_t dim) {
  const std::int64_t width = hadamard_width(dim);
  std::int64_t h = 1;
  if (kW == 16 && width == 128) {  // enough registers for 4 + 3 stages instead of 3 + 3 + 1
    butterflies<kW == 16 ? 4 : 3>(tile, dim, h);
    h = 16;
  }
  while (h * 8 <= width) {
    butterflies<3>(tile, dim, h);
    h *= 8;
  }
  if (h * 4 == width) butterflies<2>(tile, dim, h);
  if (h * 2 == width) butterflies<1>(tile, dim, h);
}

// --- encoding ----------------------------------------------------------------------------------

// Codes of 16 tokens, one byte a value: [dim][token].
struct alignas(64) Codes {
  std::uint8_t at[kMaxCodecDim][kGroup];
};

// Codes of one vector of tokens and the norms that give the decoded rows their length.
inline F choose_codes(const Tile& tile, const Codebook& book, std::int64_t dim, int v,
                      Codes& codes) {
  F sums[4] = {set1(0.f), set1(0.f), set1(0.f), set1(0.f)};
  for (std::int64_t d = 0; d < dim; d += 4)
    for (int i = 0; i < 4; ++i) {
      const F x = tile.get(d + i, v);
      sums[i] = sums[i] + x * x;
    }
  const F energy = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  const Int visible = energy >= set1(0x1p-60f);
  const F raw = vsqrt(set1(static_cast<float>(dim)) / energy) * set1(book.units);
  const F unit = as_float(as_int(raw) & visible);
  const Table16 boundary(book.boundary), square(book.square);
  const Int top = set1_int(book.levels - 1), half = set1_int(book.levels);
  const Int flip = set1_int(2 * book.levels - 1);
  F squares = set1(0.f);  // an integer below 2^24: exact
  for (std::int64_t d = 0; d < dim; ++d) {
    const F x = tile.get(d, v) * unit, size = vabs(x);
    const Int cell = min_int(truncate(size), top);
    const Int index = plus_above(cell, size, boundary(cell));
    squares = squares + square(index);
    store_u8(&codes.at[d][v * kW], (index + half) ^ (flip & (as_int(x) >> 31)));
  }
  const F width = set1(static_cast<float>(hadamard_width(dim)));
  return vmax(nearest_f16(vsqrt(energy / (squares * width))), set1(0x1p-24f));
}

inline void pack_v4(const EncodeBlock& a, std::int64_t codes_at, std::int64_t first,
                    const Codes& codes) {
  for (std::int64_t g = 0; g < 2; ++g)
    for (std::int64_t d = 0; d < a.dim; d += kDimBlock) {
      char* to = a.block + codes_at + v_codes_at(a.dim, a.tokens / 8, d, first / 8 + g, 4);
      const std::int64_t n = a.dim - d < kDimBlock ? a.dim - d : kDimBlock;
      for (std::int64_t i = 0; i < n; ++i) {
        std::uint64_t x;
        __builtin_memcpy(&x, codes.at[d + i] + 8 * g, 8);
        const auto lane = static_cast<std::uint32_t>(x | x >> 28);
        __builtin_memcpy(to + 4 * i, &lane, 4);
      }
    }
}

// Byte offset of dim block [d, d + DB), 16 tokens from `first` on, in the codes of v3.
inline std::int64_t v3_codes_at(std::int64_t tokens, std::int64_t dim, std::int64_t d,
                                std::int64_t first) {
  const std::int64_t width = dim - d < kDimBlock ? dim - d : kDimBlock;
  return tokens / 16 * (d / kDimBlock * v3_group_bytes(kDimBlock)) +
         first / 16 * v3_group_bytes(width);
}

// 4 x 4 nibbles, nibble 4r + c to 4c + r.
inline std::uint64_t transpose_nibbles(std::uint64_t x) {
  std::uint64_t t = (x ^ x >> 12) & 0x0000f0f00000f0f0u;
  x ^= t ^ t << 12;
  t = (x ^ x >> 24) & 0x00000000ff00ff00u;
  return x ^ t ^ t << 24;
}

inline void pack_v3(const EncodeBlock& a, std::int64_t codes_at, std::int64_t first,
                    const Codes& codes) {
  for (std::int64_t d = 0; d < a.dim; d += kDimBlock) {
    char* to = a.block + codes_at + v3_codes_at(a.tokens, a.dim, d, first);
    const std::int64_t n = a.dim - d < kDimBlock ? a.dim - d : kDimBlock;
    std::uint64_t high[kDimBlock / 4] = {};  // 4 dims of 16 tokens each
    for (std::int64_t i = 0; i < n; ++i) {
      std::uint64_t x[2];  // byte 4j + b: tokens 4j + b and 8 + 4j + b
      __builtin_memcpy(x, codes.at[d + i], 16);
      std::uint64_t low = (x[0] & 0x0303030303030303u) | (x[1] & 0x0303030303030303u) << 4;
      low |= low >> 30;
      __builtin_memcpy(to + 4 * i, &low, 4);
      high[i / 4] |= std::uint64_t{third_bits(codes.at[d + i])} << (i % 4 * 16);
    }
    for (std::int64_t i = 0; i < n; i += 4) {  // 16 bits of each of the four masks
      const std::uint64_t quarters = transpose_nibbles(high[i / 4]);
      char* masks = to + 4 * n + i / 16 * 32 + i % 16 / 2;
      for (int j = 0; j < 4; ++j) {
        const auto part = static_cast<std::uint16_t>(quarters >> (16 * j));
        __builtin_memcpy(masks + 8 * j, &part, 2);
      }
    }
    if (n % 16 != 0)  // dims that are not there
      for (int j = 0; j < 4; ++j) __builtin_memset(to + 4 * n + n / 16 * 32 + 8 * j + 4, 0, 4);
  }
}

template <class E>
bool in_range(const EncodeBlock& a) {
  Range<E> range;
  for (std::int64_t t = 0; t < a.tokens; ++t)
    for (std::int64_t d = 0; d < a.dim; d += 2 * kW) get_two(row_of<E>(a, t), d, a.dim, range);
  return range.holds();
}

template <class E>
bool encode_rotated(const EncodeBlock& a) {
  const BlockArrays at = block_arrays(a.format, a.part, a.tokens, a.dim);
  const bool four = a.format == Format::kV4;
  const Codebook& book = four ? kV4Book : kV3Book;
  if (!in_range<E>(a)) return false;
  Tile tile;
  Codes codes;
  for (std::int64_t first = 0; first < a.tokens; first += kGroup) {
    load_tile<E>(a, first, tile,
                 [](std::int64_t d, int, F x) { return as_float(as_int(x) ^ kSigns.bits[d]); });
    hadamard(tile, a.dim);
    for (int v = 0; v < kVecs16; ++v)
      store_f16(a.block + at.scale + 2 * (first + v * kW),
                choose_codes(tile, book, a.dim, v, codes));
    if (four)
      pack_v4(a, at.codes, first, codes);
    else
      pack_v3(a, at.codes, first, codes);
  }
  return true;
}

// --- decoding ----------------------------------------------------------------------------------

struct alignas(64) TokenShifts {
  std::int32_t at[kGroup];
};

// Values of dim d of 16 tokens before the transform, from v4: two lanes of 8 tokens.
inline void unpack_v4(const DecodeBlock& a, std::int64_t codes_at, std::int64_t first,
                      const TokenScales& norm, Tile& tile) {
  static constexpr TokenShifts kShift{{0, 8, 16, 24, 4, 12, 20, 28, 0, 8, 16, 24, 4, 12, 20, 28}};
  static constexpr TokenShifts kSecond{{0, 0, 0, 0, 0, 0, 0, 0, -1, -1, -1, -1, -1, -1, -1, -1}};
  const Table16 level(kV4Book.all);
  for (std::int64_t d = 0; d < a.dim; ++d) {
    std::int32_t lane[2];
    for (std::int64_t g = 0; g < 2; ++g)
      __builtin_memcpy(
          &lane[g], a.block + codes_at + v_codes_at(a.dim, a.tokens / 8, d, first / 8 + g, 4), 4);
    for (int v = 0; v < kVecs16; ++v) {
      const Int second = load_int(kSecond.at + v * kW);
      const Int both = (set1_int(lane[1]) & second) | (set1_int(lane[0]) & ~second);
      const Int code = (both >> load_int(kShift.at + v * kW)) & 15;
      tile.put(d, v, norm.at[v] * level(code));
    }
  }
}

// High bits of 16 dims, by token: bit 4 * (dim % 8) of low[token] (dims 0 to 7) or high[token].
struct alignas(64) HighBits {
  std::int32_t low[kGroup], high[kGroup];
};
inline void load_high_bits(const char* from, HighBits& bits) {
  std::uint32_t masks[4][2];
  __builtin_memcpy(masks, from, 32);
  for (int t = 0; t < kGroup; ++t) {
    bits.low[t] = static_cast<std::int32_t>(masks[t / 4][0] >> (t % 4));
    bits.high[t] = static_cast<std::int32_t>(masks[t / 4][1] >> (t % 4));
  }
}

inline void unpack_v3(const DecodeBlock& a, std::int64_t codes_at, std::int64_t first,
                      const TokenScales& norm, Tile& tile) {
  static constexpr TokenShifts kShift{{0, 8, 16, 24, 2, 10, 18, 26, 4, 12, 20, 28, 6, 14, 22, 30}};
  const Table16 level(kV3Book.all);
  for (std::int64_t d = 0; d < a.dim; d += kDimBlock) {
    const char* from = a.block + codes_at + v3_codes_at(a.tokens, a.dim, d, first);
    const std::int64_t n = a.dim - d < kDimBlock ? a.dim - d : kDimBlock;
    for (std::int64_t i = 0; i < n; i += 8) {
      HighBits bits;
      load_high_bits(from + 4 * n + i / 16 * 32, bits);
      const std::int32_t* high = i % 16 == 0 ? bits.low : bits.high;
      for (int lane = 0; lane < 8; ++lane) {
        std::int32_t low;
        __builtin_memcpy(&low, from + 4 * (i + lane), 4);
        for (int v = 0; v < kVecs16; ++v) {
          const Int two = (set1_int(low) >> load_int(kShift.at + v * kW)) & 3;
          const Int one = (load_int(high + v * kW) >> (4 * lane)) & 1;
          tile.put(d + i + lane, v, norm.at[v] * level(two | (one << 2)));
        }
      }
    }
  }
}

template <class E>
void decode_rotated(const DecodeBlock& a) {
  const BlockArrays at = block_arrays(a.format, a.part, a.tokens, a.dim);
  const F factor = set1(1.f) / vsqrt(set1(static_cast<float>(hadamard_width(a.dim))));
  Tile tile;
  for (std::int64_t first = a.first; first < a.first + a.count; first += kGroup) {
    const TokenScales norm = get_scales(a.block + at.scale, first);
    if (a.format == Format::kV4)
      unpack_v4(a, at.codes, first, norm, tile);
    else
      unpack_v3(a, at.codes, first, norm, tile);
    hadamard(tile, a.dim);
    store_tile<E>(a, first, [&](std::int64_t d, int v) {
      return tile.get(d, v) * as_float(as_int(factor) ^ kSigns.bits[d]);
    });
  }
}

}  // namespace
}  // namespace kvcore::kernels::KVCORE_ISA_NS
