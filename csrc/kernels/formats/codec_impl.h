// What all codecs share: tiles of 16 tokens with tokens as lanes, the range check, e4m3, and work per
// channel of a page. simd/<isa>.h, simd/int_<isa>.h and simd/elements.h come first.
//
// Every value goes through the same single operations in the same order at every level and in
// kvcore.reference, so that blocks are equal byte for byte: no fused multiply-add (the build forbids
// contraction), no reciprocal approximations, sums in a stated order.
#pragma once

#include "kernels/formats/block.h"

namespace kvcore::kernels::KVCORE_ISA_NS {
namespace {

constexpr std::int64_t kGroup = 16;  // tokens of a tile

// Values of 16 tokens: [dim][token].
struct alignas(64) Tile {
  float at[kMaxCodecDim][kGroup];

  F get(std::int64_t dim, int vec) const { return load(&at[dim][vec * kW]); }
  void put(std::int64_t dim, int vec, F v) { store(&at[dim][vec * kW], v); }
};

// Per-channel numbers of a page, padded so that whole vectors can be written.
struct alignas(64) Channels {
  float at[kMaxCodecDim];
};

inline Int as_int(F v) { return (Int)v; }
inline F as_float(Int v) { return (F)v; }
inline Int magnitude(F v) { return as_int(v) & 0x7fffffff; }
inline F vabs(F v) { return as_float(magnitude(v)); }

// Largest magnitude seen, as float bits: above kMaxMagnitudeBits means too large, Inf or NaN.
inline bool within_range(Int largest) {
  std::int32_t lanes[kW];
  store_int(lanes, largest);
  std::int32_t top = 0;
  for (const std::int32_t x : lanes) top = x > top ? x : top;
  return top <= kMaxMagnitudeBits;
}

template <class E>
Row<E> row_of(const EncodeBlock& a, std::int64_t token) {
  return row_at<E>(a.rows + token * a.stride_bytes, 0);
}

// 16 tokens from `first` on. Lanes past the last dim become rows of zeros.
template <class E>
void load_tile(const EncodeBlock& a, std::int64_t first, Tile& tile) {
  for (std::int64_t t = 0; t < kGroup; t += kW)
    for (std::int64_t d = 0; d < a.dim; d += kW) {
      F v[kW];
      for (int i = 0; i < kW; ++i) v[i] = row_of<E>(a, first + t + i).get(d, a.dim - d);
      transpose(v);
      for (int i = 0; i < kW; ++i) store(&tile.at[d + i][t], v[i]);
    }
}

template <class E>
void store_tile(const DecodeBlock& a, std::int64_t first, const Tile& tile) {
  for (std::int64_t t = 0; t < kGroup; t += kW)
    for (std::int64_t d = 0; d < a.dim; d += kW) {
      F v[kW];
      for (int i = 0; i < kW; ++i) v[i] = load(&tile.at[d + i][t]);
      transpose(v);
      for (int i = 0; i < kW; ++i)
        row_at<E>(a.rows + (first + t + i) * a.stride_bytes, 0).put(d, a.dim - d, v[i]);
    }
}

// Byte offset of the codes of tokens [first, first + 16) of a K block, group `i` of dims: lanes of
// `bytes` bytes each, [P/TB][groups][TB][bytes].
inline std::int64_t k_codes_at(std::int64_t tokens, std::int64_t groups, std::int64_t first,
                               std::int64_t i, std::int64_t bytes) {
  const std::int64_t lanes = tokens < kTokenBlock ? tokens : kTokenBlock;
  return ((first / lanes * groups + i) * lanes + first % lanes) * bytes;
}

// Byte offset of dim d, group of tokens `i`, in V codes that hold 4 bytes (or `bytes`) a lane:
// per dim block [groups][DB][bytes].
inline std::int64_t v_codes_at(std::int64_t dim, std::int64_t groups, std::int64_t d,
                               std::int64_t i, std::int64_t bytes) {
  const std::int64_t first = d / kDimBlock * kDimBlock;
  const std::int64_t width = dim - first < kDimBlock ? dim - first : kDimBlock;
  return (first * groups + i * width + d - first) * bytes;
}

inline void store_first_bytes(void* to, const void* lanes, std::int64_t bytes) {
  __builtin_memcpy(to, lanes, static_cast<unsigned long>(bytes));
}
// The first n lanes of v (as dwords, halves), n counted in lanes and possibly more than kW.
inline void put_int(char* p, std::int64_t n, Int v) {
  if (n >= kW) return store_int(p, v);
  alignas(64) char lanes[kW * 4];
  store_int(lanes, v);
  store_first_bytes(p, lanes, n * 4);
}
inline void put_u16(char* p, std::int64_t n, Int v) {
  if (n >= kW) return store_u16(p, v);
  alignas(64) char lanes[kW * 2];
  store_u16(lanes, v);
  store_first_bytes(p, lanes, n * 2);
}
inline void put_u8(char* p, std::int64_t n, Int v) {
  if (n >= kW) return store_u8(p, v);
  alignas(64) char lanes[kW];
  store_u8(lanes, v);
  store_first_bytes(p, lanes, n);
}
inline Int get_int(const char* p, std::int64_t n) {
  if (n >= kW) return load_int(p);
  alignas(64) char lanes[kW * 4] = {};
  store_first_bytes(lanes, p, n * 4);
  return load_int(lanes);
}
inline Int get_u16(const char* p, std::int64_t n) {
  if (n >= kW) return load_u16(p);
  alignas(64) char lanes[kW * 2] = {};
  store_first_bytes(lanes, p, n * 2);
  return load_u16(lanes);
}

// f16 not below v / steps, never 0: the scale with which `steps` codes reach v.
inline F scale_for(F v, float steps) { return vmax(up_f16(v / set1(steps)), set1(0x1p-24f)); }

inline Int to_e4m3(F v) {  // |v| at most 448 plus rounding
  const Int mag = magnitude(v);
  const Int normal = ((mag + 0x7ffff + ((mag >> 20) & 1)) >> 20) - 960;
  const Int small = round_int(as_float(mag) * set1(0x1p9f));  // below 2^-6: steps of 2^-9
  const Int below = mag < set1_int(0x3c800000);
  return (small & below) | (normal & ~below) | ((as_int(v) >> 24) & 0x80);
}
inline Int up_e4m3(F v) {  // of numbers from 0 to 448; at least the smallest above 0
  const Int mag = magnitude(v);
  const Int normal = ((mag + 0xfffff) >> 20) - 960;
  const F steps = v * set1(0x1p9f);
  const Int floor = truncate(steps);
  const Int small = floor - (Int)(steps > to_float(floor));
  const Int below = mag < set1_int(0x3c800000);
  return max_int((small & below) | (normal & ~below), set1_int(1));
}
inline F from_e4m3(Int code) {
  const Int mag = code & 0x7f;
  const Int below = mag < set1_int(8);
  const Int normal = (mag << 20) + 0x3c000000;
  const Int small = as_int(to_float(mag) * set1(0x1p-9f));
  return as_float((small & below) | (normal & ~below) | ((code & 0x80) << 24));
}

// Sum (in token order), minimum and maximum of each channel; unused ones are left out by template.
struct ChannelStats {
  Channels sum, low, high;
};

template <class E, bool kSum, bool kRange, int kN>
Int stats_of(const EncodeBlock& a, std::int64_t d, ChannelStats& out, Int largest) {
  F sum[kN], low[kN], high[kN];
  for (int n = 0; n < kN; ++n) {
    sum[n] = set1(0.f);
    low[n] = high[n] = row_of<E>(a, 0).get(d + n * kW, a.dim - d - n * kW);
  }
  for (std::int64_t t = 0; t < a.tokens; ++t) {
    const Row<E> row = row_of<E>(a, t);
    for (int n = 0; n < kN; ++n) {
      const F v = kN == 1 ? row.get(d, a.dim - d) : row.get(d + n * kW);
      largest = max_int(largest, magnitude(v));
      if constexpr (kSum) sum[n] = sum[n] + v;
      if constexpr (kRange) {
        low[n] = vmin(low[n], v);
        high[n] = vmax(high[n], v);
      }
    }
  }
  for (int n = 0; n < kN; ++n) {
    if constexpr (kSum) store(out.sum.at + d + n * kW, sum[n]);
    if constexpr (kRange) {
      store(out.low.at + d + n * kW, low[n]);
      store(out.high.at + d + n * kW, high[n]);
    }
  }
  return largest;
}

// False when a value is out of range.
template <class E, bool kSum, bool kRange>
bool channel_stats(const EncodeBlock& a, ChannelStats& out) {
  constexpr int kN = 4;
  Int largest = set1_int(0);
  std::int64_t d = 0;
  for (; d + kN * kW <= a.dim; d += kN * kW)
    largest = stats_of<E, kSum, kRange, kN>(a, d, out, largest);
  for (; d < a.dim; d += kW) largest = stats_of<E, kSum, kRange, 1>(a, d, out, largest);
  return within_range(largest);
}

// Writes the channels' means (bf16; tiny ones as 0) and gives them back as read.
inline void put_means(const EncodeBlock& a, const BlockArrays& at, Channels& mean) {
  const F tokens = set1(static_cast<float>(a.tokens));
  const Row<Bf16Elements> stored = row_at<Bf16Elements>(a.block + at.mean, 0);
  for (std::int64_t d = 0; d < a.dim; d += kW) {
    const F exact = load(mean.at + d) / tokens;
    const Int keep = magnitude(exact) >= set1_int(0x00800000);
    stored.put(d, a.dim - d, as_float(as_int(exact) & keep));
    store(mean.at + d, stored.get(d, a.dim - d));
  }
}

inline void get_means(const DecodeBlock& a, const BlockArrays& at, Channels& mean) {
  const Row<Bf16Elements> stored = row_at<Bf16Elements>(a.block + at.mean, 0);
  for (std::int64_t d = 0; d < a.dim; d += kW) store(mean.at + d, stored.get(d, a.dim - d));
}

// f16 scales of 16 tokens, widened.
struct TokenScales {
  F at[kVecs16];
};

inline TokenScales get_scales(const char* scales, std::int64_t first) {
  TokenScales s;
  for (int v = 0; v < kVecs16; ++v) s.at[v] = load_f16(scales + 2 * (first + v * kW));
  return s;
}

}  // namespace
}  // namespace kvcore::kernels::KVCORE_ISA_NS
