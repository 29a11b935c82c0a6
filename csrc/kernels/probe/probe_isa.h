// The loops behind probe.h, one set per instruction set; no std:: containers here (their weak symbols
// would carry wide instructions into other code). Thread rules: free functions without state.
#pragma once

#include <cstdint>

namespace kvcore::kernels {

constexpr std::int64_t kProbeChains = 14;  // enough to hide four cycles of latency on two pipes

namespace scalar {
float probe_read(const float* data, std::int64_t count);
float probe_fma(std::int64_t iterations);  // 2 flops per chain and iteration
}  // namespace scalar

#if defined(__x86_64__)
namespace avx2 {
float probe_read(const float* data, std::int64_t count);
float probe_fma(std::int64_t iterations);  // 16 flops per chain and iteration
}  // namespace avx2

namespace avx512 {
float probe_read(const float* data, std::int64_t count);
float probe_fma(std::int64_t iterations);  // 32 flops per chain and iteration
float probe_dot(std::int64_t iterations);  // 64 flops per chain and iteration
}  // namespace avx512
#endif

}  // namespace kvcore::kernels
