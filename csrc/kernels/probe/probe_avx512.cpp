#include <immintrin.h>

#include "kernels/probe/probe_isa.h"

namespace kvcore::kernels::avx512 {

static float sum(__m512 v) {
  float lanes[16];
  _mm512_storeu_ps(lanes, v);
  float total = 0;
  for (float x : lanes) total += x;
  return total;
}

float probe_read(const float* data, std::int64_t count) {
  __m512 a = _mm512_setzero_ps(), b = a, c = a, d = a;
  for (std::int64_t i = 0; i < count; i += 64) {
    a = _mm512_add_ps(a, _mm512_loadu_ps(data + i));
    b = _mm512_add_ps(b, _mm512_loadu_ps(data + i + 16));
    c = _mm512_add_ps(c, _mm512_loadu_ps(data + i + 32));
    d = _mm512_add_ps(d, _mm512_loadu_ps(data + i + 48));
  }
  return sum(_mm512_add_ps(_mm512_add_ps(a, b), _mm512_add_ps(c, d)));
}

float probe_fma(std::int64_t iterations) {
  __m512 chain[kProbeChains];
  for (__m512& c : chain) c = _mm512_set1_ps(1);
  const __m512 scale = _mm512_set1_ps(0.999f), step = _mm512_set1_ps(1e-3f);
  for (std::int64_t i = 0; i < iterations; ++i) {
#pragma GCC unroll 14
    for (int k = 0; k < kProbeChains; ++k) chain[k] = _mm512_fmadd_ps(chain[k], scale, step);
  }
  float total = 0;
  for (const __m512& c : chain) total += sum(c);
  return total;
}

float probe_dot(std::int64_t iterations) {
  __m512 chain[kProbeChains];
  for (__m512& c : chain) c = _mm512_setzero_ps();
  const auto one = (__m512bh)_mm512_set1_epi16(0x3f80), small = (__m512bh)_mm512_set1_epi16(0x3c00);
  for (std::int64_t i = 0; i < iterations; ++i) {
#pragma GCC unroll 14
    for (int k = 0; k < kProbeChains; ++k) chain[k] = _mm512_dpbf16_ps(chain[k], one, small);
  }
  float total = 0;
  for (const __m512& c : chain) total += sum(c);
  return total;
}

}  // namespace kvcore::kernels::avx512
