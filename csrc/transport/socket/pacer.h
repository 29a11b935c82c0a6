// Token bucket in bytes, 10 ms deep (a late wake-up costs no rate). It may go into debt by one
// chunk, so that a chunk is never split for it; the average rate holds. Thread rules: one thread.
// Units: bytes, bytes per second, nanoseconds.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

namespace kvcore::transport {

class Pacer {
 public:
  void set_rate(std::uint64_t bytes_per_s, std::int64_t now) {
    rate_ = static_cast<double>(bytes_per_s);
    tokens_ = 0;
    at_ = now;
  }
  bool limited() const { return rate_ > 0; }
  // When the next chunk may leave: `now` or earlier = at once.
  std::int64_t ready_ns(std::int64_t now) {
    if (rate_ <= 0) return now;
    tokens_ = std::min(rate_ * kBurstS, tokens_ + rate_ * static_cast<double>(now - at_) * 1e-9);
    at_ = now;
    if (tokens_ >= 0) return now;
    return now + 1 + static_cast<std::int64_t>(-tokens_ / rate_ * 1e9);
  }
  void spend(std::uint64_t bytes) {
    if (rate_ > 0) tokens_ -= static_cast<double>(bytes);
  }
  // A chunk should take no longer than a few milliseconds of the rate, so that traffic stays
  // smooth.
  std::uint64_t chunk_bytes(std::uint64_t largest) const {
    if (rate_ <= 0) return largest;
    const double slice = std::max(rate_ * kChunkS, 16384.0);
    return std::min(largest, static_cast<std::uint64_t>(slice));
  }

 private:
  static constexpr double kBurstS = 0.010, kChunkS = 0.002;
  double rate_ = 0, tokens_ = 0;
  std::int64_t at_ = 0;
};

}  // namespace kvcore::transport
