// The step that is done most: one page of 64 tokens, in place, by rows that see all of it. The
// operations of step_impl.h in their order, so bit for bit the same; but formats and rows are
// constants here, and nothing is asked twice.
#pragma once

#include "kernels/attention/step_impl.h"

namespace kvcore::kernels::KVCORE_ISA_NS {
namespace {

template <Format kFormat, int M>
[[gnu::noinline]] void hot_scores(const AttendUnit& u, const Step& step, std::int64_t row,
                                  std::int64_t ahead, Group& g) {
  const std::int32_t dk = u.pages->head_dim_k;
  const Piece& p = step.pieces[0];
  const char* sums = reinterpret_cast<const char*>(first_sums(u, step, row));
  const std::int64_t sum_bytes = std::int64_t{M} * u.pages->head_dim_v * 4;
  if constexpr (kFormat == Format::kBf16) {
    TileArgs t{};
    t.a = kBf16Pairs ? static_cast<const void*>(u.scratch->q_pairs + row * (dk / 2))
                     : static_cast<const void*>(u.scratch->q_floats + row * dk);
    t.a_stride = kBf16Pairs ? dk * 2 : dk * 4;
    t.b = p.k;
    t.b_stride = kStepTokens * 4;
    t.k = dk / 2;
    t.c = &g.scores[0][0];
    t.c_stride = kStepTokens;
    t.side = sums;
    t.side_step = sum_bytes / t.k;
    tiles_here<Bf16Ops, M>(t);
  } else {
    CodeTile t = key_tile<kFormat, M>(u, p, g.code_step.channels[0], row, g.codes);
    t.c = &g.scores[0][0];
    t.c_stride = kStepTokens;
    t.side = sums;
    t.side_step = (sum_bytes + t.k - 1) / t.k;
    t.ahead = ahead;
    code_tiles_here<typename CodesOf<kFormat>::K, M>(t);
  }
}

template <Format kFormat, int M>
[[gnu::noinline]] void hot_values(const AttendUnit& u, const Step& step, std::int64_t row,
                                  std::int64_t ahead, Group& g) {
  constexpr bool kTurned = is_rotated(kFormat);
  const std::int32_t dv = u.pages->head_dim_v;
  const Piece& p = step.pieces[0];
  float *o = u.scratch->segment.o + row * dv, *rotated = u.scratch->rotated + row * dv;
  if constexpr (kFormat == Format::kBf16) {
    TileArgs t{};
    t.a = kBf16Pairs ? static_cast<const void*>(g.p_pairs) : static_cast<const void*>(g.p);
    t.a_stride = kBf16Pairs ? kStepTokens * 2 : kStepTokens * 4;
    t.k = kStepTokens / 2;
    t.b_stride = kDimBlock * 4;
    t.c_stride = dv;
    t.alpha = g.alpha;
    for (std::int32_t d = 0; d < dv; d += static_cast<std::int32_t>(kDimBlock)) {
      t.b = p.v + kStepTokens * d * 2;
      t.c = o + d;
      tiles_here<Bf16Ops, M>(t);
    }
  } else {
    load_code_weights<M>(g.p, g.code_step, g.codes);
    for (std::int32_t d = 0; d < dv; d += static_cast<std::int32_t>(kDimBlock)) {
      CodeTile t = value_tile<kFormat>(u, p, d, kStepTokens, g.alpha, g.codes);
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

// What lies before the codes, and their first line.
inline void fetch_scales(const Step& step, Part part, std::int32_t dim) {
  const Piece& p = step.pieces[0];
  const char* block = part == Part::kK ? p.k : p.v;
  const Format format = part == Part::kK ? p.k_format : p.v_format;
  const std::int64_t codes =
      format < Format::kInt8 ? 0 : block_arrays(format, part, kStepTokens, dim).codes;
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
  if (p.k_format == Format::kBf16)
    hot_scores<Format::kBf16, M>(u, step, row, 0, g);
  else if (p.k_format == Format::kK4)
    hot_scores<Format::kK4, M>(u, step, row, k_ahead, g);
  else
    hot_scores<Format::kInt8, M>(u, step, row, k_ahead, g);
  if (u.cap_log2 != 0.f) cap_scores(u.cap_log2, g.scores, M);
  if (first) {  // the others find V in a cache
    if (step.v_codes)
      load_token_scales(u, step, g.code_step);
    else
      for (int i = 0; i < kLinesAhead; ++i) __builtin_prefetch(p.v + 64 * i);
  }
  softmax<Mask::kNone, M>(u, step, row, {0, kStepTokens}, g);
  if (u.masses != nullptr) keep_masses(u, step, row, M, g.base, g.p, g.sums);
  if (next != nullptr) {
    if (step.k_codes) fetch_scales(*next, Part::kK, u.pages->head_dim_k);
    if (step.v_codes) fetch_scales(*next, Part::kV, u.pages->head_dim_v);
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

// Rows that see all of the step; `next` is the unit's next one, if any.
[[gnu::noinline]] void run_hot_rows(const AttendUnit& u, const Step& step, const Step* next,
                                    std::int64_t row, std::int64_t count, Group& g) {
  const std::int64_t groups = (count + kMaxRows - 1) / kMaxRows;
  for (std::int64_t left = groups; left > 0; --left) {
    const int rows = static_cast<int>(left == 1 ? count : (count + left - 1) / left);
    const bool first = left == groups;
    by_rows(rows, [&]<int M>() { run_hot<M>(u, step, first ? next : nullptr, first, row, g); });
    row += rows;
    count -= rows;
  }
}

}  // namespace
}  // namespace kvcore::kernels::KVCORE_ISA_NS
