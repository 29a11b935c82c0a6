// When is a write complete? When the last piece of each rail it used has arrived, in any order.
//
// Each rail's last piece is a WRITE_WITH_IMM; on a reliable connection its receive completion says
// that all earlier writes of that rail are placed. The immediate names slot, rail and attempt:
//   slot 16 | rail 6 | attempt 10
// A slot belongs to one operation at a time and counts its attempts through all of them, so an
// immediate of a replayed or forgotten attempt is told from that of the present one. Immediates may
// come before the descriptor (which travels elsewhere) and after the slot was given up.
//
// Thread rules: a plain value.
#pragma once

#include <cstdint>
#include <vector>

namespace kvcore::transport::rdma {

inline constexpr std::uint32_t kMaxSlots = 1024;      // writes of one link under way
inline constexpr std::uint32_t kMaxRails = 8;         // of one link
inline constexpr std::uint32_t kAttempts = 1U << 10;  // then the count begins again

struct Immediate {
  std::uint32_t slot;
  std::uint32_t rail;
  std::uint32_t attempt;
  constexpr std::uint32_t pack() const noexcept { return slot << 16 | rail << 10 | attempt; }
  static constexpr Immediate unpack(std::uint32_t value) noexcept {
    return {value >> 16, value >> 10 & 0x3fU, value & (kAttempts - 1)};
  }
};

// Is attempt `a` after `b`, on the circle of kAttempts?
constexpr bool later_attempt(std::uint32_t a, std::uint32_t b) noexcept {
  const std::uint32_t ahead = (a - b) & (kAttempts - 1);
  return ahead != 0 && ahead < kAttempts / 2;
}

class ArrivalCounters {
 public:
  ArrivalCounters() : slots_(kMaxSlots) {}

  // The descriptor: this attempt ends on these rails (bit mask).
  void expect(std::uint32_t slot, std::uint32_t attempt, std::uint32_t rails) {
    Slot& s = slots_[slot];
    s.wanted = rails;
    s.wanted_attempt = attempt;
  }
  // False: no such slot, or a rail that the completion did not come on: the peer is broken.
  bool arrived(Immediate immediate, std::uint32_t rail) {
    if (immediate.slot >= kMaxSlots || immediate.rail != rail || rail >= kMaxRails) return false;
    Slot& s = slots_[immediate.slot];
    if (!s.any || later_attempt(immediate.attempt, s.seen_attempt)) {
      s.any = true;
      s.seen_attempt = immediate.attempt;
      s.seen = 0;
    }
    if (immediate.attempt == s.seen_attempt)
      s.seen |= 1U << rail;
    else
      ++stale_;
    return true;
  }
  bool complete(std::uint32_t slot) const {
    const Slot& s = slots_[slot];
    return s.wanted != 0 && s.any && s.seen_attempt == s.wanted_attempt &&
           (s.seen & s.wanted) == s.wanted;
  }
  void forget(std::uint32_t slot) { slots_[slot].wanted = 0; }
  std::uint64_t stale() const noexcept { return stale_; }

 private:
  struct Slot {
    std::uint32_t wanted = 0;  // rails; 0 = no descriptor
    std::uint32_t wanted_attempt = 0;
    bool any = false;
    std::uint32_t seen = 0;
    std::uint32_t seen_attempt = 0;
  };
  std::vector<Slot> slots_;
  std::uint64_t stale_ = 0;
};

}  // namespace kvcore::transport::rdma
