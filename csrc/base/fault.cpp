#include "base/fault.h"

#include "base/text.h"

namespace kvcore {

Status FaultPlan::fail_nth(std::string_view point, std::int64_t n) {
  if (n < 1) return invalid_argument(text("n=", n, " is out of range: allowed 1 and up"));
  std::lock_guard lock(mutex_);
  Point& p = points_[std::string(point)];
  p.fail_at = p.calls + n;
  return {};
}

Status FaultPlan::fail_randomly(std::string_view point, double probability) {
  if (!(probability >= 0 && probability <= 1))
    return invalid_argument(text("probability=", probability, " is out of range: allowed 0 to 1"));
  std::lock_guard lock(mutex_);
  points_[std::string(point)].probability = probability;
  return {};
}

void FaultPlan::clear() {
  std::lock_guard lock(mutex_);
  points_.clear();
}

// splitmix64: the same seed fails the same calls on every machine.
double FaultPlan::next_unit() {
  std::uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return static_cast<double>((z ^ (z >> 31)) >> 11) * 0x1.0p-53;
}

bool FaultPlan::hit(std::string_view point) {
  std::lock_guard lock(mutex_);
  auto found = points_.find(point);
  if (found == points_.end()) found = points_.emplace(std::string(point), Point{}).first;
  Point& p = found->second;
  ++p.calls;
  const bool fail = p.calls == p.fail_at || (p.probability > 0 && next_unit() < p.probability);
  p.failures += fail;
  return fail;
}

std::int64_t FaultPlan::calls(std::string_view point) const {
  std::lock_guard lock(mutex_);
  const auto found = points_.find(point);
  return found == points_.end() ? 0 : found->second.calls;
}

std::int64_t FaultPlan::failures(std::string_view point) const {
  std::lock_guard lock(mutex_);
  const auto found = points_.find(point);
  return found == points_.end() ? 0 : found->second.failures;
}

}  // namespace kvcore
