// Codes of a step: the integers that rows of queries and probabilities are turned into, and the
// tiles that multiply them with the codes where these lie. docs/kernels.md says what is multiplied.
#pragma once

#include "kernels/attention/code_tile_impl.h"
#include "kernels/attention/pieces_impl.h"

namespace kvcore::kernels::KVCORE_ISA_NS {
namespace {

constexpr float kTopWord = 16383.f;    // of a query's 16-bit integers: sums of 256 dims fit 32 bits
constexpr float kTopQuery = 127.f;     // of a query's 8-bit integers
constexpr float kVisible = 0x1p-100f;  // rows and steps below are as good as 0

// Numbers of K's channels in one piece: int8's means; k4's z + 8 s and s.
struct alignas(64) PieceChannels {
  float centre[kMaxCodecDim];
  float step[kMaxCodecDim];
};

// What a step's codes need beside them, found once for all rows.
struct CodeStep {
  PieceChannels channels[kMaxPieces];
  alignas(64) float v_scale[kStepTokens];  // of each token's V codes; 0 where V is not codes
};

// A group of rows' queries as integers, for K's codes of one page.
struct QueryRows {
  alignas(64) char codes[kMaxRows][kMaxCodecDim];  // k4: q times s
  alignas(64) float factor[kMaxLanes];
  alignas(64) float offset[kMaxLanes];
  alignas(64) std::int32_t bias[kMaxLanes];
};

// And their probabilities, for V's codes of a step.
struct WeightRows {
  alignas(64) char codes[kMaxRows][kStepTokens];  // p times v_scale, unsigned
  alignas(64) float factor[kMaxLanes];
};

struct CodeRows {
  WeightRows p;
  QueryRows q[kMaxPieces];  // but for small_step_impl.h, which does all pages at once: the first
};

// --- queries -----------------------------------------------------------------------------------

inline F top_of(const float* x, std::int32_t n) {
  F top = set1(0.f);
  for (std::int32_t d = 0; d < n; d += kW) top = vmax(top, vabs(load(x + d)));
  return top;
}

// Each query of the unit as 16-bit integers, in the order of Int8KCodes: dims 0, 2, 1, 3 of four.
inline void load_query_words(const AttendUnit& u, std::int64_t row) {
  const std::int32_t dk = u.pages->head_dim_k;
  const float* q = u.scratch->q_floats + row * dk;
  const float top = hmax(top_of(q, dk));
  const F inverse = set1(top < kVisible ? 0.f : kTopWord / top);
  char* words = reinterpret_cast<char*>(u.scratch->q_words) + row * dk * 2;
  F sum = set1(0.f);
  for (std::int32_t d = 0; d < dk; d += kW) {
    const Int code = round_int(mul(load(q + d), inverse));
    sum = add(sum, to_float(code));
    store_u16(words + 2 * d, code);
  }
  for (std::int32_t d = 0; d < dk; d += 4) {
    std::uint64_t four;
    __builtin_memcpy(&four, words + 2 * d, 8);
    four = (four & 0xffff00000000ffffu) | (four & 0xffff0000u) << 16 | (four >> 16 & 0xffff0000u);
    __builtin_memcpy(words + 2 * d, &four, 8);
  }
  u.scratch->q_factor[row] = top < kVisible ? 0.f : top / kTopWord;
  u.scratch->q_bias[row] = -128 * static_cast<std::int32_t>(hsum(sum));
}

// Vectors of a piece's channels, as its block holds them.
struct MeansOf {
  const char* mean;

  MeansOf(const char* block, const BlockArrays& at) : mean(block + at.mean) {}
  F centre(std::int32_t d) const { return load_bf16(mean + 2 * d); }
};
struct GridOf {
  const char *scales, *minima;
  F scale, minimum;

  // e4m3 in the place of a float's exponent is 2^-120 of its value.
  GridOf(const char* block, const BlockArrays& at)
      : scales(block + at.scale),
        minima(block + at.minimum),
        scale(set1(f16_at(block + at.grid) * 0x1p120f)),
        minimum(set1(f16_at(block + at.grid + 2))) {}
  F step(std::int32_t d) const { return mul(as_float(load_u8(scales + d) << 20), scale); }
  F centre(std::int32_t d) const {
    return fma(step(d), set1(8.f), mul(to_float(load_s8(minima + d)), minimum));
  }
};
// The same, written out by load_channels().
struct ChannelsOf {
  const PieceChannels& channels;

