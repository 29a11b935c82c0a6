// Paged attention of one unit (see unit.h), for every page format and any mix of decode and
// prefill. Per segment of 1024 tokens an own online softmax in base 2 runs over steps of 64 tokens;
// a step is one or more pages' worth of tokens, so the page size changes no bit either. Finished
// segments are folded left in order.
#pragma once

#include "kernels/attention/small_step_impl.h"
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
    const std::int64_t token = u.tokens == nullptr ? t : u.tokens[t];
    const char* q = u.q + (token * u.q_stride + std::int64_t{head} * dk) * bytes;
    for (std::int32_t d = 0; d < dk; d += kW) {
      const F x = load_as(u.dtype, q, d);
      if (pairs)
        store_bf16(reinterpret_cast<char*>(u.scratch->q_pairs + row * (dk / 2)) + 2 * d, x);
      if (floats) store(u.scratch->q_floats + row * dk + d, x);
    }
    if (u.k_words) load_query_words(u, row);
  });
}

void clear_total(const Scratch& s, std::int64_t rows, std::int32_t dim) {
  for (std::int64_t i = 0; i < rows * dim; i += kW) store(s.out + i, set1(0.f));
  for (std::int64_t r = 0; r < rows; ++r) s.lse[r] = -__builtin_inff();
}

void clear_segment(const Scratch& s, std::int64_t rows, std::int32_t dim) {
  for (std::int64_t i = 0; i < rows * dim; i += kW) store(s.segment.o + i, set1(0.f));
  for (std::int64_t i = 0; i < rows * kMaxLanes; i += kW) store(s.l_lanes + i, set1(0.f));
  for (std::int64_t r = 0; r < rows; ++r) s.segment.m[r] = -__builtin_inff();
}

void sum_lanes(const Scratch& s, std::int64_t rows) {
  for (std::int64_t r = 0; r < rows; ++r) s.segment.l[r] = hsum(load(s.l_lanes + r * kMaxLanes));
}

// Adds rows of a finished segment to rows of the total from `at` on, by the arithmetic of
// merge_states.
void fold(const Scratch& s, std::int64_t at, const RowSums& part, std::int64_t rows,
          std::int32_t dim) {
  for (std::int64_t r = 0; r < rows; ++r) {
    const float l = part.l[r];
    const float lse = l == 0.f ? -__builtin_inff() : part.m[r] * kLn2 + __builtin_logf(l);
    float* out = s.out + (at + r) * dim;
    float* out_lse = s.lse + at + r;
    merge_row(out, *out_lse, part.o + r * dim, l == 0.f ? 0.f : 1.f / l, lse, out, out_lse, dim);
  }
}

void write_out(const AttendUnit& u) {
  const std::int32_t dv = u.pages->head_dim_v;
  const std::int64_t bytes = element_bytes(u.dtype);
  for_rows(u, [&](std::int64_t row, std::int64_t t, std::int32_t head) {
    char* out = u.out + (t * u.out_stride + std::int64_t{head} * dv) * bytes;
    for (std::int32_t d = 0; d < dv; d += kW)
      store_as(u.dtype, out, d, load(u.scratch->out + row * dv + d));
    if (u.lse != nullptr) u.lse[t * u.num_q_heads + head] = u.scratch->lse[row];
  });
}

RowSums rows_from(const RowSums& s, std::int64_t row, std::int32_t dim) {
  return {s.o + row * dim, s.m + row, s.l + row};
}

// The unit's steps in the order of the bytes: page after page, KV heads inside.
struct Walk {
  std::int64_t page,
      end;         // first token of the page (of the step, where that is more) and of no step
  std::int64_t t;  // first token of the step
  std::int32_t h;

  bool more() const { return page < end; }
  void advance(const AttendUnit& u) {
    const std::int64_t tokens = u.pages->page_size > kStepTokens ? u.pages->page_size : kStepTokens;
    t += kStepTokens;
    if (t < at_most(end, page + tokens)) return;
    if (++h == u.h1) {
      h = u.h0;
      page += tokens;
    }
    t = page;
  }
};

// The first page (or step, where that is more) of the unit's segments that some row sees.
inline std::int64_t first_page(const AttendUnit& u) {
  const std::int64_t begin = u.segment0 * kSegmentTokens;
  const std::int64_t tokens = u.pages->page_size > kStepTokens ? u.pages->page_size : kStepTokens;
  return u.first_seen <= begin ? begin : u.first_seen / tokens * tokens;
}

// The reads leave nothing else in L1, so the next step's addresses are looked up while this one
// reads: looked up when needed, they would hold back the reads behind them. A new page also misses
// the TLB, which its first lines find out early.
inline void look_ahead(const AttendUnit& u, const Walk& walk, const Step& now, Step& step) {
  if (walk.h == u.h0 || !locate_next_head(u, now, step)) locate(u, walk.h, walk.t, step);
  if (walk.h == u.h0)
    for (int i = 0; i < 4; ++i) __builtin_prefetch(step.pieces[0].k + 64 * i);
  if (step.v_codes)  // the scales in front of the codes
    for (int i = 0; i < 2; ++i) __builtin_prefetch(step.pieces[0].v + 64 * i);
}

