// Eight floats of AVX2 with FMA and F16C. Names: see simd/scalar.h.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>

#include "kernels/simd/exp2.h"

namespace kvcore::kernels::KVCORE_ISA_NS {
namespace {

using F = __m256;

constexpr int kW = 8;
constexpr int kVecs16 = 16 / kW;
constexpr int kMaxRows = 6;
constexpr int kMaxTiles = 1;
constexpr bool kBf16Pairs = false;

inline F set1(float x) { return _mm256_set1_ps(x); }
inline F load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, F v) { _mm256_storeu_ps(p, v); }
inline F add(F a, F b) { return _mm256_add_ps(a, b); }
inline F sub(F a, F b) { return _mm256_sub_ps(a, b); }
inline F mul(F a, F b) { return _mm256_mul_ps(a, b); }
inline F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
inline F vmax(F a, F b) { return _mm256_max_ps(a, b); }
inline F first_n(std::int32_t n, F a, F b) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_blendv_ps(b, a,
                          _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(n), lane)));
}
// The values of x in the first lanes, 0 behind.
template <int M>
inline F lanes(const float (&x)[M]) {
  const auto at = [&](int m) { return m < M ? x[m] : 0.f; };
  return _mm256_setr_ps(at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7));
}
template <int M>
inline void store_first(float* p, F v) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  _mm256_maskstore_ps(p, _mm256_cmpgt_epi32(_mm256_set1_epi32(M), lane), v);
}
inline F zero_for_lowest(F v) {  // -inf -> 0
  return _mm256_andnot_ps(_mm256_cmp_ps(v, set1(-__builtin_inff()), _CMP_EQ_OQ), v);
}
inline float hmax(F v) {
  __m128 x = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}
inline float hsum(F v) {
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}

inline F exp2(F x) {
  x = _mm256_max_ps(_mm256_set1_ps(-126.f), x);
  const F n = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const F f = _mm256_sub_ps(x, n);
  F p = set1(KVCORE_EXP2_C5);
  p = fma(p, f, set1(KVCORE_EXP2_C4));
  p = fma(p, f, set1(KVCORE_EXP2_C3));
  p = fma(p, f, set1(KVCORE_EXP2_C2));
  p = fma(p, f, set1(KVCORE_EXP2_C1));
  p = fma(p, f, set1(1.f));
  const __m256i e = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return mul(p, _mm256_castsi256_ps(_mm256_slli_epi32(e, 23)));
}

inline F load_f32(const void* p) { return _mm256_loadu_ps(static_cast<const float*>(p)); }
inline F load_f16(const void* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(p)));
}
inline F load_bf16(const void* p) {
  const __m256i u = _mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(u, 16));
}
inline void store_f32(void* p, F v) { _mm256_storeu_ps(static_cast<float*>(p), v); }
inline void store_f16(void* p, F v) {
  _mm_storeu_si128(static_cast<__m128i*>(p),
                   _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline void store_bf16(void* p, F v) {
  const __m256i u = _mm256_castps_si256(v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  const __m256i bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
  const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(u, bias), 16);
  const __m256i quiet = _mm256_or_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(0x40));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  const __m256i r = _mm256_blendv_epi8(rounded, quiet, nan);
  _mm_storeu_si128(static_cast<__m128i*>(p),
                   _mm_packus_epi32(_mm256_castsi256_si128(r), _mm256_extracti128_si256(r, 1)));
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
struct Bf16Ops {
  static constexpr int kParts = 2;
  static constexpr int kBytes = 4;
  static F part(const char* p, int i) {
    const __m256i u = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm256_castsi256_ps(
        i == 0 ? _mm256_slli_epi32(u, 16)
               : _mm256_and_si256(u, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
  }
};

}  // namespace
}  // namespace kvcore::kernels::KVCORE_ISA_NS
