// What all codecs share: tiles of 16 tokens with tokens as lanes, the range check, e4m3, and work
// per channel of a page. simd/<isa>.h, simd/int_<isa>.h and simd/elements.h come first.
//
// Every value goes through the same single operations in the same order at every level and in
// kvcore.reference, so that blocks are equal byte for byte: no fused multiply-add (the build
// forbids contraction), no reciprocal approximations, sums in a stated order.
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

template <class E>
Row<E> row_of(const EncodeBlock& a, std::int64_t token) {
  return row_at<E>(a.rows + token * a.stride_bytes, 0);
}
template <class E>
Row<E> row_of(const DecodeBlock& a, std::int64_t token) {
  return row_at<E>(a.rows + (token - a.first) * a.stride_bytes, 0);
}

// Rows lie apart, and a block takes long enough for the hardware's own reading ahead to stop: what
// comes next is asked for at the same place of this block, one vector at a time.
template <class E>
inline void fetch_next(const EncodeBlock& a, Row<E> row, std::int64_t d) {
  if (a.ahead != 0) __builtin_prefetch(row.base + d * E::kBytes + a.ahead, 0, 2);
}
inline void fetch_next_codes(const EncodeBlock& a, const char* codes) {
  if (a.block_ahead != 0) __builtin_prefetch(codes + a.block_ahead, 1, 2);
}
inline void fetch_next_codes(const DecodeBlock& a, const char* codes) {
  if (a.block_ahead != 0) __builtin_prefetch(codes + a.block_ahead, 0, 2);
}
template <class E>
inline void fetch_next(const DecodeBlock& a, Row<E> row, std::int64_t d) {
  if (a.ahead != 0) __builtin_prefetch(row.base + d * E::kBytes + a.ahead, 1, 2);
}

inline void copy_bytes(void* to, const void* from, std::int64_t bytes) {
  __builtin_memcpy(to, from, static_cast<unsigned long>(bytes));
}
// The first n lanes, n possibly above kW; the others read as 0.
inline Int get_int(const char* p, std::int64_t n) {
  if (n >= kW) return load_int(p);
  alignas(64) char lanes[kW * 4] = {};
  copy_bytes(lanes, p, (n & (kW - 1)) * 4);
  return load_int(lanes);
}
inline void put_int(char* p, std::int64_t n, Int v) {
  if (n >= kW) return store_int(p, v);
  alignas(64) char lanes[kW * 4];
  store_int(lanes, v);
  copy_bytes(p, lanes, (n & (kW - 1)) * 4);
}
inline Int get_u16(const char* p, std::int64_t n) {
  if (n >= kW) return load_u16(p);
  alignas(64) char lanes[kW * 2] = {};
  copy_bytes(lanes, p, (n & (kW - 1)) * 2);
  return load_u16(lanes);
}
inline void put_u16(char* p, std::int64_t n, Int v) {
  if (n >= kW) return store_u16(p, v);
  alignas(64) char lanes[kW * 2];
  store_u16(lanes, v);
  copy_bytes(p, lanes, (n & (kW - 1)) * 2);
}
inline Int get_u8(const char* p, std::int64_t n) {
  if (n >= kW) return load_u8(p);
  alignas(64) char lanes[kW] = {};
  copy_bytes(lanes, p, n & (kW - 1));
  return load_u8(lanes);
}
inline void put_u8(char* p, std::int64_t n, Int v) {
  if (n >= kW) return store_u8(p, v);
  alignas(64) char lanes[kW];
  store_u8(lanes, v);
  copy_bytes(p, lanes, n & (kW - 1));
}

// --- two vectors of a row at a time ------------------------------------------------------------
// bf16 rows are read and transposed as pairs of dims, which halves the shuffles: Two::a are the
// even dims of 2 * kW, Two::b the odd ones. Other elements: a is the first kW dims, b the next.

template <class E>
constexpr bool kPairs = false;
template <>
constexpr bool kPairs<Bf16Elements> = true;

struct Two {
  F a, b;
};
inline Two of_pairs(Int pairs) {
  return {as_float(pairs << 16), as_float(pairs & static_cast<std::int32_t>(0xffff0000u))};
}

// Whether all numbers seen are finite and at most 65504 in magnitude.
template <class E>
struct Range {
  Int top = set1_int(0);  // float bits of the largest magnitudes; for pairs their upper halves

  void see(F v) { top = max_int(top, magnitude(v)); }
  bool holds() const {
    std::int32_t lanes[kW];
    store_int(lanes, top);
    bool good = true;
    for (const std::int32_t x : lanes) good = good && x <= kMaxMagnitudeBits;
    return good;
  }
};
template <>
struct Range<Bf16Elements> {
  Int top = set1_int(0);

  void see_pairs(Int pairs) { top = max_u16(top, pairs & 0x7fff7fff); }
  bool holds() const {
    std::uint16_t halves[2 * kW];
    store_int(halves, top);
    bool good = true;
    for (const std::uint16_t x : halves) good = good && x <= (kMaxMagnitudeBits >> 16);
    return good;
  }
};

template <class E>
Two get_two(Row<E> row, std::int64_t d, std::int64_t dim, Range<E>& range) {
  if constexpr (kPairs<E>) {
    const Int pairs = get_int(row.base + 2 * d, (dim - d) / 2);
    range.see_pairs(pairs);
    return of_pairs(pairs);
  } else {
    const Two two{row.get(d, dim - d), d + kW < dim ? row.get(d + kW, dim - d - kW) : set1(0.f)};
    range.see(two.a);
    range.see(two.b);
    return two;
  }
}

