// Encoder and decoder of k4: four bits a key, a scale and a minimum per channel of the page.
#pragma once

#include "kernels/formats/codec_impl.h"

namespace kvcore::kernels::KVCORE_ISA_NS {
namespace {

// The two grids (f16) as floats.
struct K4Grids {
  float scale, minimum;
};

inline float max_over(const Channels& c, std::int64_t dim) {
  F top = set1(0.f);
  for (std::int64_t d = 0; d < dim; d += kW)
    top = vmax(top, first_n(static_cast<std::int32_t>(dim - d), vabs(load(c.at + d)), set1(0.f)));
  return hmax(top);
}

inline float first_of(F v) {
  float lanes[kW];
  store(lanes, v);
  return lanes[0];
}

inline void put_grids(char* to, const K4Grids& grids) {
  alignas(64) float wide[kW] = {grids.scale, grids.minimum};
  alignas(64) char lanes[kW * 2];
  store_f16(lanes, load(wide));
  copy_bytes(to, lanes, 4);
}
inline K4Grids get_grids(const char* from) {
  alignas(64) char lanes[kW * 2] = {};
  alignas(64) float wide[kW];
  copy_bytes(lanes, from, 4);
  store(wide, load_f16(lanes));
  return {wide[0], wide[1]};
}

// Writes scales and minima; turns low into each channel's z and high into 1 / step.
inline void put_channels(const EncodeBlock& a, const BlockArrays& at, Channels& low,
                         Channels& high) {
  K4Grids grids;
  grids.minimum = first_of(scale_for(set1(max_over(low, a.dim)), 127.f));
  const F grid = set1(grids.minimum);
  for (std::int64_t d = 0; d < a.dim; d += kW) {
    const F least = load(low.at + d), quotient = least / grid;
    Int code = truncate(quotient);
    code += (Int)(to_float(code) > quotient);      // floor
    code += (Int)(to_float(code) * grid > least);  // the quotient was rounded up to an integer
    put_u8(a.block + at.minimum + d, a.dim - d, code);
    const F z = to_float(code) * grid;
    store(low.at + d, z);
    store(high.at + d, (load(high.at + d) - z) / set1(15.f));
  }
  grids.scale = first_of(scale_for(set1(max_over(high, a.dim)), 448.f));
  put_grids(a.block + at.grid, grids);
  for (std::int64_t d = 0; d < a.dim; d += kW) {
    const Int code = up_e4m3(load(high.at + d) / set1(grids.scale));
    put_u8(a.block + at.scale + d, a.dim - d, code);
    store(high.at + d, set1(1.f) / (from_e4m3(code) * set1(grids.scale)));
  }
}

template <class E>
bool encode_k4(const EncodeBlock& a) {
  const BlockArrays at = block_arrays(a.format, a.part, a.tokens, a.dim);
  ChannelStats stats;
  if (!channel_stats<E, false, true>(a, stats)) return false;
  put_channels(a, at, stats.low, stats.high);
  const Channels &z = stats.low, &inverse = stats.high;
  Tile tile;
  for (std::int64_t first = 0; first < a.tokens; first += kGroup) {
    load_tile<E>(a, first, tile, [&](std::int64_t d, int, F x) {
      return (x - set1(z.at[d])) * set1(inverse.at[d]);
    });
    for (std::int64_t d = 0; d < a.dim; d += 8) {
      char* codes = a.block + at.codes + k_codes_at(a.tokens, a.dim / 8, first, d / 8, 4);
      for (int v = 0; v < kVecs16; ++v) {
        Int lanes = set1_int(0);
        for (int i = 0; i < 8; ++i)
          lanes |= round_int(tile.get(d + i, v)) << (i < 4 ? 8 * i : 8 * i - 28);
        fetch_next_codes(a, codes + 4 * v * kW);
        store_int(codes + 4 * v * kW, lanes);
      }
    }
  }
  return true;
}

// Each channel's z and step, as the block has them.
inline void get_channels(const char* block, std::int64_t tokens, std::int64_t dim, Channels& z,
                         Channels& step) {
  const BlockArrays at = block_arrays(Format::kK4, Part::kK, tokens, dim);
  const K4Grids grids = get_grids(block + at.grid);
  for (std::int64_t d = 0; d < dim; d += kW) {
    const Int minimum = get_u8(block + at.minimum + d, dim - d) << 24 >> 24;  // signed
    store(z.at + d, to_float(minimum) * set1(grids.minimum));
    store(step.at + d, from_e4m3(get_u8(block + at.scale + d, dim - d)) * set1(grids.scale));
  }
}

template <class E>
void decode_k4(const DecodeBlock& a) {
  const BlockArrays at = block_arrays(a.format, a.part, a.tokens, a.dim);
  Channels z, step;
  get_channels(a.block, a.tokens, a.dim, z, step);
  for (std::int64_t first = a.first; first < a.first + a.count; first += kGroup)
    store_tile<E>(a, first, [&](std::int64_t d, int v) {
      const Int lanes = load_int(a.block + at.codes +
                                 k_codes_at(a.tokens, a.dim / 8, first, d / 8, 4) + 4 * v * kW);
      const std::int64_t shift = d % 8 < 4 ? d % 8 * 8 : d % 8 * 8 - 28;
      const F code = to_float((lanes >> static_cast<std::int32_t>(shift)) & 15);
      return set1(z.at[d]) + set1(step.at[d]) * code;
    });
}

}  // namespace
}  // namespace kvcore::kernels::KVCORE_ISA_NS
