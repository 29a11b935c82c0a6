// The portable vector type: four floats in GCC/Clang vector extensions, which every target lowers
// to what its baseline has. No fused multiply-add, so that results agree between machines.
//
// All simd headers define the same names in their own namespace (the contract of the *_impl.h
// files):
//   F, kW (lanes), kVecs16 (vectors of 16 values), kMaxRows, kMaxTiles (register tile limits),
//   kBf16Pairs (is the A operand of bf16 a pair of bf16, or two floats), arithmetic, reductions in
//   a fixed order, exp2, loads and stores by element type, and F32Ops/F16Ops/Bf16Ops for
//   tile_impl.h.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels/simd/exp2.h"
#include "kernels/simd/float16.h"

namespace kvcore::kernels::KVCORE_ISA_NS {
namespace {

typedef float F __attribute__((vector_size(16)));
typedef std::int32_t I __attribute__((vector_size(16)));

constexpr int kW = 4;
constexpr int kVecs16 = 16 / kW;
constexpr int kMaxRows = 2;
constexpr int kMaxTiles = 1;
constexpr bool kBf16Pairs = false;

inline F set1(float x) { return F{x, x, x, x}; }
inline F load(const float* p) {
  F v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline void store(float* p, F v) { std::memcpy(p, &v, sizeof v); }
inline F add(F a, F b) { return a + b; }
inline F sub(F a, F b) { return a - b; }
inline F mul(F a, F b) { return a * b; }
inline F fma(F a, F b, F c) { return a * b + c; }
inline F bits(I x) { return reinterpret_cast<F>(x); }
inline I bits(F x) { return reinterpret_cast<I>(x); }
inline F pick(I mask, F a, F b) { return bits((mask & bits(a)) | (~mask & bits(b))); }
// b where either is NaN, like the x86 instruction.
inline F vmax(F a, F b) { return pick(a > b, a, b); }
inline F first_n(std::int32_t n, F a, F b) { return pick(I{0, 1, 2, 3} < I{n, n, n, n}, a, b); }
// The values of x in the first lanes, 0 behind.
template <int M>
inline F lanes(const float (&x)[M]) {
  F v{};
  for (int m = 0; m < M; ++m) v[m] = x[m];
  return v;
}
template <int M>
inline void store_first(float* p, F v) {
  for (int m = 0; m < M; ++m) p[m] = v[m];
}
inline F zero_for_lowest(F v) { return pick(v == set1(-__builtin_inff()), F{}, v); }  // -inf -> 0
inline float hmax(F v) {
  const float x = v[0] > v[2] ? v[0] : v[2], y = v[1] > v[3] ? v[1] : v[3];
  return x > y ? x : y;
}
inline float hsum(F v) { return (v[0] + v[2]) + (v[1] + v[3]); }

inline F exp2(F x) {
  x = vmax(set1(-126.f), x);
  const F magic = set1(0x1.8p23f);  // adding it rounds to an integer in the low bits
  const F shifted = x + magic;
  const F f = x - (shifted - magic);
  F p = set1(KVCORE_EXP2_C5);
  p = fma(p, f, set1(KVCORE_EXP2_C4));
  p = fma(p, f, set1(KVCORE_EXP2_C3));
  p = fma(p, f, set1(KVCORE_EXP2_C2));
  p = fma(p, f, set1(KVCORE_EXP2_C1));
  p = fma(p, f, set1(1.f));
  return p * bits((bits(shifted) + 127) << 23);
}

inline F load_f32(const void* p) { return load(static_cast<const float*>(p)); }
inline F load_bf16(const void* p) {
  std::uint16_t h[kW];
  std::memcpy(h, p, sizeof h);
  return bits(I{h[0], h[1], h[2], h[3]} << 16);
}
inline F load_f16(const void* p) {
  std::uint16_t h[kW];
  std::memcpy(h, p, sizeof h);
  const I u = I{h[0], h[1], h[2], h[3]};
  const I magnitude = (u & 0x7fff) << 13;
  const I special = (u & 0x7c00) == I{0x7c00, 0x7c00, 0x7c00, 0x7c00};
  const I finite = bits(bits(magnitude) * set1(0x1p112f));
  return bits((special & (magnitude | 0x7f800000)) | (~special & finite) | ((u & 0x8000) << 16));
}
inline void store_f32(void* p, F v) { store(static_cast<float*>(p), v); }
inline void store_bf16(void* p, F v) {
  std::uint16_t h[kW];
  for (int i = 0; i < kW; ++i) h[i] = float_to_bf16(v[i]);
  std::memcpy(p, h, sizeof h);
}
inline void store_f16(void* p, F v) {
  std::uint16_t h[kW];
  for (int i = 0; i < kW; ++i) h[i] = float_to_f16(v[i]);
  std::memcpy(p, h, sizeof h);
}

struct F32Ops {
  static constexpr int kParts = 1;  // multiply-adds per B row and lane
  static constexpr int kBytes = 4;  // of one lane of a B row
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
    I u;
    std::memcpy(&u, p, sizeof u);
    return i == 0 ? bits(u << 16) : bits(u & static_cast<std::int32_t>(0xffff0000u));
  }
};

}  // namespace
}  // namespace kvcore::kernels::KVCORE_ISA_NS
