// Space: which bytes of an arena are free. Runs of any length are taken near one of its two ends
// and given back; neighbours join at once. Best fit: a run comes from the shortest span that holds
// it (the outermost of equal ones), so short runs fill what other short runs have begun and leave
// the places of long runs whole.
//
// Invariants: free spans never touch or overlap; what was given minus what was taken is free.
// Costs: logarithmic. Thread rules: none, the pool locks. Units: bytes, multiples of
// the spec's align_bytes.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>

namespace kvcore::pages {

enum class End : std::uint8_t { kLow, kHigh };

class Space {
 public:
  // Nothing is free at first. fits() answers for these two lengths without a search.
  explicit Space(std::array<std::int64_t, 2> counted) : counted_(counted) {}

  // The offset of a run, or nothing where no span holds it.
  std::optional<std::int64_t> take(std::int64_t bytes, End end);
  void give(std::int64_t offset, std::int64_t bytes);

  std::int64_t free_bytes() const noexcept { return free_bytes_; }
  // How many runs of counted[i] bytes could be taken now, one after the other.
  std::int64_t fits(std::size_t i) const noexcept { return fits_[i]; }
  std::int64_t num_spans() const noexcept { return static_cast<std::int64_t>(spans_.size()); }

 private:
  void add(std::int64_t offset, std::int64_t bytes);
  void remove(std::int64_t offset, std::int64_t bytes);
  void count(std::int64_t bytes, std::int64_t by);

  const std::array<std::int64_t, 2> counted_;
  std::array<std::int64_t, 2> fits_{};
  std::map<std::int64_t, std::int64_t> spans_;                // offset -> bytes
  std::set<std::pair<std::int64_t, std::int64_t>> by_bytes_;  // (bytes, offset)
  std::int64_t free_bytes_ = 0;
};

}  // namespace kvcore::pages
