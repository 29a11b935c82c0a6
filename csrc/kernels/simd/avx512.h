// Sixteen floats of AVX-512 with BF16 dot products. Names: see simd/scalar.h.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>

#include "kernels/simd/exp2.h"

namespace kvcore::kernels::KVCORE_ISA_NS {
namespace {

using F = __m512;

constexpr int kW = 16;
constexpr int kVecs16 = 16 / kW;
constexpr int kMaxRows = 6;
constexpr int kMaxTiles = 4;
constexpr bool kBf16Pairs = true;

inline F set1(float x) { return _mm512_set1_ps(x); }
inline F load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, F v) { _mm512_storeu_ps(p, v); }
inline F add(F a, F b) { return _mm512_add_ps(a, b); }
inline F sub(F a, F b) { return _mm512_sub_ps(a, b); }
inline F mul(F a, F b) { return _mm512_mul_ps(a, b); }
inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
inline F vmax(F a, F b) { return _mm512_max_ps(a, b); }
inline F first_n(std::int32_t n, F a, F b) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return _mm512_mask_blend_ps(_mm512_cmplt_epi32_mask(lane, _mm512_set1_epi32(n)), b, a);
}
// The values of x in the first lanes, 0 behind.
template <int M>
inline F lanes(const float (&x)[M]) {
  const auto at = [&](int m) { return m < M ? x[m] : 0.f; };
  return _mm512_zextps256_ps512(
      _mm256_setr_ps(at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7)));
}
template <int M>
inline void store_first(float* p, F v) {
  _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1 << M) - 1), v);
}
inline F zero_for_lowest(F v) {  // -inf -> 0
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(v, set1(-__builtin_inff()), _CMP_EQ_OQ), v,
                              set1(0.f));
}
inline __m256 upper(F v) {
  return _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(v), 1));
}
inline float hmax(F v) {
  const __m256 y = _mm256_max_ps(_mm512_castps512_ps256(v), upper(v));
  __m128 x = _mm_max_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}
inline float hsum(F v) {
  const __m256 y = _mm256_add_ps(_mm512_castps512_ps256(v), upper(v));
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}

inline F exp2(F x) {
  x = _mm512_max_ps(set1(-200.f), x);  // 2^-200 rounds to 0; the clamp keeps -inf - -inf out
  const F n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const F f = _mm512_sub_ps(x, n);
  F p = set1(KVCORE_EXP2_C5);
  p = fma(p, f, set1(KVCORE_EXP2_C4));
  p = fma(p, f, set1(KVCORE_EXP2_C3));
  p = fma(p, f, set1(KVCORE_EXP2_C2));
  p = fma(p, f, set1(KVCORE_EXP2_C1));
  p = fma(p, f, set1(1.f));
  return _mm512_scalef_ps(p, n);
}

inline F load_f32(const void* p) { return _mm512_loadu_ps(p); }
inline F load_f16(const void* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
}
inline F load_bf16(const void* p) {
  const __m512i u = _mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(u, 16));
}
inline void store_f32(void* p, F v) { _mm512_storeu_ps(p, v); }
inline void store_f16(void* p, F v) {
  _mm256_storeu_si256(static_cast<__m256i*>(p),
                      _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline void store_bf16(void* p, F v) {
  _mm256_storeu_si256(static_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(v));
}

struct F32Ops {
  static constexpr int kParts = 1;
  static constexpr int kBytes = 4;
  static F part(const char* p, int) { return load_f32(p); }
};
struct F16Ops {
  static constexpr int kParts = 1;
  static constexpr int kBytes = 2;
  static F part(const char* p, int) { return load_f16(p); }
};
struct Bf16Ops {  // pairs: one dot product instruction does both values of a B row's lane
  using B = __m512i;
  static constexpr int kBytes = 4;
  static B pairs(const char* p) { return _mm512_loadu_si512(p); }
  static B first_of_pair(B b) { return _mm512_and_si512(b, _mm512_set1_epi32(0xffff)); }
  static F dot(F acc, B b, std::uint32_t a) {
    return _mm512_dpbf16_ps(acc, (__m512bh)b, (__m512bh)_mm512_set1_epi32(static_cast<int>(a)));
  }
};

}  // namespace
}  // namespace kvcore::kernels::KVCORE_ISA_NS
