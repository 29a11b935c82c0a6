// Encoders and decoders of int8 and fp8.
#pragma once

#include "kernels/formats/codec_impl.h"

namespace kvcore::kernels::KVCORE_ISA_NS {
namespace {

typedef std::uint32_t Unsigned __attribute__((vector_size(sizeof(Int))));  // wraps around

// Four codes of one lane (dims or tokens, -127 to 127) as bytes of a dword, 128 added to each.
inline Int join4(Int a, Int b, Int c, Int d) {
  const Unsigned low = (Unsigned)a + ((Unsigned)b << 8);
  const Unsigned high = ((Unsigned)c << 16) + ((Unsigned)d << 24);
  return (Int)(low + high + 0x80808080u);
}

// --- int8, K: tokens are lanes -----------------------------------------------------------------

template <class E>
bool encode_int8_k(const EncodeBlock& a) {
  const BlockArrays at = block_arrays(a.format, a.part, a.tokens, a.dim);
  ChannelStats stats;
  if (!channel_stats<E, true, false>(a, stats)) return false;
  const Channels& mean = stats.sum;
  put_means(a, at, stats.sum);
  Tile tile;
  for (std::int64_t first = 0; first < a.tokens; first += kGroup) {
    F top[kVecs16], inverse[kVecs16];
    for (F& t : top) t = set1(0.f);
    load_tile<E>(a, first, tile, [&](std::int64_t d, int v, F x) {
      x = x - set1(mean.at[d]);
      top[v] = vmax(top[v], vabs(x));
      return x;
    });
    for (int v = 0; v < kVecs16; ++v) {
      const F scale = scale_for(top[v], 127.f);
      store_f16(a.block + at.scale + 2 * (first + v * kW), scale);
      inverse[v] = set1(1.f) / scale;
    }
    for (std::int64_t d = 0; d < a.dim; d += 4) {
      char* codes = a.block + at.codes + k_codes_at(a.tokens, a.dim / 4, first, d / 4, 4);
      for (int v = 0; v < kVecs16; ++v) {
        const auto code = [&](std::int64_t i) {
          return round_int(tile.get(d + i, v) * inverse[v]);
        };
        fetch_next_codes(a, codes + 4 * v * kW);
        store_int(codes + 4 * v * kW, join4(code(0), code(1), code(2), code(3)));
      }
    }
  }
  return true;
}

template <class E>
void decode_int8_k(const DecodeBlock& a) {
  const BlockArrays at = block_arrays(a.format, a.part, a.tokens, a.dim);
  Channels mean;
  get_means(a, at, mean);
  for (std::int64_t first = a.first; first < a.first + a.count; first += kGroup) {
    const TokenScales scale = get_scales(a.block + at.scale, first);
    store_tile<E>(a, first, [&](std::int64_t d, int v) {
      const char* codes =
          a.block + at.codes + k_codes_at(a.tokens, a.dim / 4, first, d / 4, 4) + 4 * v * kW;
      if (d % 4 == 0) fetch_next_codes(a, codes);
      const Int code =
          ((load_int(codes) ^ static_cast<std::int32_t>(0x80808080u)) << (24 - d % 4 * 8)) >> 24;
      return set1(mean.at[d]) + scale.at[v] * to_float(code);
    });
  }
}

// --- int8, V: dims are lanes -------------------------------------------------------------------

// Largest magnitudes of a row, per lane.
template <class E>
F row_top(const EncodeBlock& a, std::int64_t token, Range<E>& range) {
  F top = set1(0.f);
  for (std::int64_t d = 0; d < a.dim; d += 2 * kW) {
    const Two two = get_two(row_of<E>(a, token), d, a.dim, range);
    top = vmax(top, vmax(vabs(two.a), vabs(two.b)));
  }
  return top;
}

template <class E>
bool encode_int8_v(const EncodeBlock& a) {
  const BlockArrays at = block_arrays(a.format, a.part, a.tokens, a.dim);
  Range<E> range;
  for (std::int64_t first = 0; first < a.tokens; first += kGroup) {
    alignas(64) float top[kGroup], inverse[kGroup];
    for (std::int64_t t = 0; t < kGroup; ++t) top[t] = hmax(row_top<E>(a, first + t, range));
    for (std::int64_t t = 0; t < kGroup; t += kW) {
      const F scale = scale_for(load(top + t), 127.f);
      store_f16(a.block + at.scale + 2 * (first + t), scale);
      store(inverse + t, set1(1.f) / scale);
    }
    for (std::int64_t t = 0; t < kGroup; t += 4) {
      F by[4];
      for (int i = 0; i < 4; ++i) by[i] = set1(inverse[t + i]);
      for (std::int64_t d = 0; d < a.dim; d += kW) {
        const auto code = [&](int i) {
          return round_int(row_of<E>(a, first + t + i).get(d, a.dim - d) * by[i]);
        };
        const Int joined = join4(code(0), code(1), code(2), code(3));
        put_int(a.block + at.codes + v_codes_at(a.dim, a.tokens / 4, d, (first + t) / 4, 4),
                a.dim - d, joined ^ static_cast<std::int32_t>(0x80808080u));
      }
    }
  }
  return range.holds();
}

template <class E>
void decode_int8_v(const DecodeBlock& a) {
  const BlockArrays at = block_arrays(a.format, a.part, a.tokens, a.dim);
  alignas(64) float scale[kMaxCodecTokens];
  for (std::int64_t t = 0; t < a.tokens; t += kW)
    store(scale + t, load_f16(a.block + at.scale + 2 * t));
  for (std::int64_t t = a.first; t < a.first + a.count; t += 4)
    for (std::int64_t d = 0; d < a.dim; d += kW) {
      const Int lanes =
          get_int(a.block + at.codes + v_codes_at(a.dim, a.tokens / 4, d, t / 4, 4), a.dim - d);
      for (int i = 0; i < 4; ++i) {
        const Row<E> row = row_of<E>(a, t + i);
        fetch_next(a, row, d);
        row.put(d, a.dim - d, set1(scale[t + i]) * to_float((lanes << (24 - 8 * i)) >> 24));
      }
    }
}

// --- fp8 ---------------------------------------------------------------------------------------

// Writes the block's one scale and gives its inverse.
inline F put_scale(char* to, float top) {
  const F scale = scale_for(set1(top), 448.f);
  alignas(64) char lanes[kW * 2];
  store_f16(lanes, scale);
  copy_bytes(to, lanes, 2);
  return set1(1.f) / scale;
}
inline F get_scale(const char* from) {
  alignas(64) char lanes[kW * 2] = {};
  copy_bytes(lanes, from, 2);
  float first[kW];
  store(first, load_f16(lanes));
  return set1(first[0]);
}

template <class E>
bool encode_fp8_k(const EncodeBlock& a) {
  const BlockArrays at = block_arrays(a.format, a.part, a.tokens, a.dim);
  ChannelStats stats;
  if (!channel_stats<E, true, true>(a, stats)) return false;
  const Channels& mean = stats.sum;
  put_means(a, at, stats.sum);
  F top = set1(0.f);  // subtraction is monotone: the extremes of a channel are enough
  for (std::int64_t d = 0; d < a.dim; d += kW) {
    const F m = load(mean.at + d);
    const F both = vmax(vabs(load(stats.low.at + d) - m), vabs(load(stats.high.at + d) - m));
    top = vmax(top, first_n(static_cast<std::int32_t>(a.dim - d), both, set1(0.f)));
  }
  const F inverse = put_scale(a.block + at.scale, hmax(top));
  Tile tile;
  for (std::int64_t first = 0; first < a.tokens; first += kGroup) {
    load_tile<E>(a, first, tile,
                 [&](std::int64_t d, int, F x) { return (x - set1(mean.at[d])) * inverse; });
    for (std::int64_t d = 0; d < a.dim; d += 2) {
      char* codes = a.block + at.codes + k_codes_at(a.tokens, a.dim / 2, first, d / 2, 2);
      for (int v = 0; v < kVecs16; ++v) {
        const Int low = to_e4m3(tile.get(d, v)), high = to_e4m3(tile.get(d + 1, v));
        store_u16(codes + 2 * v * kW, low | (high << 8));
      }
    }
  }
  return true;
}

template <class E>
void decode_fp8_k(const DecodeBlock& a) {
  const BlockArrays at = block_arrays(a.format, a.part, a.tokens, a.dim);
  Channels mean;
  get_means(a, at, mean);
  const F scale = get_scale(a.block + at.scale);
  for (std::int64_t first = a.first; first < a.first + a.count; first += kGroup)
    store_tile<E>(a, first, [&](std::int64_t d, int v) {
      const Int pair = load_u16(a.block + at.codes +
                                k_codes_at(a.tokens, a.dim / 2, first, d / 2, 2) + 2 * v * kW);
      return set1(mean.at[d]) + from_e4m3(d % 2 == 0 ? pair : pair >> 8) * scale;
    });
}

template <class E>
bool encode_fp8_v(const EncodeBlock& a) {
  const BlockArrays at = block_arrays(a.format, a.part, a.tokens, a.dim);
  Range<E> range;
  F top = set1(0.f);
  for (std::int64_t t = 0; t < a.tokens; ++t) top = vmax(top, row_top<E>(a, t, range));
  if (!range.holds()) return false;
  const F inverse = put_scale(a.block + at.scale, hmax(top));
  for (std::int64_t t = 0; t < a.tokens; t += 2)
    for (std::int64_t d = 0; d < a.dim; d += kW) {
      const Int low = to_e4m3(row_of<E>(a, t).get(d, a.dim - d) * inverse);
      const Int high = to_e4m3(row_of<E>(a, t + 1).get(d, a.dim - d) * inverse);
      put_u16(a.block + at.codes + v_codes_at(a.dim, a.tokens / 2, d, t / 2, 2), a.dim - d,
              low | (high << 8));
    }
  return true;
}

template <class E>
void decode_fp8_v(const DecodeBlock& a) {
  const BlockArrays at = block_arrays(a.format, a.part, a.tokens, a.dim);
  const F scale = get_scale(a.block + at.scale);
  for (std::int64_t t = a.first; t < a.first + a.count; t += 2)
    for (std::int64_t d = 0; d < a.dim; d += kW) {
      const Int pair =
          get_u16(a.block + at.codes + v_codes_at(a.dim, a.tokens / 2, d, t / 2, 2), a.dim - d);
      row_of<E>(a, t).put(d, a.dim - d, from_e4m3(pair) * scale);
      row_of<E>(a, t + 1).put(d, a.dim - d, from_e4m3(pair >> 8) * scale);
    }
}

}  // namespace
}  // namespace kvcore::kernels::KVCORE_ISA_NS
