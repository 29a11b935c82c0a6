// Sixteen integers beside the floats of simd/avx512.h. Names: see simd/int_scalar.h.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace kvcore::kernels::KVCORE_ISA_NS {
namespace {

typedef std::int32_t Int __attribute__((vector_size(64), may_alias));

inline Int set1_int(std::int32_t x) { return (Int)_mm512_set1_epi32(x); }
inline Int max_int(Int a, Int b) { return (Int)_mm512_max_epi32((__m512i)a, (__m512i)b); }
inline Int min_int(Int a, Int b) { return (Int)_mm512_min_epi32((__m512i)a, (__m512i)b); }
inline Int plus_above(Int base, F a, F b) {
  const __m512i one = _mm512_set1_epi32(1);
  return (Int)_mm512_mask_add_epi32((__m512i)base, _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ),
                                    (__m512i)base, one);
}
inline F vmin(F a, F b) { return _mm512_min_ps(a, b); }
inline F vsqrt(F v) { return _mm512_sqrt_ps(v); }
inline F to_float(Int v) { return _mm512_cvtepi32_ps((__m512i)v); }
inline Int truncate(F v) { return (Int)_mm512_cvttps_epi32(v); }
inline Int round_int(F v) { return (Int)_mm512_cvtps_epi32(v); }

inline F nearest_f16(F v) {
  return _mm512_cvtph_ps(_mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline F up_f16(F v) {
  return _mm512_cvtph_ps(_mm512_cvtps_ph(v, _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC));
}

inline Int load_int(const void* p) { return (Int)_mm512_loadu_si512(p); }
inline void store_int(void* p, Int v) { _mm512_storeu_si512(p, (__m512i)v); }
inline Int load_u8(const void* p) {
  return (Int)_mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)));
}
inline Int load_s8(const void* p) {
  return (Int)_mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)));
}
inline Int load_u16(const void* p) {
  return (Int)_mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
}
inline void store_u8(void* p, Int v) {
  _mm_storeu_si128(static_cast<__m128i*>(p), _mm512_cvtepi32_epi8((__m512i)v));
}
inline void store_u16(void* p, Int v) {
  _mm256_storeu_si256(static_cast<__m256i*>(p), _mm512_cvtepi32_epi16((__m512i)v));
}

inline Int max_u16(Int a, Int b) { return (Int)_mm512_max_epu16((__m512i)a, (__m512i)b); }
inline Int join_bf16(F low, F high) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24,
                                         8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return (Int)_mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(high, low));
}

inline std::uint32_t third_bits(const std::uint8_t* bytes) {
  const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes));
  return static_cast<std::uint32_t>(_mm_movemask_epi8(_mm_slli_epi16(x, 5)));
}

struct Table16 {
  F table;
  explicit Table16(const float* t) : table(_mm512_loadu_ps(t)) {}
  F operator()(Int i) const { return _mm512_permutexvar_ps((__m512i)i, table); }
};

inline void transpose(F (&v)[kW]) {
  F a[16];
  for (int i = 0; i < 16; i += 2) {  // pairs of rows
    a[i] = _mm512_unpacklo_ps(v[i], v[i + 1]);
    a[i + 1] = _mm512_unpackhi_ps(v[i], v[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {  // fours: b[i + c] holds column c of each 128-bit lane
    v[i] = _mm512_shuffle_ps(a[i], a[i + 2], 0x44);
    v[i + 1] = _mm512_shuffle_ps(a[i], a[i + 2], 0xee);
    v[i + 2] = _mm512_shuffle_ps(a[i + 1], a[i + 3], 0x44);
    v[i + 3] = _mm512_shuffle_ps(a[i + 1], a[i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {  // lanes 0, 2 and 1, 3 of rows 0-7 and 8-15
    a[i] = _mm512_shuffle_f32x4(v[i], v[i + 4], 0x88);
    a[i + 4] = _mm512_shuffle_f32x4(v[i], v[i + 4], 0xdd);
    a[i + 8] = _mm512_shuffle_f32x4(v[i + 8], v[i + 12], 0x88);
    a[i + 12] = _mm512_shuffle_f32x4(v[i + 8], v[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    v[i] = _mm512_shuffle_f32x4(a[i], a[i + 8], 0x88);
    v[i + 8] = _mm512_shuffle_f32x4(a[i], a[i + 8], 0xdd);
    v[i + 4] = _mm512_shuffle_f32x4(a[i + 4], a[i + 12], 0x88);
    v[i + 12] = _mm512_shuffle_f32x4(a[i + 4], a[i + 12], 0xdd);
  }
}

}  // namespace
}  // namespace kvcore::kernels::KVCORE_ISA_NS
