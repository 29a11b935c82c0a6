// Integers beside the four floats of simd/scalar.h. All simd/int_*.h define the same names:
//   Int (as many 32-bit integers as F has floats), conversions that round to nearest even, rounding
//   to f16, loads and stores of bytes and halves, table look-up, transposition of kW vectors.
// Arithmetic, shifts and comparisons (0 or -1 per lane) come with the compiler's vector types.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/simd/float16.h"

namespace kvcore::kernels::KVCORE_ISA_NS {
namespace {

using Int = I;

inline Int set1_int(std::int32_t x) { return Int{x, x, x, x}; }
inline Int max_int(Int a, Int b) { return ((a > b) & a) | ((a <= b) & b); }
inline Int min_int(Int a, Int b) { return ((a < b) & a) | ((a >= b) & b); }
inline Int plus_above(Int base, F a, F b) { return base - (a > b); }  // one more where a > b
inline F vmin(F a, F b) { return pick(a < b, a, b); }
inline F vsqrt(F v) {
  F r;
  for (int i = 0; i < kW; ++i) r[i] = __builtin_sqrtf(v[i]);
  return r;
}
inline F to_float(Int v) { return __builtin_convertvector(v, F); }
inline Int truncate(F v) { return __builtin_convertvector(v, Int); }
inline Int round_int(F v) {  // |v| < 2^22
  const F magic = set1(0x1.8p23f);
  return bits(v + magic) - bits(magic);
}

inline F nearest_f16(F v) {
  F r;
  for (int i = 0; i < kW; ++i) r[i] = f16_to_float(float_to_f16(v[i]));
  return r;
}
inline F up_f16(F v) {  // of numbers from 0 to 65504
  F r;
  for (int i = 0; i < kW; ++i) {
    const std::uint16_t near = float_to_f16(v[i]);
    const int below = f16_to_float(near) < v[i];
    r[i] = f16_to_float(static_cast<std::uint16_t>(near + below));
  }
  return r;
}

inline Int load_int(const void* p) {
  Int v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline void store_int(void* p, Int v) { std::memcpy(p, &v, sizeof v); }
inline Int load_u8(const void* p) {
  std::uint8_t x[kW];
  std::memcpy(x, p, sizeof x);
  return Int{x[0], x[1], x[2], x[3]};
}
inline Int load_s8(const void* p) { return (load_u8(p) << 24) >> 24; }
inline Int load_u16(const void* p) {
  std::uint16_t x[kW];
  std::memcpy(x, p, sizeof x);
  return Int{x[0], x[1], x[2], x[3]};
}
inline void store_u8(void* p, Int v) {
  std::uint8_t x[kW];
  for (int i = 0; i < kW; ++i) x[i] = static_cast<std::uint8_t>(v[i]);
  std::memcpy(p, x, sizeof x);
}
inline void store_u16(void* p, Int v) {
  std::uint16_t x[kW];
  for (int i = 0; i < kW; ++i) x[i] = static_cast<std::uint16_t>(v[i]);
  std::memcpy(p, x, sizeof x);
}

inline Int max_u16(Int a, Int b) {  // of the halves of each lane, unsigned
  std::uint16_t x[2 * kW], y[2 * kW];
  std::memcpy(x, &a, sizeof x);
  std::memcpy(y, &b, sizeof y);
  for (int i = 0; i < 2 * kW; ++i) x[i] = x[i] > y[i] ? x[i] : y[i];
  return load_int(x);
}
// Both rounded to bf16, `low` in the low half of each lane; numbers below 2^-126 may become 0.
inline Int join_bf16(F low, F high) {
  const Int a = bits(low), b = bits(high);
  const Int x = a + 0x7fff + ((a >> 16) & 1), y = b + 0x7fff + ((b >> 16) & 1);
  return ((x >> 16) & 0xffff) | (y & static_cast<std::int32_t>(0xffff0000u));
}

// Bit i = bit 2 of byte i, of 16 bytes.
inline std::uint32_t third_bits(const std::uint8_t* bytes) {
  std::uint64_t x[2];
  std::memcpy(x, bytes, 16);
  for (std::uint64_t& half : x)
    half = ((half >> 2 & 0x0101010101010101u) * 0x0102040810204080u) >> 56;
  return static_cast<std::uint32_t>(x[0] | x[1] << 8);
}

// table[i] for i in 0..15.
struct Table16 {
  const float* at;
  explicit Table16(const float* table) : at(table) {}
  F operator()(Int i) const { return F{at[i[0]], at[i[1]], at[i[2]], at[i[3]]}; }
};

inline void transpose(F (&v)[kW]) {
  for (int i = 0; i < kW; ++i)
    for (int j = 0; j < i; ++j) {
      const float x = v[i][j];
      v[i][j] = v[j][i];
      v[j][i] = x;
    }
}

}  // namespace
}  // namespace kvcore::kernels::KVCORE_ISA_NS
