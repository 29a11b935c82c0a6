// The row-wise operations for one instruction set; simd/<isa>.h gives F, kW and the loads and stores.
// Sums run in one order given by the row's length, so a row never depends on its neighbours.
#pragma once

#include "kernels/simd/elements.h"

namespace kvcore::kernels::KVCORE_ISA_NS {
namespace {

inline float inverse_rms(float sum, std::int64_t dim, float eps) {
  return 1.f / __builtin_sqrtf(sum / static_cast<float>(dim) + eps);
}

template <class E>
void norm_row(Row<E> x, Row<E> delta, Row<E> weight, Row<E> out, std::int64_t dim, float eps) {
  F sums[2] = {set1(0.f), set1(0.f)};
  for (std::int64_t i = 0, turn = 0; i < dim; i += kW, turn ^= 1) {
    F v = x.get(i, dim - i);
    if (delta.base != nullptr) {
      x.put(i, dim - i, add(v, delta.get(i, dim - i)));
      v = x.get(i, dim - i);  // as rounded: what a later layer will read
    }
    sums[turn] = fma(v, v, sums[turn]);
  }
  const F scale = set1(inverse_rms(hsum(add(sums[0], sums[1])), dim, eps));
  for (std::int64_t i = 0; i < dim; i += kW)
    out.put(i, dim - i, mul(mul(x.get(i, dim - i), scale), weight.get(i, dim - i)));
}

template <class E>
void norm_rows_of(const NormRows& a) {
  for (std::int64_t r = 0; r < a.rows; ++r) {
    const Row<E> delta = a.delta == nullptr ? Row<E>{nullptr} : row_at<E>(a.delta, r * a.dim);
    norm_row<E>(row_at<E>(a.x, r * a.x_stride), delta, row_at<E>(a.weight, 0),
                row_at<E>(a.out, r * a.dim), a.dim, a.eps);
  }
}

// Both halves of a head at once; `weight` may be null (no norm).
template <class E>
void rope_head(Row<E> x, Row<E> weight, const float* rotation, std::int64_t half, float eps) {
  F scale = set1(1.f);
  if (weight.base != nullptr) {
    F sum = set1(0.f);
    for (std::int64_t i = 0; i < half; i += kW) {
      const F a = x.get(i, half - i), b = x.get(half + i, half - i);
      sum = fma(b, b, fma(a, a, sum));
    }
    scale = set1(inverse_rms(hsum(sum), 2 * half, eps));
  }
  const Row<F32Elements> cos = row_at<F32Elements>(rotation, 0);
  const Row<F32Elements> sin = row_at<F32Elements>(rotation, half);
  for (std::int64_t i = 0; i < half; i += kW) {
    const std::int64_t n = half - i;
    F a = x.get(i, n), b = x.get(half + i, n);
    if (weight.base != nullptr) {
      a = mul(mul(a, scale), weight.get(i, n));
      b = mul(mul(b, scale), weight.get(half + i, n));
    }
    const F c = cos.get(i, n), s = sin.get(i, n);
    x.put(i, n, sub(mul(a, c), mul(b, s)));
    x.put(half + i, n, add(mul(b, c), mul(a, s)));
  }
}

template <class E>
void rope_rows_of(const RopeRows& a) {
  for (std::int64_t r = 0; r < a.rows; ++r) {
    const float* rotation = a.rotation + r * a.dim;
    for (std::int64_t h = 0; h < a.q_heads + a.k_heads; ++h) {
      const void* weight = h < a.q_heads ? a.q_weight : a.k_weight;
      rope_head<E>(row_at<E>(a.x, r * a.x_stride + h * a.dim),
                   weight == nullptr ? Row<E>{nullptr} : row_at<E>(weight, 0), rotation, a.dim / 2,
                   a.eps);
    }
  }
}

// g / (1 + e^-g); the exponent is bounded so that exp2 stays finite.
inline F silu(F g) {
  const F power = vmax(mul(g, set1(1.44269504088896340736f)), set1(-126.f));
  return g / add(set1(1.f), exp2(sub(set1(0.f), power)));
}

template <class E>
void silu_mul_rows_of(const SiluMulRows& a) {
  for (std::int64_t r = 0; r < a.rows; ++r) {
    const Row<E> gate = row_at<E>(a.gate_up, 2 * r * a.dim);
    const Row<E> up = row_at<E>(a.gate_up, (2 * r + 1) * a.dim), out = row_at<E>(a.out, r * a.dim);
    for (std::int64_t i = 0; i < a.dim; i += kW) {
      const std::int64_t n = a.dim - i;
      out.put(i, n, mul(silu(gate.get(i, n)), up.get(i, n)));
    }
  }
}

#define KVCORE_BY_DTYPE(function, args)                                 \
  switch ((args).dtype) {                                               \
    case DType::kF32: return function<F32Elements>(args);               \
    case DType::kF16: return function<F16Elements>(args);               \
    case DType::kBf16: return function<Bf16Elements>(args);             \
  }

void norm_rows(const NormRows& args) { KVCORE_BY_DTYPE(norm_rows_of, args) }
void rope_rows(const RopeRows& args) { KVCORE_BY_DTYPE(rope_rows_of, args) }
void silu_mul_rows(const SiluMulRows& args) { KVCORE_BY_DTYPE(silu_mul_rows_of, args) }

#undef KVCORE_BY_DTYPE

}  // namespace
}  // namespace kvcore::kernels::KVCORE_ISA_NS
