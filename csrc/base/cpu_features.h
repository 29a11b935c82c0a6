// What this CPU can run. Read once; afterwards plain constants. Thread rules: any thread.
#pragma once

namespace kvcore {

struct CpuFeatures {
  bool avx2 = false;    // AVX2 + FMA + F16C, enabled by the operating system
  bool avx512 = false;  // AVX-512 F, BW, VL, DQ, VNNI, BF16, enabled by the operating system
};

const CpuFeatures& cpu_features() noexcept;

}  // namespace kvcore
