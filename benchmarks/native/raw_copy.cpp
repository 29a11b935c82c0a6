// The raw limit of a copy between buffers: libc's memcpy, or stores past the caches.
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

#if defined(__x86_64__)
// 64-byte aligned destinations, whole lines.
__attribute__((target("avx512f"))) void stream512(char* to, const char* from, std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; i += 64)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i), _mm512_loadu_si512(from + i));
  _mm_sfence();
}
__attribute__((target("avx"))) void stream256(char* to, const char* from, std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; i += 32)
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i),
                        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i)));
  _mm_sfence();
}
#endif

void stream(char* to, const char* from, std::size_t bytes) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return stream512(to, from, bytes);
  if (__builtin_cpu_supports("avx")) return stream256(to, from, bytes);
#endif
  std::memcpy(to, from, bytes);
}

}  // namespace

struct Block {
  std::uint64_t to, from, bytes;  // addresses
};

// past_caches: 0 = memcpy, else non-temporal stores (blocks of whole lines at aligned places).
extern "C" __attribute__((visibility("default"))) void copy_blocks(const Block* blocks,
                                                                   std::uint64_t count,
                                                                   int past_caches) {
  for (std::uint64_t i = 0; i < count; ++i) {
    auto* to = reinterpret_cast<char*>(blocks[i].to);
    const auto* from = reinterpret_cast<const char*>(blocks[i].from);
    if (past_caches != 0)
      stream(to, from, blocks[i].bytes);
    else
      std::memcpy(to, from, blocks[i].bytes);
  }
}
