// Fault points: places in the code that a test can make fail, by name, at the n-th call or with a
// seeded probability. A component holds a FaultPlan* that is null in production, so a point costs
// one null check: `if (fails(faults_, "pool.alloc")) return error;`. Thread rules: FaultPlan is
// thread-safe; with several threads the n-th call is whichever comes n-th.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <string_view>

#include "base/result.h"

namespace kvcore {

class FaultPlan {
 public:
  explicit FaultPlan(std::uint64_t seed) : state_(seed) {}

  // The n-th call from now on (1 = the next) of this point fails, once.
  Status fail_nth(std::string_view point, std::int64_t n);
  // Every call of this point fails with this probability, 0 to 1.
  Status fail_randomly(std::string_view point, double probability);
  void clear();

  // Called by the code under test; true = fail now.
  bool hit(std::string_view point);
  std::int64_t calls(std::string_view point) const;
  std::int64_t failures(std::string_view point) const;

 private:
  struct Point {
    std::int64_t calls = 0;
    std::int64_t failures = 0;
    std::int64_t fail_at = 0;  // value of calls that fails; 0 = none
    double probability = 0;
  };
  double next_unit();

  mutable std::mutex mutex_;
  std::map<std::string, Point, std::less<>> points_;
  std::uint64_t state_;
};

inline bool fails(FaultPlan* plan, std::string_view point) {
  return plan != nullptr && plan->hit(point);
}

}  // namespace kvcore
