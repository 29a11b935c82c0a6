// One step of attention: 64 tokens of one KV head against groups of rows.
#pragma once

#include "kernels/attention/code_step_impl.h"
#include "kernels/attention/mask_impl.h"
#include "kernels/attention/mass_impl.h"
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
  alignas(64) float base[kMaxLanes + kMaxRows];  // rows are read from any of them on
  alignas(64) float sums[kMaxRows][kMaxLanes];   // of p, where page scores are wanted
  bool any_rotated;                              // some head has rotated sums in this segment
  CodeStep code_step;
  CodeRows codes;
};

// The sums that the step's first piece adds to.
inline const float* first_sums(const AttendUnit& u, const Step& step, std::int64_t row) {
  const Scratch& s = *u.scratch;
  return (is_rotated(step.pieces[0].v_format) ? s.rotated : s.segment.o) +
         row * u.pages->head_dim_v;
}

// scores[m][seen] = q . k, in the pieces' own arithmetic; other lanes may hold anything.
template <bool Plain, bool Window>
inline void scores_of(const AttendUnit& u, const Step& step, std::int64_t row, int rows, Seen seen,
                      Group& g) {
  const std::int32_t dk = u.pages->head_dim_k, dv = u.pages->head_dim_v;
  for (int i = 0; i < step.num_pieces && step.pieces[i].first < seen.to; ++i) {
    const Piece& p = step.pieces[i];
    if (Window && p.first + p.count <= seen.from) continue;
    const int lanes16 = static_cast<int>((at_most(seen.to - p.first, p.count) + 15) / 16);
    const float* sums = Plain ? u.scratch->segment.o + row * dv : first_sums(u, step, row);
    const char* side = i == 0 ? reinterpret_cast<const char*>(sums) : nullptr;
    if (!Plain && p.k_way == Way::kCodes) {
      code_scores_of(u, p, g.code_step.channels[i], row, rows, lanes16, &g.scores[0][p.first], side,
                     g.codes.q[0]);
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

// The greatest of a row's scores.
template <Mask kMask>
inline float maximum_of(const float* scores, Seen seen) {
  const F lowest = set1(-__builtin_inff());
  F top = lowest;
#pragma GCC unroll 16
  for (int j = 0; j < kStepTokens / kW; ++j)
    top = vmax(top, masked<kMask>(load(scores + j * kW), j, seen, lowest));
  return hmax(top);
}

// Scores -> p, and the row's sums. g.alpha and g.base are set by now.
template <Mask kMask>
inline void probabilities_of(const AttendUnit& u, const Step& step, std::int64_t row, int m,
                             Seen seen, Group& g) {
  const F scale = set1(u.scale_log2), minus_base = set1(-g.base[m]);
  F sum = set1(0.f);
#pragma GCC unroll 4
  for (int j = 0; j < kStepTokens / kW; ++j) {
    F e = set1(0.f);
    if (kMask == Mask::kNone || j * kW < seen.to)
      e = exp2(fma(load(&g.scores[m][j * kW]), scale, minus_base));
    e = masked<kMask>(e, j, seen, set1(0.f));
    sum = add(sum, e);
    if (step.p_pairs) store_bf16(reinterpret_cast<char*>(g.p_pairs[m]) + 2 * j * kW, e);
    if (step.p_floats) store(&g.p[m][j * kW], e);
  }
  if (u.masses != nullptr) store(g.sums[m], sum);
  float* l = u.scratch->l_lanes + row * kMaxLanes;
  store(l, fma(load(l), set1(g.alpha[m]), sum));
}

struct RowMaxima {  // a row a lane
  F now;
  F base;  // what scores are taken against: `now`, or 0 where nothing was seen
};

// The rows' maxima of all steps so far, given those of this one; sets g.base and g.alpha.
template <int M>
[[gnu::always_inline]] inline RowMaxima raise_maxima(const AttendUnit& u, std::int64_t row,
                                                     const float (&top)[M], Group& g) {
  const float* running = u.scratch->segment.m + row;
  float old[M];
#pragma GCC unroll 6
  for (int m = 0; m < M; ++m) old[m] = running[m];
  const F before = lanes(old), now = vmax(mul(lanes(top), set1(u.scale_log2)), before);
  const F base = zero_for_lowest(now);
  store(g.base, base);
  store(g.alpha, exp2(sub(before, base)));  // exactly 1 where the maximum stays
  return {now, base};
}

// Online softmax of M rows. Their maxima stay in registers until all are in one vector: put
// together through memory, the vector's load would wait for the stores, and so for all reads before
// them.
template <Mask kMask, int M>
inline void softmax(const AttendUnit& u, const Step& step, std::int64_t row, Seen seen, Group& g) {
  static_assert(M <= kW);
  float top[M];
#pragma GCC unroll 6
  for (int m = 0; m < M; ++m) top[m] = maximum_of<kMask>(g.scores[m], seen);
  const RowMaxima maxima = raise_maxima<M>(u, row, top, g);
#pragma GCC unroll 6
  for (int m = 0; m < M; ++m) probabilities_of<kMask>(u, step, row + m, m, seen, g);
  store_first<M>(u.scratch->segment.m + row, maxima.now);
}

template <bool Window, int Limit = kMaxRows>
inline void softmax(const AttendUnit& u, const Step& step, std::int64_t row, int rows, Seen seen,
                    Group& g) {
  const auto full_or_not = [&]<int M>() {
    if constexpr (Window)
      softmax<Mask::kRange, M>(u, step, row, seen, g);
    else if (seen.to == kStepTokens)
      softmax<Mask::kNone, M>(u, step, row, seen, g);
    else
      softmax<Mask::kBehind, M>(u, step, row, seen, g);
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

inline bool has_rotated(const AttendUnit& u, const Step& step, const Group& g) {
  return g.any_rotated && u.scratch->rotated_from[step.head - u.h0] != kNoToken;
}

// o = alpha * o + p . V over the tokens seen, reading V forward; o is the rotated sums for pieces
// whose V is rotated. A window's first token is rounded down to 16, the smallest page: what is
// multiplied by 0 then lies in a page that the row sees, whatever the page size and the other rows.
template <bool Plain, bool Window>
inline void values_of(const AttendUnit& u, const Step& step, std::int64_t row, int rows, Seen seen,
                      const Group& g) {
  const std::int64_t from = Window ? seen.from / 16 * 16 : 0;
  const std::int32_t dv = u.pages->head_dim_v;
  const Scratch& s = *u.scratch;
  float *o = s.segment.o + row * dv, *rotated = s.rotated + row * dv;
  const float *alpha_o = g.alpha, *alpha_rotated = g.alpha;
  for (int i = 0; i < step.num_pieces && step.pieces[i].first < seen.to; ++i) {
    const Piece& p = step.pieces[i];
    if (Window && p.first + p.count <= from) continue;
    const std::int64_t skip = Window && from > p.first ? from - p.first : 0;
    const std::int64_t tokens = at_most(seen.to - p.first, p.count) - skip;
    if (!Plain && p.v_way == Way::kCodes) {
      const bool turned = is_rotated(p.v_format);
      const float*& alpha = turned ? alpha_rotated : alpha_o;
      code_values_of(u, p, rows, tokens + skip, turned ? rotated : o, alpha, g.codes.p);
      alpha = g.ones;
      continue;
    }
    const bool pairs = takes_pairs(p.v_format);
    TileArgs t;
    t.a = pairs ? static_cast<const void*>(&g.p_pairs[0][(p.first + skip) / 2])
                : static_cast<const void*>(&g.p[0][p.first + skip]);
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
      t.b = p.v + (p.v_tokens * d + (p.v_first + skip) * dims) * bytes_of(p.v_format);
      t.b_stride = dims * (p.v_format == Format::kF16 ? 2 : 4);
      if (!Plain && p.v_row_bytes != 0) {
        t.b = p.v + 4 * d + skip * p.v_row_bytes;
        t.b_stride = p.v_row_bytes;
      }
      t.c = o + d;
      run_tiles(p.v_format, rows, static_cast<int>(dims / 16), t);
    }
  }
  if constexpr (Plain) return;
  if (alpha_o == g.alpha) rescale(o, rows, dv, g.alpha);
  if (alpha_rotated == g.alpha && has_rotated(u, step, g)) rescale(rotated, rows, dv, g.alpha);
}

// While the softmax waits for its own results nothing is read. So much of V is asked for before it
// that the misses L1 can have in flight are all in use; more than that is slower (measured).
constexpr int kLinesAhead = 28;

// Rows [row, row + count) that see these tokens of the step, in near-equal groups. Window: not the
// step's first ones.
template <bool Plain, bool Window = false>
inline void run_rows(const AttendUnit& u, const Step& step, std::int64_t row, std::int64_t count,
                     Seen seen, Group& g) {
  const std::int64_t groups = (count + kMaxRows - 1) / kMaxRows;
  for (std::int64_t left = groups; left > 0; --left) {
    const int rows = static_cast<int>((count + left - 1) / left);
    for (int m = 0; m < rows; ++m) __builtin_prefetch(u.scratch->l_lanes + (row + m) * kMaxLanes);
    __builtin_prefetch(u.scratch->segment.m + row);
    scores_of<Plain, Window>(u, step, row, rows, seen, g);
    if (u.cap_log2 != 0.f) cap_scores(u.cap_log2, g.scores, rows);
    if (left == groups) {  // the others find V in a cache
      for (int i = 0; i < kLinesAhead; ++i) __builtin_prefetch(step.pieces[0].v + 64 * i);
      if (!Plain && step.v_codes) load_token_scales(u, step, g.code_step);
    }
    softmax<Window>(u, step, row, rows, seen, g);
    if (u.masses != nullptr) keep_masses(u, step, row, rows, g.base, g.p, g.sums);
    if (!Plain && step.v_codes) load_code_weights(g.p, rows, g.code_step, g.codes.p);
    values_of<Plain, Window>(u, step, row, rows, seen, g);
    row += rows;
    count -= rows;
  }
}

}  // namespace
}  // namespace kvcore::kernels::KVCORE_ISA_NS
