// Products of small integers, exact at every level. All codes_<isa>.h define:
//
//   kTopByte      the largest left operand of dot_bytes
//   dot_bytes     per lane: acc + sum of four products of an unsigned byte of a and a signed one of b
//   dot_halves    per lane: acc + sum of two products of signed 16-bit halves
//   odd_bytes     bytes 1 and 3 of each lane as halves
//   low_nibbles, high_nibbles   of each byte
//   byte_table    16 bytes for look_up, whose indices are bytes 0 to 15; with two tables, bytes
//                 whose bit is set in `bits` (one a byte of the vector) come from the other
//   exchange      neighbours at a distance of lanes change places
//   store_bytes   the low bytes of four vectors, one behind the other; their lanes fit a byte
//   reduce_rows   lane m = sum (Plus) or maximum (Greater) of the lanes of v[m], in an order that
//                 depends on neither m nor M; other lanes may hold anything
//   f16_at        one f16 as a float
#pragma once

#include <cstdint>
#include <cstring>

namespace kvcore::kernels::KVCORE_ISA_NS {
namespace {

constexpr std::int32_t kTopByte = 255;

inline Int dot_bytes(Int acc, Int a, Int b) {
  for (int i = 0; i < 4; ++i) acc += ((a >> (8 * i)) & 255) * ((b << (24 - 8 * i)) >> 24);
  return acc;
}
inline Int dot_halves(Int acc, Int a, Int b) {
  return acc + ((a << 16) >> 16) * ((b << 16) >> 16) + (a >> 16) * (b >> 16);
}
inline Int odd_bytes(Int v) { return (v >> 8) & 0x00ff00ff; }
inline Int high_nibbles(Int v) { return (v >> 4) & 0x0f0f0f0f; }
inline Int low_nibbles(Int v) { return v & 0x0f0f0f0f; }

struct ByteTable {
  const char* at;
};
inline ByteTable byte_table(const char* table) { return {table}; }
inline Int look_up(ByteTable table, Int i) {
  unsigned char at[16];
  std::memcpy(at, &i, sizeof at);
  char out[16];
  for (int k = 0; k < 16; ++k) out[k] = table.at[at[k]];
  return load_int(out);
}
inline Int look_up(ByteTable table, ByteTable other, Int i, const char* bits) {
  unsigned char at[16];
  std::memcpy(at, &i, sizeof at);
  char out[16];
  for (int k = 0; k < 16; ++k)
    out[k] = (bits[k / 8] >> (k % 8) & 1) != 0 ? other.at[at[k]] : table.at[at[k]];
  return load_int(out);
}
template <int kDistance>
inline F exchange(F v) {
  return kDistance == 1 ? F{v[1], v[0], v[3], v[2]} : F{v[2], v[3], v[0], v[1]};
}

inline float f16_at(const char* p) {
  std::uint16_t h;
  std::memcpy(&h, p, sizeof h);
  return f16_to_float(h);
}
template <bool kSigned>
inline void store_bytes(char* p, const Int (&v)[4]) {
  for (int i = 0; i < 4; ++i) store_u8(p + i * kW, v[i]);
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
