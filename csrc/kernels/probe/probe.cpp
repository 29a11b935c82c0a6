#include "kernels/probe/probe.h"

#include <sys/mman.h>

#include <chrono>
#include <cstring>
#include <numeric>
#include <utility>

#include "base/text.h"
#include "kernels/probe/probe_isa.h"

namespace kvcore::kernels {
namespace {

constexpr std::int64_t kHugePageBytes = 2 << 20;
constexpr std::int64_t kStepBytes = 256;
constexpr std::int64_t kFetchedBytes = 4096;

enum class Width { kScalar, kAvx2, kAvx512, kAvx512Bf16 };

Width widest() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512bf16")) return Width::kAvx512Bf16;
  if (__builtin_cpu_supports("avx512f")) return Width::kAvx512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return Width::kAvx2;
#endif
  return Width::kScalar;
}

// Keeps a result alive: the loops have no other effect.
void keep(float value) {
  [[maybe_unused]] volatile float sink = value;
}

template <class Work>
double seconds_of(Work work) {
  const auto start = std::chrono::steady_clock::now();
  keep(work());
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

float read_floats(const float* data, std::int64_t count) {
#if defined(__x86_64__)
  if (widest() >= Width::kAvx512) return avx512::probe_read(data, count);
  if (widest() == Width::kAvx2) return avx2::probe_read(data, count);
#endif
  return scalar::probe_read(data, count);
}

}  // namespace

Result<ReadProbe> ReadProbe::make(std::int64_t bytes) {
  if (bytes <= 0 || bytes % kHugePageBytes != 0)
    return invalid_argument(text("bytes=", bytes, " must be a positive multiple of ", kHugePageBytes));
  void* base = ::mmap(nullptr, static_cast<std::size_t>(bytes), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED)
    return invalid_argument(text("bytes=", bytes, " could not be mapped: out of memory"));
  ::madvise(base, static_cast<std::size_t>(bytes), MADV_HUGEPAGE);
  std::memset(base, 0, static_cast<std::size_t>(bytes));
  return ReadProbe(static_cast<std::byte*>(base), bytes);
}

ReadProbe::ReadProbe(ReadProbe&& other) noexcept
    : base_(std::exchange(other.base_, nullptr)), bytes_(other.bytes_) {}

ReadProbe::~ReadProbe() {
  if (base_ != nullptr) ::munmap(base_, static_cast<std::size_t>(bytes_));
}

Status ReadProbe::check(std::int64_t offset_bytes, std::int64_t num_bytes) const {
  if (offset_bytes >= 0 && num_bytes > 0 && offset_bytes % kStepBytes == 0 &&
      num_bytes % kStepBytes == 0 && num_bytes <= bytes_ - offset_bytes)
    return {};
  return invalid_argument(text("offset_bytes=", offset_bytes, " num_bytes=", num_bytes,
                               " must be multiples of ", kStepBytes, " within ", bytes_));
}

Result<double> ReadProbe::read(std::int64_t offset_bytes, std::int64_t num_bytes) const {
  KVCORE_RETURN_IF_ERROR(check(offset_bytes, num_bytes));
  const auto* data = reinterpret_cast<const float*>(base_ + offset_bytes);
  const std::int64_t count = num_bytes / static_cast<std::int64_t>(sizeof(float));
  return seconds_of([=] { return read_floats(data, count); });
}

Result<double> ReadProbe::read_runs(std::int64_t offset_bytes, std::int64_t num_bytes,
                                    std::int64_t run_bytes) const {
  KVCORE_RETURN_IF_ERROR(check(offset_bytes, num_bytes));
  if (run_bytes <= 0 || run_bytes % kStepBytes != 0 || num_bytes % run_bytes != 0)
    return invalid_argument(text("run_bytes=", run_bytes, " must be a multiple of ", kStepBytes,
                                 " that divides num_bytes=", num_bytes));
  const std::int64_t runs = num_bytes / run_bytes;
  std::int64_t stride = runs * 5 / 8 + 1;  // far apart, and every run once
  while (std::gcd(stride, runs) != 1) ++stride;
  const std::byte* part = base_ + offset_bytes;
  const std::int64_t count = run_bytes / static_cast<std::int64_t>(sizeof(float));
  return seconds_of([=] {
    float total = 0;
    for (std::int64_t i = 0; i < runs; ++i) {
      const std::byte* next = part + (i + 1) * stride % runs * run_bytes;
      for (std::int64_t at = 0; at < kFetchedBytes && at < run_bytes; at += 64)
        __builtin_prefetch(next + at);
      total += read_floats(reinterpret_cast<const float*>(part + i * stride % runs * run_bytes), count);
    }
    return total;
  });
}

FlopProbe fma_f32_peak(std::int64_t iterations) {
  const auto n = static_cast<double>(iterations * kProbeChains);
#if defined(__x86_64__)
  if (widest() >= Width::kAvx512)
    return {seconds_of([=] { return avx512::probe_fma(iterations); }), n * 32};
  if (widest() == Width::kAvx2)
    return {seconds_of([=] { return avx2::probe_fma(iterations); }), n * 16};
#endif
  return {seconds_of([=] { return scalar::probe_fma(iterations); }), n * 2};
}

Result<FlopProbe> dot_bf16_peak([[maybe_unused]] std::int64_t iterations) {
#if defined(__x86_64__)
  if (widest() == Width::kAvx512Bf16)
    return FlopProbe{seconds_of([=] { return avx512::probe_dot(iterations); }),
                     static_cast<double>(iterations * kProbeChains) * 64};
#endif
  return Error{ErrorCode::kUnsupported, "this CPU has no AVX512_BF16"};
}

}  // namespace kvcore::kernels
