// The inner loop over codes: what tile_impl.h does for numbers. c[M rows][lanes] = sum over rows of
// b of a code times an integer of the row, exact, then turned into floats once. K: lanes are
// tokens, the row's integers its query. V: lanes are dims, the row's integers its probabilities.
#pragma once

#include "kernels/attention/tile_impl.h"

namespace kvcore::kernels::KVCORE_ISA_NS {
namespace {

struct CodeTile {
  const char* a;          // Ops::kParts dwords of integers for each b row
  std::int64_t a_stride;  // bytes between rows
  const char* b;
  std::int64_t b_stride;   // bytes between b rows
  std::int64_t high_bits;  // v3: bytes from b to the bits of its dims
  std::int64_t k;          // b rows
  float* c;
  std::int64_t c_stride;     // floats between rows
  const std::int32_t* bias;  // [M] K: what the sums start with
  const float* factor;       // [M] of the sums
  const float* offset;       // [M] K: added to each score
  const char* token_scale;   // K of int8: f16, one a lane
  const float* alpha;        // [M] V: factors of the old c
  std::int64_t ahead;        // as in TileArgs
  const char* side;
  std::int64_t side_step;
};

using CodeTileFn = void (*)(const CodeTile&);

inline Int repeat(const char* dword) {
  std::int32_t x;
  __builtin_memcpy(&x, dword, sizeof x);
  return set1_int(x);
}

// What a format's lanes hold: kParts integer operands for each dword of codes. 16 lanes of a row of
// b take kLines2 half cache lines.
struct Int8KCodes {
  static constexpr int kParts = 2;
  static constexpr int kLines2 = 2;
  static constexpr bool kIsK = true, kTokenScale = true;
  Int at[kParts];
  void take(const CodeTile&, const char* b, int) {
    const Int x = load_int(b);
    at[0] = x & 0x00ff00ff;
    at[1] = odd_bytes(x);
  }
  static Int dot(Int acc, Int code, Int q) { return dot_halves(acc, code, q); }
};
struct K4Codes {
  static constexpr int kParts = 2;
  static constexpr int kLines2 = 2;
  static constexpr bool kIsK = true, kTokenScale = false;
  Int at[kParts];
  void take(const CodeTile&, const char* b, int) {
    const Int x = load_int(b);
    at[0] = low_nibbles(x);
    at[1] = high_nibbles(x);
  }
  static Int dot(Int acc, Int code, Int q) { return dot_bytes(acc, code, q); }
};
struct Int8VCodes {
  static constexpr int kParts = 1;
  static constexpr int kLines2 = 2;
  static constexpr bool kIsK = false, kTokenScale = false;
  Int at[kParts];
  void take(const CodeTile&, const char* b, int) { at[0] = load_int(b); }
  static Int dot(Int acc, Int level, Int p) { return dot_bytes(acc, p, level); }
};

struct alignas(16) ByteLevels {
  char at[16];
};
constexpr ByteLevels v4_levels() {
  ByteLevels l{};
  for (int i = 0; i < 8; ++i) {
    l.at[8 + i] = static_cast<char>(kV4Levels[i]);
    l.at[7 - i] = static_cast<char>(-kV4Levels[i]);
  }
  return l;
}
// Two codes' low bits lie in a nibble. Levels of the lower or the upper one, for a high bit of
// 0 (negative) or 1.
constexpr ByteLevels v3_levels(bool upper, bool high) {
  ByteLevels l{};
  for (int i = 0; i < 16; ++i) {
    const int low = upper ? i >> 2 : i & 3;
    l.at[i] = static_cast<char>(high ? kV3Levels[low] : -kV3Levels[3 - low]);
  }
  return l;
}
constexpr ByteLevels kV4Table = v4_levels();
constexpr ByteLevels kV3Tables[2][2] = {{v3_levels(false, false), v3_levels(false, true)},
                                        {v3_levels(true, false), v3_levels(true, true)}};

struct V4Codes {
  static constexpr int kParts = 2;
  static constexpr int kLines2 = 2;
  static constexpr bool kIsK = false, kTokenScale = false;
  Int at[kParts];
  void take(const CodeTile&, const char* b, int) {
    const Int x = load_int(b);
    const auto table = byte_table(kV4Table.at);
    at[0] = look_up(table, low_nibbles(x));
    at[1] = look_up(table, high_nibbles(x));
  }
  static Int dot(Int acc, Int level, Int p) { return dot_bytes(acc, p, level); }
};
struct V3Codes {
  static constexpr int kParts = 4;
  static constexpr int kLines2 = 3;
  static constexpr bool kIsK = false, kTokenScale = false;
  Int at[kParts];
  void take(const CodeTile& t, const char* b, int vec) {
    const Int x = load_int(b);
    const Int nibbles[2] = {low_nibbles(x), high_nibbles(x)};
    // b is the tile's row plus this vector's lanes.
    const char* bits =
        b - vec * kW * 4 + t.high_bits + vec / kVecs16 * 32 + vec % kVecs16 * (kW / 2);
#pragma GCC unroll 4
    for (int j = 0; j < kParts; ++j)
      at[j] = look_up(byte_table(kV3Tables[j % 2][0].at), byte_table(kV3Tables[j % 2][1].at),
                      nibbles[j / 2], bits + 8 * j);
  }
  static Int dot(Int acc, Int level, Int p) { return dot_bytes(acc, p, level); }
};

// acc[m][vector] = bias + sum over the b rows, in lanes from t.b on.
template <class Codes, int M, int N>
[[gnu::always_inline]] inline void sum_codes(const CodeTile& t, Int (&acc)[M][N]) {
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) acc[m][j] = Codes::kIsK ? set1_int(t.bias[m]) : set1_int(0);
  const char *a = t.a, *b = t.b;
  for (std::int64_t k = 0; k < t.k; ++k, a += 4 * Codes::kParts, b += t.b_stride) {
    if (t.ahead != 0)
#pragma GCC unroll 6
      for (int i = 0; i < N / kVecs16 * Codes::kLines2 / 2; ++i)
        __builtin_prefetch(b + t.ahead + 64 * i, 0, 2);  // into L2
    if (t.side != nullptr)
      for (std::int64_t i = 0; i < t.side_step; i += 64)
        __builtin_prefetch(t.side + k * t.side_step + i);
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) {
      Codes codes;
      codes.take(t, b + j * kW * 4, j);
#pragma GCC unroll 4
      for (int i = 0; i < Codes::kParts; ++i)
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m)
          acc[m][j] = Codes::dot(acc[m][j], codes.at[i], repeat(a + m * t.a_stride + 4 * i));
    }
  }
}

