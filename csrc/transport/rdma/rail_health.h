// Whether a rail (one NIC of a link) may be used: errors rest it for a while, longer each time.
//
// Three errors within 10 s rest a rail for 30 s; every rest that follows soon is twice as long, up
// to 300 s. A rail that has worked for as long as its last rest starts from the beginning again.
// What a revoked window or a closing peer causes is no error of the rail.
//
// Thread rules: a plain value. Units: nanoseconds of the caller's clock.
#pragma once

#include <algorithm>
#include <cstdint>

namespace kvcore::transport::rdma {

class RailHealth {
 public:
  static constexpr int kErrors = 3;
  static constexpr std::int64_t kWithinNs = 10'000'000'000;
  static constexpr std::int64_t kFirstRestNs = 30'000'000'000;
  static constexpr std::int64_t kLongestRestNs = 300'000'000'000;

  bool usable(std::int64_t now) const noexcept { return now >= rests_until_; }
  std::int64_t rests_until_ns() const noexcept { return rests_until_; }
  std::uint64_t errors() const noexcept { return total_; }

  void on_error(std::int64_t now) noexcept {
    ++total_;
    if (!usable(now)) return;  // late news of the same trouble
    if (now - rests_until_ > rest_ns_) rest_ns_ = 0;
    if (errors_ == 0 || now - first_error_ > kWithinNs) {
      errors_ = 0;
      first_error_ = now;
    }
    if (++errors_ < kErrors) return;
    errors_ = 0;
    rest_ns_ = rest_ns_ == 0 ? kFirstRestNs : std::min(2 * rest_ns_, kLongestRestNs);
    rests_until_ = now + rest_ns_;
  }

 private:
  int errors_ = 0;
  std::uint64_t total_ = 0;
  std::int64_t first_error_ = 0;
  std::int64_t rest_ns_ = 0;
  std::int64_t rests_until_ = 0;
};

}  // namespace kvcore::transport::rdma
