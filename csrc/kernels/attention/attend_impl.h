// Paged attention of one unit (see unit.h), for every page format and any mix of decode and
// prefill. Per segment of 1024 tokens an own online softmax in base 2 runs over steps of 64 tokens;
// a step is one or more pages' worth of tokens, so the page size changes no bit either. Finished
// segments are normalised and folded left in order by merge_row.
#pragma once

#include "kernels/attention/step_impl.h"
#include "kernels/merge/merge_impl.h"

namespace kvcore::kernels::KVCORE_ISA_NS {
namespace {

// Not base's size_of: an inline function shared with other files could bring wide code into them.
inline std::int64_t element_bytes(DType t) { return t == DType::kF32 ? 4 : 2; }

inline F load_as(DType t, const char* p, std::int64_t i) {
  return t == DType::kF32   ? load_f32(p + 4 * i)
         : t == DType::kF16 ? load_f16(p + 2 * i)
                            : load_bf16(p + 2 * i);
}
inline void store_as(DType t, char* p, std::int64_t i, F v) {
  if (t == DType::kF32)
    store_f32(p + 4 * i, v);
  else if (t == DType::kF16)
    store_f16(p + 2 * i, v);
  else
    store_bf16(p + 2 * i, v);
}

inline std::int64_t rows_of(const AttendUnit& u) { return (u.h1 - u.h0) * (u.t1 - u.t0) * u.group; }

// Calls fn(row, token, q head) for the unit's rows in order.
template <class Fn>
inline void for_rows(const AttendUnit& u, Fn fn) {
  std::int64_t row = 0;
  for (std::int32_t h = u.h0; h < u.h1; ++h)
    for (std::int64_t t = u.t0; t < u.t1; ++t)
      for (std::int32_t g = 0; g < u.group; ++g) fn(row++, t, h * u.group + g);
}

void load_queries(const AttendUnit& u) {
  const std::int32_t dk = u.pages->head_dim_k;
  const std::int64_t bytes = element_bytes(u.dtype);
  const bool pairs = kBf16Pairs && u.k_pairs;
  const bool floats = u.k_floats || (!kBf16Pairs && u.k_pairs);
  for_rows(u, [&](std::int64_t row, std::int64_t t, std::int32_t head) {
    const char* q = u.q + (t * u.q_stride + std::int64_t{head} * dk) * bytes;
    for (std::int32_t d = 0; d < dk; d += kW) {
      const F x = load_as(u.dtype, q, d);
      if (pairs)
        store_bf16(reinterpret_cast<char*>(u.scratch->q_pairs + row * (dk / 2)) + 2 * d, x);
      if (floats) store(u.scratch->q_floats + row * dk + d, x);
    }
  });
}

void clear_segment(const AttendUnit& u, std::int64_t rows) {
  const Scratch& s = *u.scratch;
  const F zero = set1(0.f);
  for (std::int64_t i = 0; i < rows * u.pages->head_dim_v; i += kW) store(s.o_segment + i, zero);
  for (std::int64_t r = 0; r < rows; ++r) {
    s.m[r] = -__builtin_inff();
    for (int i = 0; i < kMaxLanes; i += kW) store(s.l + r * kMaxLanes + i, zero);
  }
}

// A row of the finished segment: what its sums come to. A row that saw nothing: 0, -inf.
struct RowState {
  float factor;  // makes o_segment the normalised output
  float lse;
};

inline RowState row_state(const Scratch& s, std::int64_t r) {
  const float l = hsum(load(s.l + r * kMaxLanes));
  if (l == 0.f) return {0.f, -__builtin_inff()};
  return {1.f / l, s.m[r] * kLn2 + __builtin_logf(l)};
}

// The segment's rows, normalised, to out[rows][Dv] and lse[rows].
void finish_segment(const AttendUnit& u, std::int64_t rows, float* out, float* lse) {
  const std::int32_t dv = u.pages->head_dim_v;
  for (std::int64_t r = 0; r < rows; ++r) {
    const RowState state = row_state(*u.scratch, r);
    lse[r] = state.lse;
    scale_row(out + r * dv, u.scratch->o_segment + r * dv, state.factor, dv);
  }
}

// The same, merged into the total at once.
void fold_segment(const AttendUnit& u, std::int64_t rows) {
  const std::int32_t dv = u.pages->head_dim_v;
  const Scratch& s = *u.scratch;
  for (std::int64_t r = 0; r < rows; ++r) {
    const RowState state = row_state(s, r);
    float* total = s.o_total + r * dv;
    merge_row(total, s.lse_total[r], s.o_segment + r * dv, state.factor, state.lse, total,
              s.lse_total + r, dv);
  }
}

void clear_total(const AttendUnit& u, std::int64_t rows) {
  for (std::int64_t r = 0; r < rows; ++r) u.scratch->lse_total[r] = -__builtin_inff();
  for (std::int64_t i = 0; i < rows * u.pages->head_dim_v; i += kW)
    store(u.scratch->o_total + i, set1(0.f));
}

void write_out(const AttendUnit& u) {
  const std::int32_t dv = u.pages->head_dim_v;
  const std::int64_t bytes = element_bytes(u.dtype);
  for_rows(u, [&](std::int64_t row, std::int64_t t, std::int32_t head) {
    char* out = u.out + (t * u.out_stride + std::int64_t{head} * dv) * bytes;
    for (std::int32_t d = 0; d < dv; d += kW)
      store_as(u.dtype, out, d, load(u.scratch->o_total + row * dv + d));
    if (u.lse != nullptr) u.lse[t * u.num_q_heads + head] = u.scratch->lse_total[row];
  });
}

// All steps of tokens [begin, end), in the order of the bytes: page after page, KV heads inside. The
// stream leaves nothing else in L1, so the next step's addresses are looked up while this one reads:
// looked up when needed, they would hold back the reads behind them.
void run_steps(const AttendUnit& u, std::int64_t begin, std::int64_t end, Group& g) {
  const std::int64_t run = u.pages->page_size > kStepTokens ? u.pages->page_size : kStepTokens;
  Step steps[2];
  std::int64_t first = begin, t = begin;
  std::int32_t h = u.h0;
  locate(u, h, t, steps[0]);
  for (int i = 0; first < end; ++i) {
    t += kStepTokens;
    if (t >= at_most(end, first + run)) {
      t = first;
      if (++h == u.h1) {
        h = u.h0;
        t = first += run;
      }
    }
    if (first < end) locate(u, h, t, steps[(i + 1) % 2]);
#ifdef XN
    if (first < end && (XALL || h == u.h0)) for (int q = 0; q < XN; ++q) __builtin_prefetch(steps[(i + 1) % 2].pieces[0].k + 64 * q, 0, XH);
#endif
    run_step(u, steps[i % 2], g);
  }
}

void attend_unit(const AttendUnit& u) {
  const std::int64_t rows = rows_of(u);
  const std::int64_t visible = u.first_visible + u.t1 - 1;
  const bool partial = u.partial_out != nullptr;
  Group g{};
  for (float& one : g.ones) one = 1.f;
  load_queries(u);
  if (!partial) clear_total(u, rows);
  for (std::int64_t segment = u.segment0; segment < u.segment1; ++segment) {
    const std::int64_t begin = segment * kSegmentTokens;
    const std::int64_t end = at_most(visible, begin + kSegmentTokens);
    clear_segment(u, rows);
    if (begin < end) run_steps(u, begin, end, g);
    const std::int64_t at = (segment - u.segment0) * rows;
    if (partial)
      finish_segment(u, rows, u.partial_out + at * u.pages->head_dim_v, u.partial_lse + at);
    else
      fold_segment(u, rows);
  }
  if (!partial) write_out(u);
}

// Folds the partials of [segment0, segment1), left in order, and writes out.
void fold_unit(const AttendUnit& u) {
  const std::int64_t rows = rows_of(u);
  const Scratch& s = *u.scratch;
  clear_total(u, rows);
  for (std::int64_t at = 0; at < (u.segment1 - u.segment0) * rows; at += rows)
    merge_rows({s.o_total, s.lse_total, u.partial_out + at * u.pages->head_dim_v,
                u.partial_lse + at, s.o_total, s.lse_total, rows, u.pages->head_dim_v});
  write_out(u);
}

}  // namespace
}  // namespace kvcore::kernels::KVCORE_ISA_NS
