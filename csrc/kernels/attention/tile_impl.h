// The one inner loop of attention: c[M rows][16*T lanes] (+)= sum over k of a[m][k] * b[k][lanes].
// QK: a = q, b rows = dims of the K block, lanes = tokens. PV: a = p, b rows = tokens, lanes =
// dims. A row's operations and their order do not depend on M, T or the other rows: that, and steps
// and segments at absolute positions, is what makes attention row invariant.
#pragma once

namespace kvcore::kernels::KVCORE_ISA_NS {
namespace {

struct TileArgs {
  const void* a;          // floats, or bf16 pairs where kBf16Pairs
  std::int64_t a_stride;  // bytes between rows
  const char* b;
  std::int64_t b_stride;  // bytes between b rows
  std::int64_t k;         // b rows
  bool half_row;          // bf16: one more b row, of whose pairs only the first value counts
  float* c;
  std::int64_t c_stride;   // floats between rows
  const float* alpha;      // [M] factors of the old c; null: start from zero
  std::int64_t ahead;      // bytes from b to what will be read next, fetched alongside; 0: nothing
  int beside;              // lines of the b row that later tiles read, fetched alongside
  const char* side;        // work memory needed after b, fetched row by row; null: nothing
  std::int64_t side_step;  // bytes of it per b row
};

using TileFn = void (*)(const TileArgs&);

// FirstOnly: of the b row's pairs only the first value counts, whatever the second holds.
template <class Ops, bool FirstOnly, int M, int N>
inline void accumulate(F (&acc)[M][N], const char* a, std::int64_t a_stride, const char* b) {
  if constexpr (requires { typename Ops::B; }) {
    typename Ops::B row[N];
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) {
      row[j] = Ops::pairs(b + j * kW * Ops::kBytes);
      if constexpr (FirstOnly) row[j] = Ops::first_of_pair(row[j]);
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      std::uint32_t x;
      __builtin_memcpy(&x, a + m * a_stride, sizeof x);
#pragma GCC unroll 8
      for (int j = 0; j < N; ++j) acc[m][j] = Ops::dot(acc[m][j], row[j], x);
    }
  } else {
#pragma GCC unroll 2
    for (int i = 0; i < (FirstOnly ? 1 : Ops::kParts); ++i) {
      F row[N];
#pragma GCC unroll 8
      for (int j = 0; j < N; ++j) row[j] = Ops::part(b + j * kW * Ops::kBytes, i);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        float x;
        __builtin_memcpy(&x, a + m * a_stride + i * 4, sizeof x);
        const F y = set1(x);
#pragma GCC unroll 8
        for (int j = 0; j < N; ++j) acc[m][j] = fma(y, row[j], acc[m][j]);
      }
    }
  }
}

// The hardware follows one forward stream; where a step jumps between streams, or takes a row in
// several tiles, it has to be told.
template <int kLines>
inline void fetch(const TileArgs& t, const char* b) {
  if (t.ahead != 0) {
#pragma GCC unroll 4
    for (int i = 0; i < kLines; ++i) __builtin_prefetch(b + t.ahead + 64 * i, 0, 2);  // into L2
  }
  if constexpr (kMaxTiles < 4)
    for (int i = 1; i <= t.beside; ++i) __builtin_prefetch(b + 64 * i);
}

// Between two visits to a KV head the stream has pushed its rows of work memory out of L1, and a
// burst of misses on them makes the stream itself stall for as long as DRAM takes. Asked for one
// line at a time while the tile before reads, they cost nothing.
inline void fetch_side(const TileArgs& t, std::int64_t k) {
  if (t.side != nullptr) __builtin_prefetch(t.side + k * t.side_step);
}

template <class Ops>
constexpr std::int64_t a_bytes() {  // of the values of one b row
  if constexpr (requires { typename Ops::B; })
    return 4;
  else
    return 4 * Ops::kParts;
}

template <class Ops, int M, int N>
[[gnu::always_inline]] inline void add_rows(const TileArgs& t, F (&acc)[M][N]) {
  const char* a = static_cast<const char*>(t.a);
  const char* b = t.b;
  for (std::int64_t k = 0; k < t.k; ++k, a += a_bytes<Ops>(), b += t.b_stride) {
    fetch<(kW * N * Ops::kBytes + 63) / 64>(t, b);
    fetch_side(t, k);
    accumulate<Ops, false>(acc, a, t.a_stride, b);
  }
  if (t.half_row) accumulate<Ops, true>(acc, a, t.a_stride, b);
}

template <class Ops, int M, int T>
[[gnu::always_inline]] inline void tile_here(const TileArgs& t) {
  constexpr int N = T * kVecs16;
  F acc[M][N];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j)
      acc[m][j] = t.alpha == nullptr ? set1(0.f)
                                     : mul(load(t.c + m * t.c_stride + j * kW), set1(t.alpha[m]));
  add_rows<Ops>(t, acc);
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) store(t.c + m * t.c_stride + j * kW, acc[m][j]);
}

template <class Ops, int M, int T>
void tile(const TileArgs& t) {
  tile_here<Ops, M, T>(t);
}

// The same over 64 lanes, in a function that knows the shape.
template <class Ops, int M>
[[gnu::always_inline]] inline void tiles_here(TileArgs t) {
  for (int i = 0; i < 4; i += kMaxTiles) {
    tile_here<Ops, M, kMaxTiles>(t);
    t.b += 16 * kMaxTiles * Ops::kBytes;
    t.c += 16 * kMaxTiles;
    t.side = nullptr;
  }
}

template <class Ops, int M>
constexpr TileFn tile_of(int tiles) {
  if constexpr (kMaxTiles == 4) {
    constexpr TileFn fns[] = {tile<Ops, M, 1>, tile<Ops, M, 2>, tile<Ops, M, 3>, tile<Ops, M, 4>};
    return fns[tiles - 1];
  } else {
    return tile<Ops, M, 1>;
  }
}

template <class Ops>
TileFn tile_of(int rows, int tiles) {
  if constexpr (kMaxRows == 6) {
    switch (rows) {
      case 3:
        return tile_of<Ops, 3>(tiles);
      case 4:
        return tile_of<Ops, 4>(tiles);
      case 5:
        return tile_of<Ops, 5>(tiles);
      case 6:
        return tile_of<Ops, 6>(tiles);
      default:
        break;
    }
  }
  return rows == 1 ? tile_of<Ops, 1>(tiles) : tile_of<Ops, 2>(tiles);
}

inline TileFn tile_of(Format format, int rows, int tiles) {
  switch (format) {
    case Format::kF32:
      return tile_of<F32Ops>(rows, tiles);
    case Format::kF16:
      return tile_of<F16Ops>(rows, tiles);
    default:
      return tile_of<Bf16Ops>(rows, tiles);
  }
}

// Calls the widest tiles that cover `lanes16` groups of 16 lanes.
inline void run_tiles(Format format, int rows, int lanes16, TileArgs t) {
  const std::int64_t lane_bytes = format == Format::kF16 ? 2 : 4;
  t.beside = static_cast<int>((lanes16 * 16 * lane_bytes - 1) / 64);
  while (lanes16 > 0) {
    const int n = lanes16 < kMaxTiles ? lanes16 : kMaxTiles;
    tile_of(format, rows, n)(t);
    t.b += 16 * n * lane_bytes;
    t.c += 16 * n;
    lanes16 -= n;
    t.beside = 0;
    t.side = nullptr;
  }
}

}  // namespace
}  // namespace kvcore::kernels::KVCORE_ISA_NS
