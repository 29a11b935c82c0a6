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

// Normalises the segment's rows into out[rows][Dv] and lse[rows]; rows that saw nothing: 0, -inf.
void finish_segment(const AttendUnit& u, std::int64_t rows, float* out, float* lse) {
  const std::int32_t dv = u.pages->head_dim_v;
  const Scratch& s = *u.scratch;
  for (std::int64_t r = 0; r < rows; ++r) {
    const float l = hsum(load(s.l + r * kMaxLanes));
    const F factor = set1(l == 0.f ? 0.f : 1.f / l);
    lse[r] = l == 0.f ? -__builtin_inff() : s.m[r] * kLn2 + __builtin_logf(l);
    for (std::int32_t d = 0; d < dv; d += kW)
      store(out + r * dv + d, mul(load(s.o_segment + r * dv + d), factor));
  }
}

void fold(const AttendUnit& u, std::int64_t rows, const float* out, const float* lse) {
  const Scratch& s = *u.scratch;
  merge_rows({s.o_total, s.lse_total, out, lse, s.o_total, s.lse_total, rows, u.pages->head_dim_v});
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

void attend_unit(const AttendUnit& u) {
  const std::int64_t rows = rows_of(u);
  const std::int64_t visible = u.first_visible + u.t1 - 1;
  const bool partial = u.partial_out != nullptr;
  // Page after page, KV heads inside: the order of the bytes.
  const std::int64_t run = u.pages->page_size > kStepTokens ? u.pages->page_size : kStepTokens;
  Group g{};
  for (float& one : g.ones) one = 1.f;
  load_queries(u);
  if (!partial) clear_total(u, rows);
  for (std::int64_t segment = u.segment0; segment < u.segment1; ++segment) {
    const std::int64_t begin = segment * kSegmentTokens;
    const std::int64_t end = at_most(visible, begin + kSegmentTokens);
    clear_segment(u, rows);
    for (std::int64_t start = begin; start < end; start += run)
      for (std::int32_t h = u.h0; h < u.h1; ++h)
        for (std::int64_t t = start; t < at_most(end, start + run); t += kStepTokens)
          run_step(u, h, t, g);
    const std::int64_t at = (segment - u.segment0) * rows;
    float* out = partial ? u.partial_out + at * u.pages->head_dim_v : u.scratch->o_segment;
    float* lse = partial ? u.partial_lse + at : u.scratch->m;
    finish_segment(u, rows, out, lse);
    if (!partial) fold(u, rows, out, lse);
  }
  if (!partial) write_out(u);
}

// Folds the partials of [segment0, segment1), left in order, and writes out.
void fold_unit(const AttendUnit& u) {
  const std::int64_t rows = rows_of(u);
  clear_total(u, rows);
  for (std::int64_t at = 0; at < (u.segment1 - u.segment0) * rows; at += rows)
    fold(u, rows, u.partial_out + at * u.pages->head_dim_v, u.partial_lse + at);
  write_out(u);
}

}  // namespace
}  // namespace kvcore::kernels::KVCORE_ISA_NS
