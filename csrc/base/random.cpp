#include "base/random.h"

#include <sys/random.h>

#include <cerrno>

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

}  // namespace kvcore
