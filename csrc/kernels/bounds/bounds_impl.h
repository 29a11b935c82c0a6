// Bounds of pages: the least and the largest number of each channel, and scores that come of them.
#pragma once

#include "kernels/bounds/rows.h"
#include "kernels/formats/k4_impl.h"

namespace kvcore::kernels::KVCORE_ISA_NS {
namespace {

struct Bound {
  F low, high;

  void widen(F least, F largest) {
    low = vmin(least, low);
    high = vmax(largest, high);
  }
};

inline Bound no_bound() { return {set1(__builtin_inff()), set1(-__builtin_inff())}; }

// Dims are lanes: canonical rows.
template <class E>
void widen_canonical(const WidenBounds& a) {
  for (std::int32_t d = 0; d < a.dim; d += kW) {
    Bound bound{load(a.low + d), load(a.high + d)};
    for (std::int32_t t = 0; t < a.tokens; ++t) {
      const F v = row_at<E>(a.k + t * a.row_bytes, d).get(0);
      bound.widen(v, v);
    }
    store(a.low + d, bound.low);
    store(a.high + d, bound.high);
  }
}

// Numbers of kW tokens of one dim, or of a pair of dims of bf16.
template <class E>
Two packed_at(const char* p) {
  if constexpr (kPairs<E>) return of_pairs(load_int(p));
  return {E::get(p), set1(0.f)};
}

// Tokens are lanes: a row of a packed block is one dim of them, or a pair of dims of bf16. Lanes
// behind the valid tokens are left out.
template <class E>
void widen_packed_row(const WidenBounds& a, const char* row, std::int32_t tokens, std::int32_t d) {
  constexpr int kDims = kPairs<E> ? 2 : 1;
  Bound first = no_bound(), second = first;
  std::int32_t t = 0;
  for (; t + kW <= tokens; t += kW) {
    const Two v = packed_at<E>(row + t * kDims * E::kBytes);
    first.widen(v.a, v.a);
    second.widen(v.b, v.b);
  }
  if (t < tokens) {
    const Two v = packed_at<E>(row + t * kDims * E::kBytes);
    const Bound none = no_bound();
    first.widen(first_n(tokens - t, v.a, none.low), first_n(tokens - t, v.a, none.high));
    second.widen(first_n(tokens - t, v.b, none.low), first_n(tokens - t, v.b, none.high));
  }
  const F zero = set1(0.f);
  const F largest[4] = {sub(zero, first.low), first.high, sub(zero, second.low), second.high};
  alignas(64) float found[kMaxLanes];
  store(found, reduce_rows<Greater>(largest));
  for (int i = 0; i < kDims; ++i) {
    if (-found[2 * i] < a.low[d + i]) a.low[d + i] = -found[2 * i];
    if (found[2 * i + 1] > a.high[d + i]) a.high[d + i] = found[2 * i + 1];
  }
}

template <class E>
void widen_packed(const WidenBounds& a) {
  constexpr std::int32_t kDims = kPairs<E> ? 2 : 1;
  const std::int32_t block = a.page_size < kTokenBlock ? a.page_size : std::int32_t{kTokenBlock};
  for (std::int32_t first = 0; first < a.tokens; first += block) {
    const std::int32_t tokens = a.tokens - first < block ? a.tokens - first : block;
    const char* row = a.k + std::int64_t{first} * a.dim * E::kBytes;
    for (std::int32_t d = 0; d < a.dim; d += kDims, row += block * kDims * E::kBytes)
      widen_packed_row<E>(a, row, tokens, d);
  }
}

// Decoded numbers are z + s code, code from 0 to 15, rounded as there: so they rise with the code.
inline void widen_k4(const WidenBounds& a) {
  Channels z, step;
  get_channels(a.k, a.page_size, a.dim, z, step);
  for (std::int32_t d = 0; d < a.dim; d += kW) {
    Bound bound{load(a.low + d), load(a.high + d)};
    bound.widen(load(z.at + d), load(z.at + d) + load(step.at + d) * set1(15.f));
    store(a.low + d, bound.low);
    store(a.high + d, bound.high);
  }
}

template <class E>
void widen_elements(const WidenBounds& a) {
  return a.layout == LayoutId::kPacked ? widen_packed<E>(a) : widen_canonical<E>(a);
}

void widen_bounds(const WidenBounds& a) {
  switch (a.format) {
    case Format::kF32:
      return widen_elements<F32Elements>(a);
    case Format::kF16:
      return widen_elements<F16Elements>(a);
    case Format::kBf16:
      return widen_elements<Bf16Elements>(a);
    default:
      return widen_k4(a);
  }
}

constexpr int kScored = 4;  // queries that share a read of the bounds

// The largest of kScored queries' bounds. max(q low, q high) is q high where q is positive, else
// q low.
inline float score_bound(const float* const (&q)[kScored], const float* low, std::int32_t dim) {
  const float* high = low + dim;
  F sum[kScored];
#pragma GCC unroll 4
  for (int i = 0; i < kScored; ++i) sum[i] = set1(0.f);
  for (std::int32_t d = 0; d < dim; d += kW) {
    const F least = load(low + d), largest = load(high + d);
#pragma GCC unroll 4
    for (int i = 0; i < kScored; ++i) {
      const F x = load(q[i] + d), positive = vmax(x, set1(0.f));
      sum[i] = fma(positive, largest, fma(sub(x, positive), least, sum[i]));
    }
  }
  alignas(64) float found[kMaxLanes];
  store(found, reduce_rows<Plus>(sum));
  float top = found[0];
  for (int i = 1; i < kScored; ++i) top = found[i] > top ? found[i] : top;
  return top;
}

void score_bounds(const ScoreBounds& a) {
  const float* low = a.bounds;
  for (std::int64_t page = 0; page < a.pages; ++page)
    for (std::int32_t h = 0; h < a.num_kv_heads; ++h, low += 2 * a.dim) {
      float top = -__builtin_inff();
      if (low[0] <= low[a.dim])  // or there are no tokens
        for (std::int32_t i = 0; i < a.group; i += kScored) {
          const float* q[kScored];
          for (int j = 0; j < kScored; ++j) {  // behind the last one: itself again
            const std::int32_t head = h * a.group + (i + j < a.group ? i + j : a.group - 1);
            q[j] = a.q + std::int64_t{head} * a.dim;
          }
          const float score = a.scale * score_bound(q, low, a.dim);
          top = score > top ? score : top;
        }
      a.out[h * a.pages + page] = top;
    }
}

}  // namespace
}  // namespace kvcore::kernels::KVCORE_ISA_NS
