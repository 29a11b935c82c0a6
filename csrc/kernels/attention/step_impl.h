// One step of attention: 64 tokens of one KV head against groups of rows.
#pragma once

#include "kernels/attention/code_step_impl.h"
#include "kernels/attention/pieces_impl.h"
#include "kernels/attention/rotated_impl.h"

namespace kvcore::kernels::KVCORE_ISA_NS {
namespace {

// The scores of one group of rows in one step, then their probabilities in the forms PV reads.
struct Group {
  alignas(64) float scores[kMaxRows][kStepTokens];
  alignas(64) float p[kMaxRows][kStepTokens];
  alignas(64) std::uint32_t p_pairs[kMaxRows][kStepTokens / 2];
  alignas(64) float alpha[kMaxLanes];
  alignas(64) float ones[kMaxLanes];
  alignas(64) float base[kMaxLanes];
  CodeStep code_step;
  CodeRows codes;
};

// The sums that the step's first piece adds to.
inline const float* first_sums(const AttendUnit& u, const Step& step, std::int64_t row) {
  const Scratch& s = *u.scratch;
  return (is_rotated(step.pieces[0].v_format) ? s.rotated : s.segment.o) +
         row * u.pages->head_dim_v;
}

// scores[m][0..n) = q . k, in the pieces' own arithmetic; lanes from n on may hold anything.
inline void scores_of(const AttendUnit& u, const Step& step, std::int64_t row, int rows,
                      std::int64_t n, Group& g) {
  const std::int32_t dk = u.pages->head_dim_k, dv = u.pages->head_dim_v;
  for (int i = 0; i < step.num_pieces && step.pieces[i].first < n; ++i) {
    const Piece& p = step.pieces[i];
    const int lanes16 = static_cast<int>((at_most(n - p.first, p.count) + 15) / 16);
    const char* side = i == 0 ? reinterpret_cast<const char*>(first_sums(u, step, row)) : nullptr;
    if (p.k_way == Way::kCodes) {
      CodeTile t{};
      t.c = &g.scores[0][p.first];
      t.c_stride = kStepTokens;
      t.side = side;
      t.side_step = rows * dv * 4;
      code_scores_of(u, p, g.code_step.channels[i], row, rows, lanes16, t, g.codes);
      continue;
    }
    const bool pairs = takes_pairs(p.k_format);
    TileArgs t;
    t.a = pairs ? static_cast<const void*>(u.scratch->q_pairs + row * (dk / 2))
                : static_cast<const void*>(u.scratch->q_floats + row * dk);
    t.a_stride = pairs ? dk * 2 : dk * 4;
    t.b = p.k;
    t.b_stride = p.lanes * (p.k_format == Format::kF16 ? 2 : 4);
    t.k = p.k_format == Format::kBf16 ? dk / 2 : dk;
    t.half_row = false;
    t.c = &g.scores[0][p.first];
    t.c_stride = kStepTokens;
    t.alpha = nullptr;
    t.ahead = p.k_ahead;
    t.side = side;
    t.side_step = rows * dv * 4 / t.k;
    run_tiles(p.k_format, rows, lanes16, t);
  }
}

// The greatest of a row's first n scores.
template <bool Full>
inline float maximum_of(const float* scores, std::int64_t n) {
  const F lowest = set1(-__builtin_inff());
  F top = lowest;
#pragma GCC unroll 16
  for (int j = 0; j < kStepTokens / kW; ++j) {
    F x = load(scores + j * kW);
    if (!Full) x = first_n(static_cast<std::int32_t>(n) - j * kW, x, lowest);
    top = vmax(top, x);
  }
  return hmax(top);
}

// Scores -> p, and the row's sums. g.alpha and g.base are set by now.
template <bool Full>
inline void probabilities_of(const AttendUnit& u, const Step& step, std::int64_t row, int m,
                             std::int64_t n, Group& g) {
  const F scale = set1(u.scale_log2), minus_base = set1(-g.base[m]);
  F sum = set1(0.f), p[kStepTokens / kW];
#pragma GCC unroll 4
  for (int j = 0; j < kStepTokens / kW; ++j) {
    F e = set1(0.f);
    if (Full || j * kW < n) e = exp2(fma(load(&g.scores[m][j * kW]), scale, minus_base));
    if (!Full) e = first_n(static_cast<std::int32_t>(n) - j * kW, e, set1(0.f));
    sum = add(sum, e);
    p[j] = e;
    if (step.p_pairs) store_bf16(reinterpret_cast<char*>(g.p_pairs[m]) + 2 * j * kW, e);
    if (step.p_floats) store(&g.p[m][j * kW], e);
  }
  if (step.v_codes) load_code_weights(p, g.code_step, m, g.codes);
  float* l = u.scratch->l_lanes + row * kMaxLanes;
  store(l, fma(load(l), set1(g.alpha[m]), sum));
}

// Online softmax of M rows. Their maxima stay in registers until all are in one vector: put
// together through memory, the vector's load would wait for the stores, and so for all reads before
// them.
template <bool Full, int M>
inline void softmax(const AttendUnit& u, const Step& step, std::int64_t row, std::int64_t n,
                    Group& g) {
  static_assert(M <= kW);
  float top[M], old[M];
#pragma GCC unroll 6
  for (int m = 0; m < M; ++m) top[m] = maximum_of<Full>(g.scores[m], n);
  float* running = u.scratch->segment.m + row;
#pragma GCC unroll 6
  for (int m = 0; m < M; ++m) old[m] = running[m];
  const F before = lanes(old), now = vmax(mul(lanes(top), set1(u.scale_log2)), before);
  const F base = zero_for_lowest(now);
  store(g.base, base);
  store(g.alpha, exp2(sub(before, base)));  // exactly 1 where the maximum stays
#pragma GCC unroll 6
  for (int m = 0; m < M; ++m) probabilities_of<Full>(u, step, row + m, m, n, g);
  store_first<M>(running, now);
}

template <int Limit = kMaxRows>
inline void softmax(const AttendUnit& u, const Step& step, std::int64_t row, int rows,
                    std::int64_t n, Group& g) {
  const auto full_or_not = [&]<int M>() {
    if (n == kStepTokens)
      softmax<true, M>(u, step, row, n, g);
    else
      softmax<false, M>(u, step, row, n, g);
  };
  if constexpr (Limit == 6) {
    switch (rows) {
      case 3:
        return full_or_not.template operator()<3>();
      case 4:
        return full_or_not.template operator()<4>();
      case 5:
        return full_or_not.template operator()<5>();
      case 6:
        return full_or_not.template operator()<6>();
      default:
        break;
    }
  }
  if (rows == 1)
    full_or_not.template operator()<1>();
  else
    full_or_not.template operator()<2>();
}

// Rows of sums that nothing was added to in this step.
inline void rescale(float* sums, int rows, std::int32_t dim, const float* alpha) {
  for (int m = 0; m < rows; ++m) {
    if (alpha[m] == 1.f) continue;
    for (std::int32_t d = 0; d < dim; d += kW)
      store(sums + m * dim + d, mul(load(sums + m * dim + d), set1(alpha[m])));
  }
}

// o = alpha * o + p . V over the step's first n tokens, reading V forward; o is the rotated sums
// for pieces whose V is rotated.
inline void values_of(const AttendUnit& u, const Step& step, std::int64_t row, int rows,
                      std::int64_t n, const Group& g) {
  const std::int32_t dv = u.pages->head_dim_v;
  const Scratch& s = *u.scratch;
  float *o = s.segment.o + row * dv, *rotated = s.rotated + row * dv;
  const float *alpha_o = g.alpha, *alpha_rotated = g.alpha;
  for (int i = 0; i < step.num_pieces && step.pieces[i].first < n; ++i) {
    const Piece& p = step.pieces[i];
    const std::int64_t tokens = at_most(n - p.first, p.count);
    if (p.v_way == Way::kCodes) {
      const bool turned = is_rotated(p.v_format);
      const float*& alpha = turned ? alpha_rotated : alpha_o;
      code_values_of(u, p, rows, tokens, turned ? rotated : o, alpha, g.codes);
      alpha = g.ones;
      continue;
    }
    const bool pairs = takes_pairs(p.v_format);
    TileArgs t;
    t.a = pairs ? static_cast<const void*>(&g.p_pairs[0][p.first / 2])
                : static_cast<const void*>(&g.p[0][p.first]);
    t.a_stride = pairs ? kStepTokens * 2 : kStepTokens * 4;
    t.k = p.v_format == Format::kBf16 ? tokens / 2 : tokens;
    t.half_row = p.v_format == Format::kBf16 && tokens % 2 != 0;
    t.c_stride = dv;
    t.alpha = alpha_o;
    alpha_o = g.ones;
    t.ahead = p.v_ahead;
    t.side = nullptr;
    for (std::int32_t d = 0; d < dv; d += static_cast<std::int32_t>(kDimBlock)) {
      const std::int64_t dims = at_most(dv - d, kDimBlock);
      t.b = p.v + (p.v_tokens * d + p.v_first * dims) * bytes_of(p.v_format);
      t.b_stride = dims * (p.v_format == Format::kF16 ? 2 : 4);
      if (p.v_row_bytes != 0) {
        t.b = p.v + 4 * d;
        t.b_stride = p.v_row_bytes;
      }
      t.c = o + d;
      run_tiles(p.v_format, rows, static_cast<int>(dims / 16), t);
    }
  }
  if (alpha_o == g.alpha) rescale(o, rows, dv, g.alpha);
  if (alpha_rotated == g.alpha && s.rotated_from[step.head - u.h0] != kNoToken)
    rescale(rotated, rows, dv, g.alpha);
}

// While the softmax waits for its own results nothing is read. So much of V is asked for before it
// that the misses L1 can have in flight are all in use; more than that is slower (measured).
constexpr int kLinesAhead = 28;

// Rows [row, row + count) that see the step's first n tokens, in near-equal groups.
inline void run_rows(const AttendUnit& u, const Step& step, std::int64_t row, std::int64_t count,
                     std::int64_t n, Group& g) {
  const std::int64_t groups = (count + kMaxRows - 1) / kMaxRows;
  for (std::int64_t left = groups; left > 0; --left) {
    const int rows = static_cast<int>((count + left - 1) / left);
    for (int m = 0; m < rows; ++m) __builtin_prefetch(u.scratch->l_lanes + (row + m) * kMaxLanes);
    __builtin_prefetch(u.scratch->segment.m + row);
    scores_of(u, step, row, rows, n, g);
    if (left == groups) {  // the others find V in a cache
      for (int i = 0; i < kLinesAhead; ++i) __builtin_prefetch(step.pieces[0].v + 64 * i);
      if (step.v_codes) load_token_scales(u, step, g.code_step);
    }
    softmax(u, step, row, rows, n, g);
    values_of(u, step, row, rows, n, g);
    row += rows;
    count -= rows;
  }
}

// One located step. Rows that see all of it go in full groups; rows of tokens inside the causal
// edge go token by token, so that what a row cannot see is never multiplied, not even by 0.
void run_step(const AttendUnit& u, Step& step, Group& g) {
  if (!step.in_place) gather(u, step);
  if (step.k_codes) load_channels(u, step, g.code_step);
  if (step.v_codes) begin_rotated(u, step);
  const std::int64_t base = (step.head - u.h0) * (u.t1 - u.t0) * u.group - u.t0 * u.group;
  std::int64_t t = u.t0;
  if (u.first_visible + t <= step.start) t = step.start - u.first_visible + 1;
  for (; t < u.t1 && u.first_visible + t - step.start < kStepTokens; ++t)
    run_rows(u, step, base + t * u.group, u.group, u.first_visible + t - step.start, g);
  if (t < u.t1) run_rows(u, step, base + t * u.group, (u.t1 - t) * u.group, kStepTokens, g);
}

}  // namespace
}  // namespace kvcore::kernels::KVCORE_ISA_NS
