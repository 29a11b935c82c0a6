// What the machine can do, for benchmarks to compare with: linear reads and multiply-add peaks of one thread.
// Each call does a fixed amount of work with the widest instructions of this CPU (whatever level the
// other kernels are forced to) and returns the seconds it took; callers interleave it with their case.
// Thread rules: free functions without state; ReadProbe is read-only after make().
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/result.h"

namespace kvcore::kernels {

// Private memory on huge pages where the system grants them, written once so that every page is there.
class ReadProbe {
 public:
  // bytes: a multiple of 2 MiB, larger than the caches.
  static Result<ReadProbe> make(std::int64_t bytes);
  ReadProbe(ReadProbe&& other) noexcept;
  ReadProbe& operator=(ReadProbe&&) = delete;
  ReadProbe(const ReadProbe&) = delete;
  ReadProbe& operator=(const ReadProbe&) = delete;
  ~ReadProbe();

  std::int64_t bytes() const noexcept { return bytes_; }
  // Reads [offset, offset + num_bytes) once, forwards; multiples of 256. Returns seconds.
  Result<double> read(std::int64_t offset_bytes, std::int64_t num_bytes) const;
  // The same bytes in runs of run_bytes, a divisor of num_bytes and a multiple of 256, in a scattered
  // order; the first 4 KiB of each run are fetched while the one before is read.
  Result<double> read_runs(std::int64_t offset_bytes, std::int64_t num_bytes,
                           std::int64_t run_bytes) const;

 private:
  Status check(std::int64_t offset_bytes, std::int64_t num_bytes) const;
  ReadProbe(std::byte* base, std::int64_t bytes) : base_(base), bytes_(bytes) {}
  std::byte* base_;
  std::int64_t bytes_;
};

struct FlopProbe {
  double seconds;
  double flops;
};

// Independent chains of f32 fused multiply-adds (scalar multiply and add without SIMD).
FlopProbe fma_f32_peak(std::int64_t iterations);
// Independent chains of bf16 pair dot products; kUnsupported without AVX512_BF16.
Result<FlopProbe> dot_bf16_peak(std::int64_t iterations);

}  // namespace kvcore::kernels
