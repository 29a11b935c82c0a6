// Eight integers beside the floats of simd/avx2.h. Names: see simd/int_scalar.h.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace kvcore::kernels::KVCORE_ISA_NS {
namespace {

typedef std::int32_t Int __attribute__((vector_size(32), may_alias));

inline Int set1_int(std::int32_t x) { return (Int)_mm256_set1_epi32(x); }
inline Int max_int(Int a, Int b) { return (Int)_mm256_max_epi32((__m256i)a, (__m256i)b); }
inline Int min_int(Int a, Int b) { return (Int)_mm256_min_epi32((__m256i)a, (__m256i)b); }
inline Int plus_above(Int base, F a, F b) { return base - (Int)(a > b); }
inline F vmin(F a, F b) { return _mm256_min_ps(a, b); }
inline F vsqrt(F v) { return _mm256_sqrt_ps(v); }
inline F to_float(Int v) { return _mm256_cvtepi32_ps((__m256i)v); }
inline Int truncate(F v) { return (Int)_mm256_cvttps_epi32(v); }
inline Int round_int(F v) { return (Int)_mm256_cvtps_epi32(v); }

inline F nearest_f16(F v) {
  return _mm256_cvtph_ps(_mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline F up_f16(F v) {
  return _mm256_cvtph_ps(_mm256_cvtps_ph(v, _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC));
}

inline Int load_int(const void* p) {
  return (Int)_mm256_loadu_si256(static_cast<const __m256i*>(p));
}
inline void store_int(void* p, Int v) { _mm256_storeu_si256(static_cast<__m256i*>(p), (__m256i)v); }
inline Int load_u8(const void* p) { return (Int)_mm256_cvtepu8_epi32(_mm_loadu_si64(p)); }
inline Int load_s8(const void* p) { return (Int)_mm256_cvtepi8_epi32(_mm_loadu_si64(p)); }
inline Int load_u16(const void* p) {
  return (Int)_mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)));
}
// The low byte of each lane, eight bytes.
inline __m128i low_bytes(Int v) {
  const __m256i pick =
      _mm256_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 0, 4, 8, 12, -1,
                       -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
  const __m256i x = _mm256_shuffle_epi8((__m256i)v, pick);
  return _mm_unpacklo_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
}
inline void store_u8(void* p, Int v) { _mm_storeu_si64(p, low_bytes(v)); }
inline void store_u16(void* p, Int v) {
  const __m256i x = _mm256_and_si256((__m256i)v, _mm256_set1_epi32(0xffff));
  _mm_storeu_si128(static_cast<__m128i*>(p),
                   _mm_packus_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1)));
}

inline Int max_u16(Int a, Int b) { return (Int)_mm256_max_epu16((__m256i)a, (__m256i)b); }
inline Int join_bf16(F low, F high) {
  const Int a = (Int)low, b = (Int)high;
  const Int x = a + 0x7fff + ((a >> 16) & 1), y = b + 0x7fff + ((b >> 16) & 1);
  return (Int)_mm256_blend_epi16(_mm256_srli_epi32((__m256i)x, 16), (__m256i)y, 0xaa);
}

inline std::uint32_t third_bits(const std::uint8_t* bytes) {
  const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes));
  return static_cast<std::uint32_t>(_mm_movemask_epi8(_mm_slli_epi16(x, 5)));
}

struct Table16 {
  F low, high;
  explicit Table16(const float* table)
      : low(_mm256_loadu_ps(table)), high(_mm256_loadu_ps(table + 8)) {}
  F operator()(Int i) const {
    const F a = _mm256_permutevar8x32_ps(low, (__m256i)i);
    const F b = _mm256_permutevar8x32_ps(high, (__m256i)i);
    return _mm256_blendv_ps(a, b, _mm256_castsi256_ps((__m256i)(i << 28)));
  }
};

inline void transpose(F (&v)[kW]) {
  F a[8], b[8];
  for (int i = 0; i < 4; ++i) {
    a[2 * i] = _mm256_unpacklo_ps(v[2 * i], v[2 * i + 1]);
    a[2 * i + 1] = _mm256_unpackhi_ps(v[2 * i], v[2 * i + 1]);
  }
  for (int i = 0; i < 2; ++i) {
    b[4 * i] = _mm256_shuffle_ps(a[4 * i], a[4 * i + 2], 0x44);
    b[4 * i + 1] = _mm256_shuffle_ps(a[4 * i], a[4 * i + 2], 0xee);
    b[4 * i + 2] = _mm256_shuffle_ps(a[4 * i + 1], a[4 * i + 3], 0x44);
    b[4 * i + 3] = _mm256_shuffle_ps(a[4 * i + 1], a[4 * i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    v[i] = _mm256_permute2f128_ps(b[i], b[i + 4], 0x20);
    v[i + 4] = _mm256_permute2f128_ps(b[i], b[i + 4], 0x31);
  }
}

}  // namespace
}  // namespace kvcore::kernels::KVCORE_ISA_NS
