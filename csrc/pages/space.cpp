#include "pages/space.h"

#include <iterator>
#include <limits>

namespace kvcore::pages {

void Space::count(std::int64_t bytes, std::int64_t by) {
  free_bytes_ += by * bytes;
  for (std::size_t i = 0; i < counted_.size(); ++i) fits_[i] += by * (bytes / counted_[i]);
}

void Space::add(std::int64_t offset, std::int64_t bytes) {
  if (bytes == 0) return;
  spans_.emplace(offset, bytes);
  by_bytes_.emplace(bytes, offset);
  count(bytes, 1);
}

void Space::remove(std::int64_t offset, std::int64_t bytes) {
  spans_.erase(offset);
  by_bytes_.erase({bytes, offset});
  count(bytes, -1);
}

std::optional<std::int64_t> Space::take(std::int64_t bytes, End end) {
  auto span = by_bytes_.lower_bound({bytes, 0});
  if (span == by_bytes_.end()) return std::nullopt;
  if (end == End::kHigh)
    span =
        std::prev(by_bytes_.upper_bound({span->first, std::numeric_limits<std::int64_t>::max()}));
  const auto [length, offset] = *span;
  remove(offset, length);
  const std::int64_t rest = length - bytes;
  add(end == End::kLow ? offset + bytes : offset, rest);
  return end == End::kLow ? offset : offset + rest;
}

void Space::give(std::int64_t offset, std::int64_t bytes) {
  const auto next = spans_.lower_bound(offset);
  if (next != spans_.begin()) {
    const auto [before, length] = *std::prev(next);
    if (before + length == offset) {
      remove(before, length);
      offset = before;
      bytes += length;
    }
  }
  if (const auto after = spans_.find(offset + bytes); after != spans_.end()) {
    const std::int64_t length = after->second;
    remove(after->first, length);
    bytes += length;
  }
  add(offset, bytes);
}

}  // namespace kvcore::pages