// From the order of Two to the order of dims.
template <class E>
void in_order(Channels& c, std::int64_t dim) {
  if constexpr (kPairs<E>)
    for (std::int64_t d = 0; d < dim; d += 2 * kW) {
      float mixed[2 * kW];
      copy_bytes(mixed, c.at + d, sizeof mixed);
      for (int i = 0; i < kW; ++i) {
        c.at[d + 2 * i] = mixed[i];
        c.at[d + 2 * i + 1] = mixed[kW + i];
      }
    }
}

// Values of 16 tokens from `first` on with tokens as lanes: tile[dim][vec] = op(dim, vec, value).
// Lanes past the last dim are 0.
template <class E, class Op>
void load_tile(const EncodeBlock& a, std::int64_t first, Tile& tile, Op op) {
  constexpr int kStep = kPairs<E> ? 2 : 1;
  for (int vec = 0; vec < kVecs16; ++vec)
    for (std::int64_t d = 0; d < a.dim; d += kStep * kW) {
      F v[kW];
      for (int i = 0; i < kW; ++i) {
        const Row<E> row = row_of<E>(a, first + vec * kW + i);
        fetch_next(a, row, d);
        if constexpr (kPairs<E>)
          v[i] = as_float(get_int(row.base + 2 * d, (a.dim - d) / 2));
        else
          v[i] = row.get(d, a.dim - d);
      }
      transpose(v);
#pragma GCC unroll 16
      for (int i = 0; i < kW; ++i) {
        if constexpr (kPairs<E>) {
          const Two two = of_pairs(as_int(v[i]));
          tile.put(d + 2 * i, vec, op(d + 2 * i, vec, two.a));
          tile.put(d + 2 * i + 1, vec, op(d + 2 * i + 1, vec, two.b));
        } else {
          tile.put(d + i, vec, op(d + i, vec, v[i]));
        }
      }
    }
}

// One vector of tokens, dims [d, d + kW) or pairs of dims [d, d + 2 * kW); dims past the last are
// 0.
template <class E, bool kWhole, class Value>
void store_part(const DecodeBlock& a, std::int64_t first, std::int64_t d, int vec, Value value) {
  const auto at = [&](std::int64_t dim) {
    return kWhole || dim < a.dim ? value(dim, vec) : set1(0.f);
  };
  F v[kW];
#pragma GCC unroll 16
  for (int i = 0; i < kW; ++i) {
    if constexpr (kPairs<E>)
      v[i] = as_float(join_bf16(at(d + 2 * i), at(d + 2 * i + 1)));
    else
      v[i] = at(d + i);
  }
  transpose(v);
  for (int i = 0; i < kW; ++i) {
    const Row<E> row = row_of<E>(a, first + vec * kW + i);
    fetch_next(a, row, d);
    if constexpr (kPairs<E>)
      put_int(row.base + 2 * d, (a.dim - d) / 2, as_int(v[i]));
    else
      row.put(d, a.dim - d, v[i]);
  }
}

// The reverse of load_tile: row[first + token][dim] = value(dim, vec).
template <class E, class Value>
void store_tile(const DecodeBlock& a, std::int64_t first, Value value) {
  constexpr int kDims = kPairs<E> ? 2 * kW : kW;
  const std::int64_t whole = a.dim / kDims * kDims;
  for (int vec = 0; vec < kVecs16; ++vec) {
    for (std::int64_t d = 0; d < whole; d += kDims) store_part<E, true>(a, first, d, vec, value);
    if (whole < a.dim) store_part<E, false>(a, first, whole, vec, value);
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

// kN times 2 * kW channels at a time.
template <class E, bool kSum, bool kRange, int kN>
void stats_of(const EncodeBlock& a, std::int64_t first, ChannelStats& out, Range<E>& range) {
  Range<E> seen = range;
  Two sum[kN], low[kN], high[kN];
  for (int n = 0; n < kN; ++n) {
    sum[n] = {set1(0.f), set1(0.f)};
    low[n] = high[n] = get_two(row_of<E>(a, 0), first + n * 2 * kW, a.dim, seen);
  }
  for (std::int64_t t = 0; t < a.tokens; ++t)
#pragma GCC unroll 4
    for (int n = 0; n < kN; ++n) {
      const Two v = get_two(row_of<E>(a, t), first + n * 2 * kW, a.dim, seen);
      if constexpr (kSum) sum[n] = {sum[n].a + v.a, sum[n].b + v.b};
      if constexpr (kRange) {
        low[n] = {vmin(low[n].a, v.a), vmin(low[n].b, v.b)};
        high[n] = {vmax(high[n].a, v.a), vmax(high[n].b, v.b)};
      }
    }
  range = seen;
  const auto put = [first](Channels& to, const Two* two) {
    for (int n = 0; n < kN; ++n) {
      store(to.at + first + n * 2 * kW, two[n].a);
      store(to.at + first + n * 2 * kW + kW, two[n].b);
    }
  };
  if constexpr (kSum) put(out.sum, sum);
  if constexpr (kRange) put(out.low, low), put(out.high, high);
}

// False when a value is out of range. Where registers allow, whole rows are read in the order they
// lie in memory: this is the first time that the block is touched.
template <class E, bool kSum, bool kRange>
bool channel_stats(const EncodeBlock& a, ChannelStats& out) {
  constexpr int kN = kW == 16 ? 4 : 2;
  Range<E> range;
  std::int64_t d = 0;
  for (; d + kN * 2 * kW <= a.dim; d += kN * 2 * kW)
    stats_of<E, kSum, kRange, kN>(a, d, out, range);
  for (; d < a.dim; d += 2 * kW) stats_of<E, kSum, kRange, 1>(a, d, out, range);
  if constexpr (kSum) in_order<E>(out.sum, a.dim);
  if constexpr (kRange) {
    in_order<E>(out.low, a.dim);
    in_order<E>(out.high, a.dim);
  }
  return range.holds();
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