  F step(std::int32_t d) const { return load(channels.step + d); }
  F centre(std::int32_t d) const { return load(channels.centre + d); }
};

inline void load_channels(const AttendUnit& u, const Piece& p, PieceChannels& to) {
  const std::int32_t dk = u.pages->head_dim_k;
  const BlockArrays at = block_arrays(p.k_format, Part::kK, u.pages->page_size, dk);
  if (p.k_format == Format::kInt8) {
    const MeansOf means(p.k, at);
    for (std::int32_t d = 0; d < dk; d += kW) store(to.centre + d, means.centre(d));
    return;
  }
  const GridOf grid(p.k, at);
  for (std::int32_t d = 0; d < dk; d += kW) {
    store(to.centre + d, grid.centre(d));
    store(to.step + d, grid.step(d));
  }
}

[[gnu::noinline]] void load_channels(const AttendUnit& u, const Step& step, CodeStep& to) {
  for (int i = 0; i < step.num_pieces; ++i)
    if (step.pieces[i].k_way == Way::kCodes) load_channels(u, step.pieces[i], to.channels[i]);
}

// `top` of each row (lane) over `largest`, 0 for rows that are as good as 0.
inline F inverse_of(F largest, float top) {
  const Int visible = largest >= set1(kVisible);
  return as_float(as_int(set1(top) / largest) & visible);
}

// Calls fn.operator()<rows>().
template <int Limit = kMaxRows, class Fn>
inline void by_rows(int rows, Fn fn) {
  if constexpr (Limit == 1)
    fn.template operator()<1>();
  else if (rows == Limit)
    fn.template operator()<Limit>();
  else
    by_rows<Limit - 1>(rows, fn);
}

// q . k = q . (z + 8 s) + (q s) . (code - 8).
template <int M, class Channels>
void load_k4_queries(const float* q, std::int32_t dk, const Channels& channels, QueryRows& to) {
  F top[M], dot[M], sums[M];
#pragma GCC unroll 6
  for (int m = 0; m < M; ++m) top[m] = dot[m] = set1(0.f);
  for (std::int32_t d = 0; d < dk; d += kW) {
    const F step = channels.step(d), centre = channels.centre(d);
#pragma GCC unroll 6
    for (int m = 0; m < M; ++m) {
      const F x = load(q + m * dk + d);
      top[m] = vmax(top[m], vabs(mul(x, step)));
      dot[m] = fma(x, centre, dot[m]);
    }
  }
  const F largest = reduce_rows<Greater>(top);
  alignas(64) float inverse[kMaxLanes];
  store(inverse, inverse_of(largest, kTopQuery));
  store(to.factor, mul(largest, set1(1.f / kTopQuery)));
  store(to.offset, reduce_rows<Plus>(dot));
  Int sum[M];
#pragma GCC unroll 6
  for (int m = 0; m < M; ++m) sum[m] = set1_int(0);
  const auto code_at = [&](int m, std::int32_t d, F step) {
    const F x = mul(load(q + m * dk + d), step);
    const Int c = round_int(mul(x, set1(inverse[m])));
    sum[m] += c;
    return c;
  };
  std::int32_t d = 0;
  for (; d + 4 * kW <= dk; d += 4 * kW) {
    F step[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) step[i] = channels.step(d + i * kW);
#pragma GCC unroll 6
    for (int m = 0; m < M; ++m) {
      Int code[4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) code[i] = code_at(m, d + i * kW, step[i]);
      store_bytes<true>(to.codes[m] + d, code);
    }
  }
  for (; d < dk; d += kW) {
    const F step = channels.step(d);
    for (int m = 0; m < M; ++m) store_u8(to.codes[m] + d, code_at(m, d, step));
  }
#pragma GCC unroll 6
  for (int m = 0; m < M; ++m) sums[m] = to_float(sum[m]);
  store_int(to.bias, round_int(mul(reduce_rows<Plus>(sums), set1(-8.f))));
}

// q . k = q . mean + token scale * (q . code).
template <int M, class Channels>
void load_int8_queries(const AttendUnit& u, std::int64_t row, const Channels& channels,
                       QueryRows& to) {
  const std::int32_t dk = u.pages->head_dim_k;
  const float* q = u.scratch->q_floats + row * dk;
  F dot[M];
#pragma GCC unroll 6
  for (int m = 0; m < M; ++m) dot[m] = set1(0.f);
  for (std::int32_t d = 0; d < dk; d += kW) {
    const F centre = channels.centre(d);
#pragma GCC unroll 6
    for (int m = 0; m < M; ++m) dot[m] = fma(load(q + m * dk + d), centre, dot[m]);
  }
  store(to.offset, reduce_rows<Plus>(dot));
  for (int m = 0; m < M; ++m) {
    to.factor[m] = u.scratch->q_factor[row + m];
    to.bias[m] = u.scratch->q_bias[row + m];
  }
}

// The tile of one piece's K against M rows, whose integers it makes. Where the scores go is not
// set.
template <Format kFormat, int M>
[[gnu::always_inline]] inline CodeTile key_tile(const AttendUnit& u, const Piece& p,
                                                const PieceChannels& channels, std::int64_t row,
                                                QueryRows& r) {
  const std::int32_t dk = u.pages->head_dim_k;
  const std::int64_t page = u.pages->page_size;
  const BlockArrays at = block_arrays(kFormat, Part::kK, page, dk);
  CodeTile t{};
  if constexpr (kFormat == Format::kK4) {
    load_k4_queries<M>(u.scratch->q_floats + row * dk, dk, ChannelsOf{channels}, r);
    t.k = dk / 8;
    t.a = r.codes[0];
    t.a_stride = kMaxCodecDim;
  } else {
    load_int8_queries<M>(u, row, ChannelsOf{channels}, r);
    t.k = dk / 4;
    t.a = reinterpret_cast<const char*>(u.scratch->q_words) + row * dk * 2;
    t.a_stride = dk * 2;
  }
  t.b = p.k + at.codes + k_codes_at(page, t.k, p.v_first, 0, 4);
  t.b_stride = p.lanes * 4;
  t.bias = r.bias;
  t.factor = r.factor;
  t.offset = r.offset;
  t.token_scale = p.k + at.scale + 2 * p.v_first;
  t.ahead = p.k_ahead;
  return t;
}

// `sums`, of sum_bytes, are fetched on the way.
[[gnu::noinline]] void code_scores_of(const AttendUnit& u, const Piece& p,
                                      const PieceChannels& channels, std::int64_t row, int rows,
                                      int lanes16, float* scores, const char* sums, QueryRows& r) {
  const bool k4 = p.k_format == Format::kK4;
  CodeTile t;
  by_rows(rows, [&]<int M>() {
    t = k4 ? key_tile<Format::kK4, M>(u, p, channels, row, r)
           : key_tile<Format::kInt8, M>(u, p, channels, row, r);
  });
  t.c = scores;
  t.c_stride = kStepTokens;
  t.side = sums;
  t.side_step = (rows * u.pages->head_dim_v * 4 + t.k - 1) / t.k;
  if (k4)
    run_code_tiles<K4Codes>(rows, lanes16, t);
  else
    run_code_tiles<Int8KCodes>(rows, lanes16, t);
}

// --- probabilities -----------------------------------------------------------------------------

// The scales of V's codes, token by token. Not before they are needed: V lies behind K.
[[gnu::noinline]] void load_token_scales(const AttendUnit& u, const Step& step, CodeStep& to) {
  const std::int32_t dv = u.pages->head_dim_v;
  for (int j = 0; j < kStepTokens; j += kW) store(to.v_scale + j, set1(0.f));
  for (int i = 0; i < step.num_pieces; ++i) {
    const Piece& p = step.pieces[i];
    if (p.v_way != Way::kCodes) continue;
    const BlockArrays at = block_arrays(p.v_format, Part::kV, u.pages->page_size, dv);
    for (int j = 0; j < p.count; j += kW)
      store(to.v_scale + p.first + j, load_f16(p.v + at.scale + 2 * (p.v_first + j)));
  }
}

constexpr int kStepVecs = kStepTokens / kW;

// The rows' probabilities, each times the scale of its token, as bytes on one scale of the step.
template <int M>
[[gnu::always_inline]] inline void code_weights(const F (&weight)[M][kStepVecs], WeightRows& to) {
  F top[M];
#pragma GCC unroll 6
  for (int m = 0; m < M; ++m) {
    top[m] = weight[m][0];
#pragma GCC unroll 16
    for (int j = 1; j < kStepVecs; ++j) top[m] = vmax(top[m], weight[m][j]);
  }
  const F largest = reduce_rows<Greater>(top);
  alignas(64) float inverse[kMaxLanes];
  store(inverse, inverse_of(largest, static_cast<float>(kTopByte)));
  store(to.factor, mul(largest, set1(1.f / static_cast<float>(kTopByte))));
#pragma GCC unroll 6
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int j = 0; j < kStepVecs; j += 4) {
      Int code[4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) code[i] = round_int(mul(weight[m][j + i], set1(inverse[m])));
      store_bytes<false>(to.codes[m] + j * kW, code);
    }
}

template <int M>
void load_code_weights(const float (&p)[kMaxRows][kStepTokens], const CodeStep& step,
                       WeightRows& to) {
  F weight[M][kStepVecs];
#pragma GCC unroll 6
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 16
    for (int j = 0; j < kStepVecs; ++j)
      weight[m][j] = mul(load(&p[m][j * kW]), load(step.v_scale + j * kW));
  code_weights(weight, to);
}

[[gnu::noinline]] void load_code_weights(const float (&p)[kMaxRows][kStepTokens], int rows,
                                         const CodeStep& step, WeightRows& to) {
  by_rows(rows, [&]<int M>() { load_code_weights<M>(p, step, to); });
}

// The tile of dims [d, d + at most 64) of one piece's V against the rows' bytes; c = alpha c + p .
// V over its first `tokens` tokens, those behind having probability 0. Where c lies is not set.
template <Format kFormat>
[[gnu::always_inline]] inline CodeTile value_tile(const AttendUnit& u, const Piece& p,
                                                  std::int32_t d, std::int64_t tokens,
                                                  const float* alpha, const WeightRows& r) {
  constexpr std::int64_t kGroup = kFormat == Format::kInt8 ? 4 : kFormat == Format::kV4 ? 8 : 16;
  const std::int32_t dv = u.pages->head_dim_v;
  const std::int64_t page = u.pages->page_size, dims = at_most(dv - d, kDimBlock);
  const char* codes = p.v + block_arrays(kFormat, Part::kV, page, dv).codes;
  CodeTile t{};
  t.a = r.codes[0] + p.first;
  t.a_stride = kStepTokens;
  t.k = (tokens + kGroup - 1) / kGroup;
  t.c_stride = dv;
  t.factor = r.factor;
  t.alpha = alpha;
  t.ahead = p.v_ahead;
  if constexpr (kFormat == Format::kV3) {
    t.b = codes + v3_codes_at(page, dv, d, p.v_first);
    t.b_stride = v3_group_bytes(dims);
    t.high_bits = dims * 4;
  } else {
    t.b = codes + v_codes_at(dv, page / kGroup, d, p.v_first / kGroup, 4);
    t.b_stride = dims * 4;
  }
  return t;
}

template <Format kFormat>
struct CodesOf;
template <>
struct CodesOf<Format::kInt8> {
  using K = Int8KCodes;
  using V = Int8VCodes;
};
template <>
struct CodesOf<Format::kK4> {
  using K = K4Codes;
};
template <>
struct CodesOf<Format::kV4> {
  using V = V4Codes;
};
template <>
struct CodesOf<Format::kV3> {
  using V = V3Codes;
};

template <Format kFormat>
inline void code_values_of(const AttendUnit& u, const Piece& p, int rows, std::int64_t tokens,
                           float* c, const float* alpha, const WeightRows& r) {
  const std::int32_t dv = u.pages->head_dim_v;
  for (std::int32_t d = 0; d < dv; d += static_cast<std::int32_t>(kDimBlock)) {
    CodeTile t = value_tile<kFormat>(u, p, d, tokens, alpha, r);
    t.c = c + d;
    const int lanes16 = static_cast<int>(at_most(dv - d, kDimBlock) / 16);
    run_code_tiles<typename CodesOf<kFormat>::V>(rows, lanes16, t);
  }
}

[[gnu::noinline]] void code_values_of(const AttendUnit& u, const Piece& p, int rows,
                                      std::int64_t tokens, float* c, const float* alpha,
                                      const WeightRows& r) {
  if (p.v_format == Format::kV3)
    code_values_of<Format::kV3>(u, p, rows, tokens, c, alpha, r);
  else if (p.v_format == Format::kV4)
    code_values_of<Format::kV4>(u, p, rows, tokens, c, alpha, r);
  else
    code_values_of<Format::kInt8>(u, p, rows, tokens, c, alpha, r);
}

}  // namespace
}  // namespace kvcore::kernels::KVCORE_ISA_NS
