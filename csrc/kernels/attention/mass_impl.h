// Page scores: what each step leaves of its probabilities, and the scores that come of it.
#pragma once

#include "kernels/attention/code_step_impl.h"
#include "kernels/attention/pieces_impl.h"
#include "kernels/merge/merge_impl.h"

namespace kvcore::kernels::KVCORE_ISA_NS {
namespace {

inline std::int64_t pages_of_step(std::int64_t page_size) {
  return page_size < kStepTokens ? kStepTokens / page_size : 1;
}

// Where the q heads of row `row` of the unit's head h begin in the masses of one step.
inline float* mass_row(const AttendUnit& u, const Step& step, std::int64_t row) {
  std::int64_t t = u.t0;
  std::int64_t in_token = row - (step.head - u.h0) * (u.t1 - u.t0) * u.group;
  if (u.t1 - u.t0 != 1) {  // decoding alone does without the divisions
    t += in_token / u.group;
    in_token %= u.group;
  }
  const std::int64_t token = u.tokens == nullptr ? t : u.tokens[t];
  const std::int64_t rows = 1 + pages_of_step(u.pages->page_size);
  return u.masses + u.mass_at[token] + step.start / kStepTokens * rows * u.mass_stride +
         std::int64_t{step.head} * u.group + in_token;
}

// Maxima and sums of M rows of one token, as vectors.
template <int M>
inline void keep_masses(const AttendUnit& u, float* to, const float* base,
                        const float (*p)[kStepTokens], const float (*sums)[kMaxLanes]) {
  F part[M];
  store_first<M>(to, load(base));
  const std::int64_t pages = pages_of_step(u.pages->page_size);
  if (pages == 1) {
#pragma GCC unroll 6
    for (int m = 0; m < M; ++m) part[m] = load(sums[m]);
    store_first<M>(to + u.mass_stride, reduce_rows<Plus>(part));
    return;
  }
  for (std::int64_t i = 0; i < pages; ++i) {
    for (int m = 0; m < M; ++m) {
      part[m] = load(&p[m][i * u.pages->page_size]);
      for (int j = kW; j < u.pages->page_size; j += kW)
        part[m] = add(part[m], load(&p[m][i * u.pages->page_size + j]));
    }
    store_first<M>(to + (1 + i) * u.mass_stride, reduce_rows<Plus>(part));
  }
}

// Of rows [row, row + rows), after their softmax. Rows of one token lie side by side; others go one
// by one.
[[gnu::noinline]] void keep_masses(const AttendUnit& u, const Step& step, std::int64_t row,
                                   int rows, const float* base, const float (*p)[kStepTokens],
                                   const float (*sums)[kMaxLanes]) {
  if (u.t1 - u.t0 == 1) {
    float* to = mass_row(u, step, row);
    by_rows(rows, [&]<int M>() { keep_masses<M>(u, to, base, p, sums); });
    return;
  }
  for (int m = 0; m < rows; ++m)
    keep_masses<1>(u, mass_row(u, step, row + m), base + m, p + m, sums + m);
}

// A head's mass of a page is the sum over its steps of their sums, times 2^(maximum - lse).
void score_pages(const ScorePages& a) {
  const std::int64_t pages = pages_of_step(a.page_size), step_floats = (1 + pages) * a.mass_stride;
  const std::int64_t steps = a.page_size > kStepTokens ? a.page_size / kStepTokens : 1;
  for (std::int32_t h = 0; h < a.num_q_heads; ++h) a.work[h] = -kLog2e * a.lse[h];
  for (std::int64_t page = a.page0; page < a.page1; ++page) {
    F sum = set1(0.f);
    const std::int64_t first = page * steps / pages;
    for (std::int64_t s = first; s < at_most(first + steps, a.steps); ++s) {
      const float* maxima = a.masses + s * step_floats;
      const float* masses = maxima + (1 + page % pages) * a.mass_stride;
      for (std::int32_t h = 0; h < a.num_q_heads; h += kW) {
        const F factor = exp2(add(load(maxima + h), load(a.work + h)));
        sum = add(sum, first_n(a.num_q_heads - h, mul(load(masses + h), factor), set1(0.f)));
      }
    }
    a.out[page - a.page0] = hsum(sum);
  }
}

}  // namespace
}  // namespace kvcore::kernels::KVCORE_ISA_NS
