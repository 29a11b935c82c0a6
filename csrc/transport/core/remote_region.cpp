#include "transport/core/remote_region.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>

#include "base/text.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif

namespace kvcore::transport {
namespace {
constexpr std::size_t kHugePage = 2UL * 1024 * 1024;
}

Result<std::shared_ptr<RemoteRegion>> RemoteRegion::make(UniqueFd fd, std::uint64_t bytes) {
  struct stat st {};
  if (::fstat(fd.get(), &st) != 0 || bytes == 0 || st.st_size < 0 ||
      static_cast<std::uint64_t>(st.st_size) < bytes)
    return invalid_argument(text("the peer's region of ", bytes, " bytes is backed by a file of ",
                                 st.st_size, " bytes"));
  const int seals = ::fcntl(fd.get(), F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0)
    return invalid_argument("the peer's region is not a memfd sealed against shrinking");
  // 2 MiB aligned, so that huge pages of the file can be mapped as such.
  const std::size_t span = bytes + kHugePage;
  void* mapping =
      ::mmap(nullptr, span, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping == MAP_FAILED) return Error{ErrorCode::kIo, text("mmap: errno ", errno)};
  const auto at = reinterpret_cast<std::uintptr_t>(mapping);
  auto* data = reinterpret_cast<std::byte*>((at + kHugePage - 1) / kHugePage * kHugePage);
  if (::mmap(data, bytes, PROT_READ, MAP_SHARED | MAP_FIXED, fd.get(), 0) == MAP_FAILED) {
    const int e = errno;
    ::munmap(mapping, span);
    return Error{ErrorCode::kIo, text("mmap of the peer's region: errno ", e)};
  }
  // Page tables up front where the memory is there already; never allocates the peer's holes.
  if (static_cast<std::uint64_t>(st.st_blocks) * 512 >= bytes)
    (void)::madvise(data, bytes, MADV_POPULATE_READ);
  return std::shared_ptr<RemoteRegion>(new RemoteRegion(mapping, span, data, bytes));
}

RemoteRegion::~RemoteRegion() { ::munmap(mapping_, span_); }

#if defined(__x86_64__)
namespace {

// Whole lines to a place that is aligned to one; without the loop's own prefetches the processor's
// are as good, and wider stores than these gain nothing more.
__attribute__((target("avx"))) void stream_lines_avx(std::byte* to, const std::byte* from,
                                                     std::size_t bytes) noexcept {
  for (std::size_t i = 0; i < bytes; i += 64) {
    const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i));
    const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i + 32));
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i), a);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i + 32), b);
  }
}

void stream_lines(std::byte* to, const std::byte* from, std::size_t bytes) noexcept {
  for (std::size_t i = 0; i < bytes; i += 16)
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + i),
                     _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
}

}  // namespace
#endif

void copy_bytes(std::byte* to, const std::byte* from, std::size_t bytes) noexcept {
#if defined(__x86_64__)
  if (bytes >= kStreamingBytes) {
    const std::size_t head = (64 - reinterpret_cast<std::uintptr_t>(to) % 64) % 64;
    std::memcpy(to, from, head);
    const std::size_t lines = (bytes - head) / 64 * 64;
    static const bool avx = __builtin_cpu_supports("avx") != 0;
    if (avx)
      stream_lines_avx(to + head, from + head, lines);
    else
      stream_lines(to + head, from + head, lines);
    _mm_sfence();
    to += head + lines;
    from += head + lines;
    bytes -= head + lines;
  }
#endif
  std::memcpy(to, from, bytes);
}

}  // namespace kvcore::transport
