#include "pages/space.h"

#include <iterator>

namespace kvcore::pages {

void Space::count(std::int64_t bytes, std::int64_t by) {
  free_bytes_ += by * bytes;
  for (std::size_t i = 0; i < counted_.size(); ++i) fits_[i] += by * (bytes / counted_[i]);
}

void Space::add(std::int64_t offset, std::int64_t bytes) {
  if (bytes == 0) return;
  spans_.emplace(offset, bytes);
  lengths_.insert(bytes);
  count(bytes, 1);
}

void Space::remove(Spans::iterator span) {
  lengths_.erase(lengths_.find(span->second));
  count(span->second, -1);
  spans_.erase(span);
}

std::optional<std::int64_t> Space::take(std::int64_t bytes, End end) {
  if (lengths_.empty() || *lengths_.rbegin() < bytes) return std::nullopt;
  auto span = end == End::kLow ? spans_.begin() : std::prev(spans_.end());
  while (span->second < bytes) end == End::kLow ? ++span : --span;  // one of them is long enough
  const auto [offset, length] = *span;
  remove(span);
  const std::int64_t rest = length - bytes;
  add(end == End::kLow ? offset + bytes : offset, rest);
  return end == End::kLow ? offset : offset + rest;
}

void Space::give(std::int64_t offset, std::int64_t bytes) {
  const auto next = spans_.lower_bound(offset);
  if (next != spans_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == offset) {
      offset = before->first;
      bytes += before->second;
      remove(before);
    }
  }
  const auto after = spans_.lower_bound(offset + bytes);
  if (after != spans_.end() && after->first == offset + bytes) {
    bytes += after->second;
    remove(after);
  }
  add(offset, bytes);
}

}  // namespace kvcore::pages
