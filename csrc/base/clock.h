// Time as an injected dependency: cores take a Clock& (or a timestamp) and never ask the system.
// Units: nanoseconds on a monotonic scale with an arbitrary origin. Thread rules: now_ns() is
// thread-safe in every implementation; ManualClock may be advanced from any thread.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace kvcore {

class Clock {
 public:
  virtual ~Clock() = default;
  virtual std::int64_t now_ns() const noexcept = 0;
};

class SystemClock final : public Clock {
 public:
  std::int64_t now_ns() const noexcept override {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(
               std::chrono::steady_clock::now().time_since_epoch())
        .count();
  }
};

// The fake of tests and simulations: stands still until advanced, never runs backwards.
class ManualClock final : public Clock {
 public:
  explicit ManualClock(std::int64_t start_ns = 0) : now_ns_(start_ns) {}
  std::int64_t now_ns() const noexcept override { return now_ns_.load(); }
  void advance_ns(std::int64_t by_ns) noexcept {
    if (by_ns > 0) now_ns_.fetch_add(by_ns);
  }

 private:
  std::atomic<std::int64_t> now_ns_;
};

}  // namespace kvcore
