// Sums over rotated V (v4, v3): they stay rotated while a segment lasts and are turned back once,
// at its end, into the sums over everything else. Both share m and l.
#pragma once

#include "kernels/attention/pieces_impl.h"

namespace kvcore::kernels::KVCORE_ISA_NS {
namespace {

constexpr std::int64_t kNoToken = INT64_MAX;

inline std::int64_t rows_of_head(const AttendUnit& u) { return (u.t1 - u.t0) * u.group; }

// One stage inside vectors: (a, b) at kDistance lanes become (a + b, a - b).
template <int kDistance>
inline void turn_lanes(float* x, std::int64_t dim) {
  alignas(64) float signs[kW];
  for (int i = 0; i < kW; ++i) signs[i] = (i & kDistance) != 0 ? -1.f : 1.f;
  const F sign = load(signs);
  for (std::int64_t d = 0; d < dim; d += kW) {
    const F v = load(x + d);
    store(x + d, fma(v, sign, exchange<kDistance>(v)));
  }
}

inline void hadamard_row(float* x, std::int64_t dim) {
  const std::int64_t width = hadamard_width(dim);
  turn_lanes<1>(x, dim);
  turn_lanes<2>(x, dim);
  if constexpr (kW >= 8) turn_lanes<4>(x, dim);
  if constexpr (kW >= 16) turn_lanes<8>(x, dim);
  for (std::int64_t h = kW; h < width; h *= 2)
    for (std::int64_t base = 0; base < dim; base += 2 * h)
      for (std::int64_t d = base; d < base + h; d += kW) {
        const F a = load(x + d), b = load(x + d + h);
        store(x + d, add(a, b));
        store(x + d + h, sub(a, b));
      }
}

// The segment's first rotated piece of this head starts at absolute token `token`.
inline void begin_rotated(const AttendUnit& u, std::int32_t head, std::int64_t token) {
  const Scratch& s = *u.scratch;
  if (s.rotated_from[head - u.h0] != kNoToken) return;
  s.rotated_from[head - u.h0] = token;
  const std::int64_t n = rows_of_head(u) * u.pages->head_dim_v;
  float* o = s.rotated + (head - u.h0) * n;
  for (std::int64_t i = 0; i < n; i += kW) store(o + i, set1(0.f));
}

inline bool begin_rotated(const AttendUnit& u, const Step& step) {
  for (int i = 0; i < step.num_pieces; ++i) {
    if (!is_rotated(step.pieces[i].v_format)) continue;
    begin_rotated(u, step.head, step.start + step.pieces[i].first);
    return true;
  }
  return false;
}

inline void no_rotated(const AttendUnit& u) {
  for (std::int32_t h = u.h0; h < u.h1; ++h) u.scratch->rotated_from[h - u.h0] = kNoToken;
}

inline bool all_zero(const float* x, std::int64_t dim) {
  F top = set1(0.f);
  for (std::int64_t d = 0; d < dim; d += kW) top = vmax(vabs(load(x + d)), top);
  return hmax(top) == 0.f;
}

// Adds the rotated sums of a finished segment to the others. Rows that have not seen any are left
// alone, so that their bits do not depend on rows that have (adding 0 would turn -0 around); a
// window leaves such rows behind as well, whose sums are 0.
[[gnu::noinline]] void turn_back(const AttendUnit& u) {
  const Scratch& s = *u.scratch;
  const std::int32_t dv = u.pages->head_dim_v;
  const F factor = set1(1.f / __builtin_sqrtf(static_cast<float>(hadamard_width(dv))));
  for (std::int32_t h = 0; h < u.h1 - u.h0; ++h) {
    if (s.rotated_from[h] == kNoToken) continue;
    for (std::int64_t t = u.t0; t < u.t1; ++t) {
      if (u.first_visible + t <= s.rotated_from[h]) continue;
      for (std::int32_t g = 0; g < u.group; ++g) {
        const std::int64_t row = h * rows_of_head(u) + (t - u.t0) * u.group + g;
        float* x = s.rotated + row * dv;
        float* o = s.segment.o + row * dv;
        if (u.window != 0 && all_zero(x, dv)) continue;
        hadamard_row(x, dv);
        for (std::int32_t d = 0; d < dv; d += kW) {
          const F back = as_float(as_int(factor) ^ load_int(kSigns.bits + d));
          store(o + d, fma(load(x + d), back, load(o + d)));
        }
      }
    }
  }
}

}  // namespace
}  // namespace kvcore::kernels::KVCORE_ISA_NS
