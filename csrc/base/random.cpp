#include "base/random.h"

#include <sys/random.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/text.h"

namespace kvcore {

Status secure_random(std::span<std::byte> out) {
  while (!out.empty()) {
    const ssize_t n = ::getrandom(out.data(), out.size(), 0);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return Error{ErrorCode::kIo, text("getrandom: errno ", errno)};
    out = out.subspan(static_cast<std::size_t>(n));
  }
  return {};
}

Status SeededRandom::fill(std::span<std::byte> out) {
  const std::lock_guard lock(mutex_);
  while (!out.empty()) {
    std::uint64_t x = state_ += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    x ^= x >> 31;
    const std::size_t n = std::min(out.size(), sizeof x);
    std::memcpy(out.data(), &x, n);
    out = out.subspan(n);
  }
  return {};
}

}  // namespace kvcore
