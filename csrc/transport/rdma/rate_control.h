// A sender's own rate per rail, by additive increase and multiplicative decrease.
//
// The NIC's firmware (DCQCN) reacts within microseconds, queue pair by queue pair, and cannot be
// reached from here. This is the slow outer loop: it keeps many queue pairs of one worker from
// pushing a congested receiver until the firmware's cut is all there is. It looks at the congestion
// notifications of the NIC every kIntervalNs:
//   some since the last look   rate = max(kLeast, rate * kCut), at most once per kIntervalNs
//   none for kCalmNs           rate = min(line, rate + kStep * line)
// From a cut to half the rate it takes (1 - kCut) * ... / kStep = 50 calm looks, 0.5 s, to be back
// at line rate; a sender that starts late gets its share by the same rule, since every sender
// loses a share of what it has and gains the same.
//
// Thread rules: a plain value, no clock of its own. Units: bytes per second, nanoseconds.
#pragma once

#include <algorithm>
#include <cstdint>

#include "transport/rdma/nic_counters.h"

namespace kvcore::transport::rdma {

class RateControl {
 public:
  static constexpr std::int64_t kIntervalNs = 10'000'000;  // sysfs costs about 20 us a look
  static constexpr std::int64_t kCalmNs = 20'000'000;
  static constexpr double kCut = 0.5;
  static constexpr double kStep = 0.01;   // of the line rate, per calm look
  static constexpr double kLeast = 0.01;  // of the line rate: never silent

  explicit RateControl(double line_bytes_per_s) : line_(line_bytes_per_s), rate_(line_) {}

  bool due(std::int64_t now) const noexcept { return now >= next_look_; }
  std::int64_t next_look_ns() const noexcept { return next_look_; }
  // 0 = at line rate: nothing to hold back.
  std::uint64_t rate() const noexcept {
    return rate_ >= line_ ? 0 : static_cast<std::uint64_t>(rate_);
  }
  std::uint64_t cuts() const noexcept { return cuts_; }

  void look(const NicCounts& counts, std::int64_t now) noexcept {
    next_look_ = now + kIntervalNs;
    // A counter that runs backwards belongs to a device that was reset: a new beginning.
    const bool congested = seen_ && counts.congestion > last_;
    last_ = counts.congestion;
    seen_ = true;
    if (congested) {
      rate_ = std::max(kLeast * line_, rate_ * kCut);
      calm_since_ = now;
      ++cuts_;
    } else if (now - calm_since_ >= kCalmNs) {
      rate_ = std::min(line_, rate_ + kStep * line_);
    }
  }

 private:
  double line_;
  double rate_;
  bool seen_ = false;
  std::uint64_t last_ = 0;
  std::uint64_t cuts_ = 0;
  std::int64_t calm_since_ = 0;
  std::int64_t next_look_ = 0;
};

}  // namespace kvcore::transport::rdma
