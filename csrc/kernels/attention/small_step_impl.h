// The step of small pages: two pages of 32 tokens or four of 16, whole, of the same formats, by
// rows that see all of it. What hot_step_impl.h does for one page, with one set of tiles for all of
// them: 16 tokens find their K in their own page.
#pragma once

#include "kernels/attention/hot_step_impl.h"

namespace kvcore::kernels::KVCORE_ISA_NS {
namespace {

constexpr int kQuarter = 16;  // tokens of the smallest page
constexpr int kQuarters = static_cast<int>(kStepTokens) / kQuarter;

// A step's K: where each 16 tokens find theirs, and what they are multiplied with.
struct SmallKeys {
  const char* b[kQuarters];
  const char* token_scale[kQuarters];  // of int8
  const QueryRows* rows[kQuarters];
  std::int64_t ahead[kQuarters];  // as in CodeTile
  std::int64_t stride;            // bytes between rows of b
  std::int64_t k;                 // rows of b
  const char* a;                  // what is the same for all pages: bf16, or integers for int8
  std::int64_t a_stride;          // bytes between its rows
  const char* side;               // as in CodeTile
  std::int64_t side_step;
};

// Bytes from the step's page i to where the next step's is, whose first codes come with its scales.
inline std::int64_t ahead_of(const Step& step, const Step* next, int i, Part part) {
  if (next == nullptr || i >= next->num_pieces) return 0;
  const Piece &now = step.pieces[i], &then = next->pieces[i];
  return (part == Part::kK ? then.k - now.k : then.v - now.v) + 64;
}

// The queries' integers for each page.
template <Format kFormat, int M>
inline void load_small_queries(const AttendUnit& u, const Step& step, std::int64_t row,
                               CodeRows& to) {
  const std::int32_t dk = u.pages->head_dim_k;
  const BlockArrays at = block_arrays(kFormat, Part::kK, u.pages->page_size, dk);
  for (int i = 0; i < step.num_pieces; ++i) {
    const char* block = step.pieces[i].k;
    if constexpr (kFormat == Format::kK4)
      load_k4_queries<M>(u.scratch->q_floats + row * dk, dk, GridOf(block, at), to.q[i]);
    else
      load_int8_queries<M>(u, row, MeansOf(block, at), to.q[i]);
  }
}

template <Format kFormat, int M>
inline SmallKeys small_keys(const AttendUnit& u, const Step& step, const Step* next,
                            std::int64_t row, const CodeRows& rows) {
  const std::int32_t dk = u.pages->head_dim_k;
  const std::int64_t page = u.pages->page_size;
  constexpr bool kNumbers = kFormat == Format::kBf16;
  const BlockArrays at = kNumbers ? BlockArrays{} : block_arrays(kFormat, Part::kK, page, dk);
  const Scratch& s = *u.scratch;
  SmallKeys keys;
  for (int i = 0; i < kQuarters; ++i) {
    const std::int64_t of_page = i * kQuarter % page;
    const int page_of = static_cast<int>(i * kQuarter / page);
    const Piece& p = step.pieces[page_of];
    keys.b[i] = p.k + at.codes + of_page * 4;
    keys.token_scale[i] = p.k + at.scale + of_page * 2;
    keys.rows[i] = &rows.q[page_of];
    keys.ahead[i] = ahead_of(step, next, page_of, Part::kK);
  }
  keys.stride = page * 4;
  keys.k = dk / (kNumbers ? 2 : kFormat == Format::kK4 ? 8 : 4);
  keys.a_stride = kNumbers && !kBf16Pairs ? dk * 4 : dk * 2;
  keys.a = !kNumbers    ? reinterpret_cast<const char*>(s.q_words) + row * keys.a_stride
           : kBf16Pairs ? reinterpret_cast<const char*>(s.q_pairs) + row * keys.a_stride
                        : reinterpret_cast<const char*>(s.q_floats) + row * keys.a_stride;
  const std::int64_t sum_bytes = std::int64_t{M} * u.pages->head_dim_v * 4;
  keys.side = reinterpret_cast<const char*>(first_sums(u, step, row));
  keys.side_step = (sum_bytes + keys.k - 1) / keys.k;
  return keys;
}

inline void fetch_sums(const SmallKeys& keys, std::int64_t k) {
  for (std::int64_t i = 0; i < keys.side_step; i += 64)
    __builtin_prefetch(keys.side + k * keys.side_step + i);
}

// acc[m][vector] += one row of codes times the queries', for tokens from vector kFirst on.
template <class Codes, int kFirst, int M, int N>
[[gnu::always_inline]] inline void add_small_row(const SmallKeys& keys, std::int64_t k,
                                                 Int (&acc)[M][N]) {
#pragma GCC unroll 8
  for (int j = 0; j < N; ++j) {
    const int quarter = (kFirst + j) / kVecs16;
    const char* b = keys.b[quarter] + k * keys.stride + (kFirst + j) % kVecs16 * kW * 4;
    if ((kFirst + j) % kVecs16 == 0) __builtin_prefetch(b + keys.ahead[quarter], 0, 2);  // into L2
    const char* a = Codes::kTokenScale ? keys.a : keys.rows[quarter]->codes[0];
    const std::int64_t stride = Codes::kTokenScale ? keys.a_stride : kMaxCodecDim;
    Codes codes;
    codes.take(CodeTile{}, b, 0);
#pragma GCC unroll 4
    for (int i = 0; i < Codes::kParts; ++i)
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m)
        acc[m][j] = Codes::dot(acc[m][j], codes.at[i],
                               repeat(a + m * stride + 4 * (k * Codes::kParts + i)));
  }
}

// The scores of the tokens from vector kFirst on, as many as the sums that fit the registers.
template <class Codes, int kFirst, int M>
[[gnu::always_inline]] inline void small_scores_from(const SmallKeys& keys,
                                                     F (&scores)[M][kStepVecs]) {
  if constexpr (kFirst < kStepVecs) {
    Int acc[M][kTileVecs];
#pragma GCC unroll 6
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
      for (int j = 0; j < kTileVecs; ++j)
        acc[m][j] = set1_int(keys.rows[(kFirst + j) / kVecs16]->bias[m]);
    for (std::int64_t k = 0; k < keys.k; ++k) {
      if (kFirst == 0) fetch_sums(keys, k);
      add_small_row<Codes, kFirst>(keys, k, acc);
    }
#pragma GCC unroll 8
    for (int j = 0; j < kTileVecs; ++j) {
      const int quarter = (kFirst + j) / kVecs16;
      CodeTile t{};
      t.token_scale = keys.token_scale[quarter];
      t.factor = keys.rows[quarter]->factor;
      t.offset = keys.rows[quarter]->offset;
#pragma GCC unroll 6
      for (int m = 0; m < M; ++m)
        scores[m][kFirst + j] = scores_of_sums<Codes>(t, acc[m][j], m, (kFirst + j) % kVecs16);
    }
    small_scores_from<Codes, kFirst + kTileVecs>(keys, scores);
  }
}

// The same over bf16.
template <int kFirst, int M>
[[gnu::always_inline]] inline void small_bf16_scores_from(const SmallKeys& keys,
                                                          F (&scores)[M][kStepVecs]) {
  if constexpr (kFirst < kStepVecs) {
    F acc[kMaxTiles][M][kVecs16];
#pragma GCC unroll 4
    for (int i = 0; i < kMaxTiles; ++i)
#pragma GCC unroll 6
      for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
        for (int j = 0; j < kVecs16; ++j) acc[i][m][j] = set1(0.f);
    for (std::int64_t k = 0; k < keys.k; ++k) {
      if (kFirst == 0) fetch_sums(keys, k);
#pragma GCC unroll 4
      for (int i = 0; i < kMaxTiles; ++i) {
        const int quarter = kFirst / kVecs16 + i;
        const char* b = keys.b[quarter] + k * keys.stride;
        __builtin_prefetch(b + keys.ahead[quarter], 0, 2);
        accumulate<Bf16Ops, false>(acc[i], keys.a + k * a_bytes<Bf16Ops>(), keys.a_stride, b);
      }
    }
#pragma GCC unroll 6
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
      for (int j = 0; j < kTileVecs; ++j) scores[m][kFirst + j] = acc[j / kVecs16][m][j % kVecs16];
    small_bf16_scores_from<kFirst + kTileVecs>(keys, scores);
  }
}

// Probabilities times the scales of their tokens' V.
template <int M>
inline void scale_small_weights(const AttendUnit& u, const Step& step, F (&weights)[M][kStepVecs]) {
  const std::int64_t page = u.pages->page_size;
  const Format format = step.pieces[0].v_format;
  const std::int64_t scale_at = block_arrays(format, Part::kV, page, u.pages->head_dim_v).scale;
#pragma GCC unroll 16
  for (int j = 0; j < kStepVecs; ++j) {
    const Piece& p = step.pieces[j * kW / page];
    const F scale = load_f16(p.v + scale_at + 2 * (j * kW % page));
#pragma GCC unroll 6
    for (int m = 0; m < M; ++m) weights[m][j] = mul(weights[m][j], scale);
  }
}

template <Format kFormat, bool VCodes, int M>
[[gnu::noinline]] void small_weights(const AttendUnit& u, const Step& step, const Step* next,
                                     std::int64_t row, Group& g) {
  const SmallKeys keys = small_keys<kFormat, M>(u, step, next, row, g.codes);
  F scores[M][kStepVecs];
  if constexpr (kFormat == Format::kBf16) {
    small_bf16_scores_from<0>(keys, scores);
  } else {
    load_small_queries<kFormat, M>(u, step, row, g.codes);
    small_scores_from<typename CodesOf<kFormat>::K, 0>(keys, scores);
  }
  if (u.cap_log2 != 0.f)
    for (auto& of_row : scores)
      for (F& x : of_row) x = tanh_of(mul(x, set1(u.cap_log2)));
  hot_softmax(u, step, row, g, scores);
  if constexpr (VCodes) {
    scale_small_weights(u, step, scores);
    code_weights(scores, g.codes.p);
  } else {
    keep_weights(scores, g);
  }
}

template <Format kFormat, int M>
[[gnu::noinline]] void small_values(const AttendUnit& u, const Step& step, const Step* next,
                                    std::int64_t row, Group& g) {
  constexpr bool kTurned = is_rotated(kFormat);
  const std::int32_t dv = u.pages->head_dim_v;
  float *o = u.scratch->segment.o + row * dv, *rotated = u.scratch->rotated + row * dv;
  for (std::int32_t d = 0; d < dv; d += static_cast<std::int32_t>(kDimBlock))
    for (int i = 0; i < step.num_pieces; ++i) {
      const Piece& p = step.pieces[i];
      const float* alpha = i == 0 ? g.alpha : g.ones;
      const std::int64_t ahead = ahead_of(step, next, i, Part::kV);
      if constexpr (kFormat == Format::kBf16) {
        TileArgs t = bf16_values(g, p.first, p.count, dv, alpha);
        t.b = p.v + p.count * d * 2;
        t.c = o + d;
        t.ahead = ahead;
        tiles_here<Bf16Ops, M>(t);
      } else {
        CodeTile t = value_tile<kFormat>(u, p, d, p.count, alpha, g.codes.p);
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

template <int M>
void run_small(const AttendUnit& u, const Step& step, const Step* next, std::int64_t row,
               Group& g) {
  const Piece& p = step.pieces[0];
  for (int m = 0; m < M; ++m) __builtin_prefetch(u.scratch->l_lanes + (row + m) * kMaxLanes);
  __builtin_prefetch(u.scratch->segment.m + row);
  const auto weights = [&]<Format kFormat>() {
    if (step.v_codes)
      small_weights<kFormat, true, M>(u, step, next, row, g);
    else
      small_weights<kFormat, false, M>(u, step, next, row, g);
  };
  if (p.k_format == Format::kBf16)
    weights.template operator()<Format::kBf16>();
  else if (p.k_format == Format::kK4)
    weights.template operator()<Format::kK4>();
  else
    weights.template operator()<Format::kInt8>();
  for (int i = 0; next != nullptr && i < next->num_pieces; ++i) {
    fetch_scales(next->pieces[i], Part::kK, u.pages->page_size, u.pages->head_dim_k);
    fetch_scales(next->pieces[i], Part::kV, u.pages->page_size, u.pages->head_dim_v);
  }
  if (p.v_format == Format::kBf16)
    small_values<Format::kBf16, M>(u, step, next, row, g);
  else if (p.v_format == Format::kV4)
    small_values<Format::kV4, M>(u, step, next, row, g);
  else if (p.v_format == Format::kV3)
    small_values<Format::kV3, M>(u, step, next, row, g);
  else
    small_values<Format::kInt8, M>(u, step, next, row, g);
}

// Rows that see all of the step; `next` is the unit's next one, if any.
[[gnu::noinline]] void run_hot_rows(const AttendUnit& u, const Step& step, const Step* next,
                                    std::int64_t row, std::int64_t count, Group& g) {
  const std::int64_t groups = (count + kMaxRows - 1) / kMaxRows;
  for (std::int64_t left = groups; left > 0; --left) {
    const int rows = static_cast<int>(left == 1 ? count : (count + left - 1) / left);
    const bool first = left == groups;
    const Step* then = first ? next : nullptr;
    by_rows(rows, [&]<int M>() {
      if (step.small)
        run_small<M>(u, step, then, row, g);
      else
        run_hot<M>(u, step, then, first, row, g);
    });
    row += rows;
    count -= rows;
  }
}

}  // namespace
}  // namespace kvcore::kernels::KVCORE_ISA_NS
