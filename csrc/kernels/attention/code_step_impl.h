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

// A group of rows as integers.
struct CodeRows {
  alignas(64) char q[kMaxRows][kMaxCodecDim];  // k4: q times s
  alignas(64) char p[kMaxRows][kStepTokens];   // p times v_scale, unsigned
  alignas(64) float q_factor[kMaxLanes];
  alignas(64) float q_offset[kMaxLanes];
  alignas(64) float p_factor[kMaxLanes];
  alignas(64) std::int32_t q_bias[kMaxLanes];
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

inline void load_channels(const AttendUnit& u, const Piece& p, PieceChannels& to) {
  const std::int32_t dk = u.pages->head_dim_k;
  const BlockArrays at = block_arrays(p.k_format, Part::kK, u.pages->page_size, dk);
  if (p.k_format == Format::kInt8) {
    for (std::int32_t d = 0; d < dk; d += kW)
      store(to.centre + d, load_bf16(p.k + at.mean + 2 * d));
    return;
  }
  const K4Grids grids = get_grids(p.k + at.grid);
  for (std::int32_t d = 0; d < dk; d += kW) {
    const F s = mul(from_e4m3(load_u8(p.k + at.scale + d)), set1(grids.scale));
    const F z = mul(to_float(load_s8(p.k + at.minimum + d)), set1(grids.minimum));
    store(to.centre + d, fma(s, set1(8.f), z));
    store(to.step + d, s);
  }
}

inline void load_channels(const AttendUnit& u, const Step& step, CodeStep& to) {
  for (int i = 0; i < step.num_pieces; ++i)
    if (step.pieces[i].k_way == Way::kCodes) load_channels(u, step.pieces[i], to.channels[i]);
}

// q . k = q . (z + 8 s) + (q s) . (code - 8).
inline void load_k4_query(const float* q, std::int32_t dk, const PieceChannels& channels, int m,
                          CodeRows& to) {
  F top = set1(0.f);
  for (std::int32_t d = 0; d < dk; d += kW)
    top = vmax(top, vabs(mul(load(q + d), load(channels.step + d))));
  const float largest = hmax(top);
  const F inverse = set1(largest < kVisible ? 0.f : kTopQuery / largest);
  F sum = set1(0.f), dot = set1(0.f);
  for (std::int32_t d = 0; d < dk; d += kW) {
    const F x = load(q + d);
    const Int code = round_int(mul(mul(x, load(channels.step + d)), inverse));
    store_u8(to.q[m] + d, code);
    sum = add(sum, to_float(code));
    dot = fma(x, load(channels.centre + d), dot);
  }
  to.q_factor[m] = largest * (1.f / kTopQuery);
  to.q_bias[m] = -8 * static_cast<std::int32_t>(hsum(sum));
  to.q_offset[m] = hsum(dot);
}

// q . k = q . mean + token scale * (q . code).
inline void load_int8_query(const AttendUnit& u, std::int64_t row, const PieceChannels& channels,
                            int m, CodeRows& to) {
  const std::int32_t dk = u.pages->head_dim_k;
  const float* q = u.scratch->q_floats + row * dk;
  F dot = set1(0.f);
  for (std::int32_t d = 0; d < dk; d += kW) dot = fma(load(q + d), load(channels.centre + d), dot);
  to.q_factor[m] = u.scratch->q_factor[row];
  to.q_bias[m] = u.scratch->q_bias[row];
  to.q_offset[m] = hsum(dot);
}

inline void code_scores_of(const AttendUnit& u, const Piece& p, const PieceChannels& channels,
                           std::int64_t row, int rows, int lanes16, CodeTile t, CodeRows& r) {
  const std::int32_t dk = u.pages->head_dim_k;
  const bool k4 = p.k_format == Format::kK4;
  for (int m = 0; m < rows; ++m) {
    if (k4)
      load_k4_query(u.scratch->q_floats + (row + m) * dk, dk, channels, m, r);
    else
      load_int8_query(u, row + m, channels, m, r);
  }
  const std::int64_t page = u.pages->page_size;
  const BlockArrays at = block_arrays(p.k_format, Part::kK, page, dk);
  t.k = k4 ? dk / 8 : dk / 4;
  t.a = k4 ? r.q[0] : reinterpret_cast<const char*>(u.scratch->q_words) + row * dk * 2;
  t.a_stride = k4 ? kMaxCodecDim : dk * 2;
  t.b = p.k + at.codes + k_codes_at(page, t.k, p.v_first, 0, 4);
  t.b_stride = p.lanes * 4;
  t.bias = r.q_bias;
  t.factor = r.q_factor;
  t.offset = r.q_offset;
  t.token_scale = p.k + at.scale + 2 * p.v_first;
  t.ahead = p.k_ahead;
  t.side_step = (t.side_step + t.k - 1) / t.k;
  if (k4)
    run_code_tiles<K4Codes>(rows, lanes16, t);
  else
    run_code_tiles<Int8KCodes>(rows, lanes16, t);
}

// --- probabilities -----------------------------------------------------------------------------

// The scales of V's codes, token by token. Not before they are needed: V lies behind K.
inline void load_token_scales(const AttendUnit& u, const Step& step, CodeStep& to) {
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

// A row's probabilities, each times the scale of its token, as bytes on one scale of the step.
inline void load_code_weights(const F (&p)[kStepTokens / kW], const CodeStep& step, int m,
                              CodeRows& to) {
  F w[kStepTokens / kW], top = set1(0.f);
#pragma GCC unroll 16
  for (int j = 0; j < kStepTokens / kW; ++j) {
    w[j] = mul(p[j], load(step.v_scale + j * kW));
    top = vmax(top, w[j]);
  }
  const float largest = hmax(top);
  const F inverse = set1(largest < kVisible ? 0.f : static_cast<float>(kTopByte) / largest);
#pragma GCC unroll 16
  for (int j = 0; j < kStepTokens / kW; ++j)
    store_u8(to.p[m] + j * kW, round_int(mul(w[j], inverse)));
  to.p_factor[m] = largest < kVisible ? 0.f : largest * (1.f / static_cast<float>(kTopByte));
}

// c[M rows][Dv] = alpha * c + p . V over the piece's first `tokens` tokens; those behind have
// probability 0 and add 0.
inline void code_values_of(const AttendUnit& u, const Piece& p, int rows, std::int64_t tokens,
                           float* c, const float* alpha, const CodeRows& r) {
  const std::int32_t dv = u.pages->head_dim_v;
  const std::int64_t page = u.pages->page_size;
  const BlockArrays at = block_arrays(p.v_format, Part::kV, page, dv);
  const std::int64_t group = p.v_format == Format::kInt8 ? 4 : p.v_format == Format::kV4 ? 8 : 16;
  CodeTile t{};
  t.a = r.p[0] + p.first;
  t.a_stride = kStepTokens;
  t.k = (tokens + group - 1) / group;
  t.c_stride = dv;
  t.factor = r.p_factor;
  t.alpha = alpha;
  t.ahead = p.v_ahead;
  for (std::int32_t d = 0; d < dv; d += static_cast<std::int32_t>(kDimBlock)) {
    const std::int64_t dims = at_most(dv - d, kDimBlock);
    const int lanes16 = static_cast<int>(dims / 16);
    t.c = c + d;
    t.b_stride = dims * 4;
    if (p.v_format == Format::kV3) {
      t.b = p.v + at.codes + v3_codes_at(page, dv, d, p.v_first);
      t.b_stride = v3_group_bytes(dims);
      t.high_bits = dims * 4;
      run_code_tiles<V3Codes>(rows, lanes16, t);
    } else {
      t.b = p.v + at.codes + v_codes_at(dv, page / group, d, p.v_first / group, 4);
      if (p.v_format == Format::kV4)
        run_code_tiles<V4Codes>(rows, lanes16, t);
      else
        run_code_tiles<Int8VCodes>(rows, lanes16, t);
    }
  }
}

}  // namespace
}  // namespace kvcore::kernels::KVCORE_ISA_NS
