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

}  // namespace
}  // namespace kvcore::kernels::KVCORE_ISA_NS
