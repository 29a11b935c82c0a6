// Products of small integers beside simd/int_avx512.h (VNNI). Names: see simd/codes_scalar.h.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace kvcore::kernels::KVCORE_ISA_NS {
namespace {

constexpr std::int32_t kTopByte = 255;

inline Int dot_bytes(Int acc, Int a, Int b) {
  return (Int)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)a, (__m512i)b);
}
inline Int dot_halves(Int acc, Int a, Int b) {
  return (Int)_mm512_dpwssd_epi32((__m512i)acc, (__m512i)a, (__m512i)b);
}
inline Int odd_bytes(Int v) { return (Int)_mm512_srli_epi16((__m512i)v, 8); }
inline Int high_nibbles(Int v) {
  return (Int)_mm512_and_si512(_mm512_srli_epi16((__m512i)v, 4), _mm512_set1_epi8(15));
}
inline Int low_nibbles(Int v) { return (Int)_mm512_and_si512((__m512i)v, _mm512_set1_epi8(15)); }
inline Int byte_table(const char* table) {
  return (Int)_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
}
inline Int look_up(Int table, Int i) {
  return (Int)_mm512_shuffle_epi8((__m512i)table, (__m512i)i);
}
inline Int look_up(Int table, Int other, Int i, const char* bits) {
  std::uint64_t mask;
  __builtin_memcpy(&mask, bits, sizeof mask);
  return (Int)_mm512_mask_shuffle_epi8(_mm512_shuffle_epi8((__m512i)table, (__m512i)i), mask,
                                       (__m512i)other, (__m512i)i);
}
// v with neighbours at `distance` lanes exchanged, a power of two below kW.
template <int kDistance>
inline F exchange(F v) {
  if constexpr (kDistance == 1) return _mm512_permute_ps(v, 0xb1);
  if constexpr (kDistance == 2) return _mm512_permute_ps(v, 0x4e);
  if constexpr (kDistance == 4) return _mm512_shuffle_f32x4(v, v, 0xb1);
  return _mm512_shuffle_f32x4(v, v, 0x4e);
}

inline float f16_at(const char* p) {
  std::uint16_t h;
  __builtin_memcpy(&h, p, sizeof h);
  return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(h)));
}
template <bool kSigned>
inline void store_bytes(char* p, const Int (&v)[4]) {
  const __m512i low = _mm512_packs_epi32((__m512i)v[0], (__m512i)v[1]);
  const __m512i high = _mm512_packs_epi32((__m512i)v[2], (__m512i)v[3]);
  const __m512i all = kSigned ? _mm512_packs_epi16(low, high) : _mm512_packus_epi16(low, high);
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  _mm512_storeu_si512(p, _mm512_permutexvar_epi32(order, all));
}

struct Plus {
  static F of(F a, F b) { return _mm512_add_ps(a, b); }
  static __m256 of(__m256 a, __m256 b) { return _mm256_add_ps(a, b); }
  static __m128 of(__m128 a, __m128 b) { return _mm_add_ps(a, b); }
};
struct Greater {
  static F of(F a, F b) { return _mm512_max_ps(a, b); }
  static __m256 of(__m256 a, __m256 b) { return _mm256_max_ps(a, b); }
  static __m128 of(__m128 a, __m128 b) { return _mm_max_ps(a, b); }
};
// Four vectors at once: the order inside each does not depend on the others.
template <class Op>
inline __m128 reduce4(F a, F b, F c, F d) {
  const F ab = Op::of(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const F cd = Op::of(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  const __m512d x = _mm512_castps_pd(ab), y = _mm512_castps_pd(cd);
  const F all = Op::of(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)),
                       _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
  const __m256 half = Op::of(_mm512_castps512_ps256(all), upper(all));
  return Op::of(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}
template <class Op, int M>
inline F reduce_rows(const F (&v)[M]) {
  const auto at = [&](int m) { return v[m < M ? m : 0]; };
  const __m128 first = reduce4<Op>(v[0], at(1), at(2), at(3));
  if constexpr (M <= 4) {
    return _mm512_zextps128_ps512(first);
  } else {
    const __m128 second = reduce4<Op>(v[4], at(5), at(4), at(4));
    return _mm512_zextps256_ps512(_mm256_set_m128(second, first));
  }
}
}  // namespace
}  // namespace kvcore::kernels::KVCORE_ISA_NS
