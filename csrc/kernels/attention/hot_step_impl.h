// The step that is done most: one page of 64 tokens, in place, by rows that see all of it. The
// operations of step_impl.h in their order, so bit for bit the same; but formats and rows are
// constants here, and nothing is asked twice.
#pragma once

#include "kernels/attention/step_impl.h"

namespace kvcore::kernels::KVCORE_ISA_NS {
namespace {

// The tiles that a row's scores take, of Codes or Ops, each as wide as registers allow.
constexpr int kTileVecs = kMaxTiles * kVecs16;

// scores[m] = q . k of the step's 64 tokens.
template <Format kFormat, int M>
[[gnu::always_inline]] inline void hot_scores(const AttendUnit& u, const Step& step,
                                              std::int64_t row, std::int64_t ahead, Group& g,
                                              F (&scores)[M][kStepVecs]) {
  const std::int32_t dk = u.pages->head_dim_k;
  const Piece& p = step.pieces[0];
  const char* sums = reinterpret_cast<const char*>(first_sums(u, step, row));
  const std::int64_t sum_bytes = std::int64_t{M} * u.pages->head_dim_v * 4;
  const auto each_tile = [&](auto sum_tile) {
#pragma GCC unroll 16
    for (int first = 0; first < kStepVecs; first += kTileVecs) sum_tile(first);
  };
  if constexpr (kFormat == Format::kBf16) {
    TileArgs t{};
    t.a = kBf16Pairs ? static_cast<const void*>(u.scratch->q_pairs + row * (dk / 2))
                     : static_cast<const void*>(u.scratch->q_floats + row * dk);
    t.a_stride = kBf16Pairs ? dk * 2 : dk * 4;
    t.b = p.k;
    t.b_stride = kStepTokens * 4;
    t.k = dk / 2;
    t.side = sums;
    t.side_step = sum_bytes / t.k;
    each_tile([&](int first) {
      F acc[M][kTileVecs];
#pragma GCC unroll 6
      for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
        for (int j = 0; j < kTileVecs; ++j) acc[m][j] = set1(0.f);
      add_rows<Bf16Ops>(t, acc);
#pragma GCC unroll 6
      for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
        for (int j = 0; j < kTileVecs; ++j) scores[m][first + j] = acc[m][j];
      t.b += kTileVecs * kW * Bf16Ops::kBytes;
      t.side = nullptr;
    });
  } else {
    using Codes = typename CodesOf<kFormat>::K;
    CodeTile t = key_tile<kFormat, M>(u, p, g.code_step.channels[0], row, g.codes.q[0]);
    t.side = sums;
    t.side_step = (sum_bytes + t.k - 1) / t.k;
    t.ahead = ahead;
    each_tile([&](int first) {
      Int acc[M][kTileVecs];
      sum_codes<Codes>(t, acc);
#pragma GCC unroll 6
      for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
        for (int j = 0; j < kTileVecs; ++j)
          scores[m][first + j] = scores_of_sums<Codes>(t, acc[m][j], m, j);
      advance(t, kMaxTiles);
    });
  }
}

// The sums of `vecs` vectors of each row, those of the step's page i.
template <int M>
inline F mass_of_page(const F (&p)[M][kStepVecs], int i, int vecs) {
  F part[M];
  for (int m = 0; m < M; ++m) {
    part[m] = p[m][i * vecs];
    for (int j = 1; j < vecs; ++j) part[m] = add(part[m], p[m][i * vecs + j]);
  }
  return reduce_rows<Plus>(part);
}

template <int M>
inline void hot_masses(const AttendUnit& u, const Step& step, std::int64_t row, F base,
                       const F* mass, int pages, Group& g) {
  if (u.t1 - u.t0 == 1) {  // rows of one token lie side by side
    float* to = mass_row(u, step, row);
    store_first<M>(to, base);
    for (int i = 0; i < pages; ++i) store_first<M>(to + (1 + i) * u.mass_stride, mass[i]);
    return;
  }
  for (int i = 0; i < pages; ++i) store(g.sums[i], mass[i]);
  for (int m = 0; m < M; ++m) {
    float* to = mass_row(u, step, row + m);
    to[0] = g.base[m];
    for (int i = 0; i < pages; ++i) to[(1 + i) * u.mass_stride] = g.sums[i][m];
  }
}

// softmax() of step_impl.h for rows that see all 64 tokens, whose scores become probabilities.
template <int M>
[[gnu::always_inline]] inline void hot_softmax(const AttendUnit& u, const Step& step,
                                               std::int64_t row, Group& g,
                                               F (&scores)[M][kStepVecs]) {
  float top[M];
#pragma GCC unroll 6
  for (int m = 0; m < M; ++m) {
    F all = set1(-__builtin_inff());
#pragma GCC unroll 16
    for (int j = 0; j < kStepVecs; ++j) all = vmax(all, scores[m][j]);
    top[m] = hmax(all);
  }
  const RowMaxima maxima = raise_maxima<M>(u, row, top, g);
  F sums[M];
#pragma GCC unroll 6
  for (int m = 0; m < M; ++m) {
    const F scale = set1(u.scale_log2), minus_base = set1(-g.base[m]);
    sums[m] = set1(0.f);
#pragma GCC unroll 16
    for (int j = 0; j < kStepVecs; ++j) {
      scores[m][j] = exp2(fma(scores[m][j], scale, minus_base));
      sums[m] = add(sums[m], scores[m][j]);
    }
    float* l = u.scratch->l_lanes + (row + m) * kMaxLanes;
    store(l, fma(load(l), set1(g.alpha[m]), sums[m]));
  }
  store_first<M>(u.scratch->segment.m + row, maxima.now);
  if (u.masses == nullptr) return;
  F mass[kMaxPieces];  // rows as lanes
  const int pages = static_cast<int>(pages_of_step(u.pages->page_size));
  if (pages == 1)
    mass[0] = reduce_rows<Plus>(sums);
  else
    for (int i = 0; i < pages; ++i) mass[i] = mass_of_page(scores, i, kStepVecs / pages);
  hot_masses<M>(u, step, row, maxima.base, mass, pages, g);
}

// The rows' probabilities as what bf16 V is multiplied with.
template <int M>
[[gnu::always_inline]] inline void keep_weights(const F (&p)[M][kStepVecs], Group& g) {
#pragma GCC unroll 6
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 16
    for (int j = 0; j < kStepVecs; ++j) {
      if constexpr (kBf16Pairs)
        store_bf16(reinterpret_cast<char*>(g.p_pairs[m]) + 2 * j * kW, p[m][j]);
      else
        store(&g.p[m][j * kW], p[m][j]);
    }
}

// Everything up to what the rows multiply V with: pairs or floats in g, or bytes in g.codes. Scores
// and probabilities stay in registers: every store in between costs several times as much beside a
// stream from memory as in the cache (measured; page scores cost half of what they did).
template <Format kFormat, bool VCodes, int M>
[[gnu::noinline]] void hot_weights(const AttendUnit& u, const Step& step, std::int64_t row,
                                   bool first, std::int64_t ahead, Group& g) {
  const Piece& p = step.pieces[0];
  F scores[M][kStepVecs];
  hot_scores<kFormat, M>(u, step, row, ahead, g, scores);
  if (u.cap_log2 != 0.f)
    for (auto& of_row : scores)
      for (F& x : of_row) x = tanh_of(mul(x, set1(u.cap_log2)));
  if constexpr (!VCodes)
    if (first)  // the others find V in a cache
      for (int i = 0; i < kLinesAhead; ++i) __builtin_prefetch(p.v + 64 * i);
  hot_softmax(u, step, row, g, scores);
  if constexpr (VCodes) {
    const char* scales =
        p.v + block_arrays(p.v_format, Part::kV, u.pages->page_size, u.pages->head_dim_v).scale;
#pragma GCC unroll 16
    for (int j = 0; j < kStepVecs; ++j) {
      const F scale = load_f16(scales + 2 * j * kW);
#pragma GCC unroll 6
      for (int m = 0; m < M; ++m) scores[m][j] = mul(scores[m][j], scale);
    }
    code_weights(scores, g.codes.p);
  } else {
    keep_weights(scores, g);
  }
}

// The tile of `count` tokens of bf16 V from the step's token `first` on, but for where V and the
// sums lie.
inline TileArgs bf16_values(const Group& g, int first, std::int64_t count, std::int32_t dv,
                            const float* alpha) {
  TileArgs t{};
  t.a = kBf16Pairs ? static_cast<const void*>(g.p_pairs[0] + first / 2)
                   : static_cast<const void*>(g.p[0] + first);
  t.a_stride = kBf16Pairs ? kStepTokens * 2 : kStepTokens * 4;
  t.k = count / 2;
  t.b_stride = kDimBlock * 4;
  t.c_stride = dv;
  t.alpha = alpha;
  return t;
}

template <Format kFormat, int M>
[[gnu::noinline]] void hot_values(const AttendUnit& u, const Step& step, std::int64_t row,
                                  std::int64_t ahead, Group& g) {
  constexpr bool kTurned = is_rotated(kFormat);
  const std::int32_t dv = u.pages->head_dim_v;
  const Piece& p = step.pieces[0];
  float *o = u.scratch->segment.o + row * dv, *rotated = u.scratch->rotated + row * dv;
  if constexpr (kFormat == Format::kBf16) {
    TileArgs t = bf16_values(g, 0, kStepTokens, dv, g.alpha);
    for (std::int32_t d = 0; d < dv; d += static_cast<std::int32_t>(kDimBlock)) {
      t.b = p.v + kStepTokens * d * 2;
      t.c = o + d;
      tiles_here<Bf16Ops, M>(t);
    }
  } else {
    for (std::int32_t d = 0; d < dv; d += static_cast<std::int32_t>(kDimBlock)) {
      CodeTile t = value_tile<kFormat>(u, p, d, kStepTokens, g.alpha, g.codes.p);
      t.c = (kTurned ? rotated : o) + d;
      t.ahead = ahead;
      code_tiles_here<typename CodesOf<kFormat>::V, M>(t);
    }
  }
  if (kTurned)
    rescale(o, M, dv, g.alpha);
  else if (has_rotated(u, step, g))
    rescale(rotated, M, dv, g.alpha);
}

// What lies before the codes of a page, and their first line.
[[gnu::always_inline]] inline void fetch_scales(const Piece& p, Part part, std::int64_t tokens,
                                                std::int32_t dim) {
  const char* block = part == Part::kK ? p.k : p.v;
  const Format format = part == Part::kK ? p.k_format : p.v_format;
  const std::int64_t codes =
      format < Format::kInt8 ? 0 : block_arrays(format, part, tokens, dim).codes;
  for (std::int64_t i = 0; i <= codes; i += 64) __builtin_prefetch(block + i);
}

// The M rows from `row` on. `next`, if any, is brought into L2 meanwhile where this step is codes:
// they take more arithmetic than reading, and the hardware's own reading ahead stops during most of
// it.
template <int M>
void run_hot(const AttendUnit& u, const Step& step, const Step* next, bool first, std::int64_t row,
             Group& g) {
  const Piece& p = step.pieces[0];
  std::int64_t k_ahead = 0, v_ahead = 0;
  if (next != nullptr) {
    // Codes need not begin with a cache line: their first one comes with the scales, and this ends
    // one later.
    k_ahead = next->pieces[0].k - p.k + 64;
    v_ahead = next->pieces[0].v - p.v + 64;
  }
  for (int m = 0; m < M; ++m) __builtin_prefetch(u.scratch->l_lanes + (row + m) * kMaxLanes);
  __builtin_prefetch(u.scratch->segment.m + row);
  const auto weights = [&]<Format kFormat>(std::int64_t ahead) {
    if (step.v_codes)
      hot_weights<kFormat, true, M>(u, step, row, first, ahead, g);
    else
      hot_weights<kFormat, false, M>(u, step, row, first, ahead, g);
  };
  if (p.k_format == Format::kBf16)
    weights.template operator()<Format::kBf16>(0);
  else if (p.k_format == Format::kK4)
    weights.template operator()<Format::kK4>(k_ahead);
  else
    weights.template operator()<Format::kInt8>(k_ahead);
  if (next != nullptr) {
    if (step.k_codes) fetch_scales(next->pieces[0], Part::kK, kStepTokens, u.pages->head_dim_k);
    if (step.v_codes) fetch_scales(next->pieces[0], Part::kV, kStepTokens, u.pages->head_dim_v);
  }
  if (p.v_format == Format::kBf16)
    hot_values<Format::kBf16, M>(u, step, row, 0, g);
  else if (p.v_format == Format::kV4)
    hot_values<Format::kV4, M>(u, step, row, v_ahead, g);
  else if (p.v_format == Format::kV3)
    hot_values<Format::kV3, M>(u, step, row, v_ahead, g);
  else
    hot_values<Format::kInt8, M>(u, step, row, v_ahead, g);
}

}  // namespace
}  // namespace kvcore::kernels::KVCORE_ISA_NS
