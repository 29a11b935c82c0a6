#include "kernels/probe/probe_isa.h"

namespace kvcore::kernels::scalar {

float probe_read(const float* data, std::int64_t count) {
  float sums[8] = {};
  for (std::int64_t i = 0; i < count; i += 8)
    for (int j = 0; j < 8; ++j) sums[j] += data[i + j];
  float total = 0;
  for (float s : sums) total += s;
  return total;
}

float probe_fma(std::int64_t iterations) {
  float chain[kProbeChains] = {};
  for (std::int64_t i = 0; i < iterations; ++i)
    for (float& c : chain) c = c * 0.999f + 1e-3f;
  float total = 0;
  for (float c : chain) total += c;
  return total;
}

}  // namespace kvcore::kernels::scalar