// The scores of row m that vector j's sums stand for.
template <class Codes>
inline F scores_of_sums(const CodeTile& t, Int sums, int m, int j) {
  F sum = to_float(sums);
  if constexpr (Codes::kTokenScale) sum = mul(sum, load_f16(t.token_scale + 2 * j * kW));
  return fma(sum, set1(t.factor[m]), set1(t.offset[m]));
}

template <class Codes, int M, int T>
[[gnu::always_inline]] inline void code_tile_here(const CodeTile& t) {
  constexpr int N = T * kVecs16;
  Int acc[M][N];
  sum_codes<Codes>(t, acc);
#pragma GCC unroll 8
  for (int j = 0; j < N; ++j)
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      float* c = t.c + m * t.c_stride + j * kW;
      if constexpr (Codes::kIsK)
        store(c, scores_of_sums<Codes>(t, acc[m][j], m, j));
      else
        store(c, fma(to_float(acc[m][j]), set1(t.factor[m]), mul(load(c), set1(t.alpha[m]))));
    }
}

template <class Codes, int M, int T>
void code_tile(const CodeTile& t) {
  code_tile_here<Codes, M, T>(t);
}

// Moves on by `tiles` groups of 16 lanes.
inline void advance(CodeTile& t, int tiles) {
  t.b += 64 * tiles;
  t.high_bits -= 64 * tiles - 32 * tiles;
  t.c += 16 * tiles;
  t.token_scale += 32 * tiles;
  t.side = nullptr;
}

// The same over 64 lanes, in a function that knows the shape.
template <class Codes, int M>
[[gnu::always_inline]] inline void code_tiles_here(CodeTile t) {
  for (int i = 0; i < 4; i += kMaxTiles, advance(t, kMaxTiles))
    code_tile_here<Codes, M, kMaxTiles>(t);
}

template <class Codes, int M>
constexpr CodeTileFn code_tile_of(int tiles) {
  if constexpr (kMaxTiles == 4) {
    constexpr CodeTileFn fns[] = {code_tile<Codes, M, 1>, code_tile<Codes, M, 2>,
                                  code_tile<Codes, M, 3>, code_tile<Codes, M, 4>};
    return fns[tiles - 1];
  } else {
    return code_tile<Codes, M, 1>;
  }
}

template <class Codes>
CodeTileFn code_tile_of(int rows, int tiles) {
  if constexpr (kMaxRows == 6) {
    switch (rows) {
      case 3:
        return code_tile_of<Codes, 3>(tiles);
      case 4:
        return code_tile_of<Codes, 4>(tiles);
      case 5:
        return code_tile_of<Codes, 5>(tiles);
      case 6:
        return code_tile_of<Codes, 6>(tiles);
      default:
        break;
    }
  }
  return rows == 1 ? code_tile_of<Codes, 1>(tiles) : code_tile_of<Codes, 2>(tiles);
}

// Covers lanes16 groups of 16 lanes with the widest tiles.
template <class Codes>
void run_code_tiles(int rows, int lanes16, CodeTile t) {
  while (lanes16 > 0) {
    const int n = lanes16 < kMaxTiles ? lanes16 : kMaxTiles;
    code_tile_of<Codes>(rows, n)(t);
    advance(t, n);
    lanes16 -= n;
  }
}

}  // namespace
}  // namespace kvcore::kernels::KVCORE_ISA_NS
