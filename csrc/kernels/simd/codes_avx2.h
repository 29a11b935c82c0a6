// Products of small integers beside simd/int_avx2.h. Names: see simd/codes_scalar.h.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace kvcore::kernels::KVCORE_ISA_NS {
namespace {

constexpr std::int32_t kTopByte = 127;  // two products have to fit 16 bits

inline Int dot_bytes(Int acc, Int a, Int b) {
  const __m256i pairs = _mm256_maddubs_epi16((__m256i)a, (__m256i)b);
  return acc + (Int)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}
inline Int dot_halves(Int acc, Int a, Int b) {
  return acc + (Int)_mm256_madd_epi16((__m256i)a, (__m256i)b);
}
inline Int odd_bytes(Int v) { return (Int)_mm256_srli_epi16((__m256i)v, 8); }
inline Int high_nibbles(Int v) {
  return (Int)_mm256_and_si256(_mm256_srli_epi16((__m256i)v, 4), _mm256_set1_epi8(15));
}
inline Int low_nibbles(Int v) { return (Int)_mm256_and_si256((__m256i)v, _mm256_set1_epi8(15)); }
inline Int byte_table(const char* table) {
  return (Int)_mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
}
inline Int look_up(Int table, Int i) {
  return (Int)_mm256_shuffle_epi8((__m256i)table, (__m256i)i);
}
inline Int look_up(Int table, Int other, Int i, const char* bits) {
  std::int32_t mask;
  __builtin_memcpy(&mask, bits, sizeof mask);
  // Byte k of the vector: bit k % 8 of byte k / 8 of the mask.
  const __m256i spread = _mm256_shuffle_epi8(
      _mm256_set1_epi32(mask),
      _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303));
  const __m256i bit = _mm256_set1_epi64x(static_cast<long long>(0x8040201008040201u));
  const __m256i set = _mm256_cmpeq_epi8(_mm256_and_si256(spread, bit), bit);
  return (Int)_mm256_blendv_epi8(_mm256_shuffle_epi8((__m256i)table, (__m256i)i),
                                 _mm256_shuffle_epi8((__m256i)other, (__m256i)i), set);
}
template <int kDistance>
inline F exchange(F v) {
  if constexpr (kDistance == 1) return _mm256_permute_ps(v, 0xb1);
  if constexpr (kDistance == 2) return _mm256_permute_ps(v, 0x4e);
  return _mm256_permute2f128_ps(v, v, 1);
}

inline float f16_at(const char* p) {
  std::uint16_t h;
  __builtin_memcpy(&h, p, sizeof h);
  return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(h)));
}
template <bool kSigned>
inline void store_bytes(char* p, const Int (&v)[4]) {
  const __m256i low = _mm256_packs_epi32((__m256i)v[0], (__m256i)v[1]);
  const __m256i high = _mm256_packs_epi32((__m256i)v[2], (__m256i)v[3]);
  const __m256i all = kSigned ? _mm256_packs_epi16(low, high) : _mm256_packus_epi16(low, high);
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permutevar8x32_epi32(all, order));
}

struct Plus {
  static float of(F v) { return hsum(v); }
};
struct Greater {
  static float of(F v) { return hmax(v); }
};
template <class Op, int M>
inline F reduce_rows(const F (&v)[M]) {
  float x[M];
  for (int m = 0; m < M; ++m) x[m] = Op::of(v[m]);
  return lanes(x);
}
}  // namespace
}  // namespace kvcore::kernels::KVCORE_ISA_NS