// The rows of tokens [t, end), token by token, some of whose windows begin inside the step.
[[gnu::noinline]] void run_window_edge(const AttendUnit& u, const Step& step, std::int64_t base,
                                       std::int64_t t, std::int64_t end, Group& g) {
  for (; t < end; ++t) {
    const std::int64_t to = u.first_visible + t - step.start, from = to - u.window;
    run_rows<false, true>(u, step, base + t * u.group, u.group,
                          {from > 0 ? from : 0, at_most(to, kStepTokens)}, g);
  }
}

// Rows that see all of the step go in full groups; rows of tokens inside the causal edge, or whose
// window begins inside the step, go token by token, so that what a row cannot see is never
// multiplied, not even by 0 (but see values_of).
template <bool Plain>
void run_tokens(const AttendUnit& u, const Step& step, const Step* next, Group& g) {
  const std::int64_t base = (step.head - u.h0) * (u.t1 - u.t0) * u.group - u.t0 * u.group;
  std::int64_t t = u.t0, end = u.t1;
  if (u.first_visible + t <= step.start) t = step.start - u.first_visible + 1;
  if (u.window != 0) {  // up to `whole` windows begin at or before the step, up to `end` inside it
    const std::int64_t whole = step.start - u.first_visible + u.window + 1;
    end = at_most(end, whole + kStepTokens - 1);
    if (whole < end) {
      const std::int64_t edge = whole > t ? whole : t;
      run_window_edge(u, step, base, edge, end, g);
      end = edge;
    }
  }
  for (; t < end && u.first_visible + t - step.start < kStepTokens; ++t)
    run_rows<Plain>(u, step, base + t * u.group, u.group, {0, u.first_visible + t - step.start}, g);
  if (t >= end) return;
  const std::int64_t row = base + t * u.group, count = (end - t) * u.group;
  if (step.hot || step.small)
    run_hot_rows(u, step, next, row, count, g);
  else
    run_rows<Plain>(u, step, row, count, {0, kStepTokens}, g);
}

// Whether no row of the unit sees a part of the step alone; the bounds are those of run_tokens().
inline bool all_or_nothing(const AttendUnit& u, const Step& step) {
  const std::int64_t first = u.first_visible + u.t0 - step.start,
                     last = u.first_visible + u.t1 - 1 - step.start;
  return first >= kStepTokens && (u.window == 0 || last <= u.window);
}

[[gnu::noinline]] void run_mixed_step(const AttendUnit& u, Step& step, const Step* next, Group& g) {
  if (!step.in_place) gather(u, step);
  if (step.k_codes && !(step.small && all_or_nothing(u, step))) load_channels(u, step, g.code_step);
  if (step.v_codes) g.any_rotated |= begin_rotated(u, step);
  run_tokens<false>(u, step, next, g);
}

// One located step, and the next one, if any. Plain ones are numbers that lie as the tiles read
// them.
inline void run_step(const AttendUnit& u, Step& step, const Step* next, Group& g) {
  if (step.plain && !g.any_rotated)
    run_tokens<true>(u, step, next, g);
  else
    run_mixed_step(u, step, next, g);
}

void attend_unit(const AttendUnit& whole) {
  const std::int64_t rows = rows_of(whole);
  const std::int32_t dv = whole.pages->head_dim_v;
  const bool partial = whole.partials.o != nullptr;
  Scratch scratch = *whole.scratch;
  AttendUnit u = whole;
  u.scratch = &scratch;
  Group g;
  for (float& one : g.ones) one = 1.f;
  load_queries(u);
  if (!partial) clear_total(scratch, rows, dv);
  const std::int64_t begin = first_page(u);
  bool new_segment = true;
  Walk walk{begin, at_most(u.first_visible + u.t1 - 1, u.segment1 * kSegmentTokens), begin, u.h0};
  Step steps[2];
  if (walk.more()) locate(u, walk.h, walk.t, steps[0]);
  for (int i = 0; walk.more(); i = 1 - i) {
    const std::int64_t segment = walk.page / kSegmentTokens;
    if (new_segment) {
      if (partial)
        scratch.segment =
            rows_from(u.partials, u.partial_row + (segment - u.segment0) * u.partial_rows, dv);
      clear_segment(scratch, rows, dv);
      no_rotated(u);
      g.any_rotated = new_segment = false;
    }
    walk.advance(u);
    if (walk.more()) look_ahead(u, walk, steps[i], steps[1 - i]);
    run_step(u, steps[i], walk.more() ? &steps[1 - i] : nullptr, g);
    if (walk.more() && walk.page / kSegmentTokens == segment) continue;
    if (g.any_rotated) turn_back(u);
    sum_lanes(scratch, rows);
    if (!partial) fold(scratch, 0, scratch.segment, rows, dv);
    new_segment = true;
  }
  if (!partial) write_out(u);
}

// Folds the partials of [segment0, segment1), left in order, and writes out.
void fold_unit(const AttendUnit& u) {
  const std::int32_t dv = u.pages->head_dim_v;
  const std::int64_t per_head = (u.t1 - u.t0) * u.group;
  clear_total(*u.scratch, rows_of(u), dv);
  for (std::int64_t i = 0; i < u.segment1 - u.segment0; ++i)
    for (std::int32_t h = 0; h < u.h1 - u.h0; ++h) {
      const PartialRef& ref = u.refs[i];
      const std::int64_t row = ref.row + (std::int64_t{h} * ref.tokens + ref.token) * u.group;
      fold(*u.scratch, h * per_head, rows_from(u.partials, row, dv), per_head, dv);
    }
  write_out(u);
}

}  // namespace
}  // namespace kvcore::kernels::KVCORE_ISA_NS
