#include <immintrin.h>

#include "kernels/probe/probe_isa.h"

namespace kvcore::kernels::avx2 {

static float sum(__m256 v) {
  float lanes[8];
  _mm256_storeu_ps(lanes, v);
  float total = 0;
  for (float x : lanes) total += x;
  return total;
}

float probe_read(const float* data, std::int64_t count) {
  __m256 a = _mm256_setzero_ps(), b = a, c = a, d = a;
  for (std::int64_t i = 0; i < count; i += 32) {
    a = _mm256_add_ps(a, _mm256_loadu_ps(data + i));
    b = _mm256_add_ps(b, _mm256_loadu_ps(data + i + 8));
    c = _mm256_add_ps(c, _mm256_loadu_ps(data + i + 16));
    d = _mm256_add_ps(d, _mm256_loadu_ps(data + i + 24));
  }
  return sum(_mm256_add_ps(_mm256_add_ps(a, b), _mm256_add_ps(c, d)));
}

float probe_fma(std::int64_t iterations) {
  __m256 chain[kProbeChains];
  for (__m256& c : chain) c = _mm256_set1_ps(1);
  const __m256 scale = _mm256_set1_ps(0.999f), step = _mm256_set1_ps(1e-3f);
  for (std::int64_t i = 0; i < iterations; ++i) {
#pragma GCC unroll 14
    for (int k = 0; k < kProbeChains; ++k) chain[k] = _mm256_fmadd_ps(chain[k], scale, step);
  }
  float total = 0;
  for (const __m256& c : chain) total += sum(c);
  return total;
}

}  // namespace kvcore::kernels::avx2
