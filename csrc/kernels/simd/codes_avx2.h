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

}  // namespace
}  // namespace kvcore::kernels::KVCORE_ISA_NS
