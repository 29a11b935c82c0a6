// Random bytes: unguessable ones from the operating system, or a seeded source as an injected
// dependency, so that a simulation with the same seed takes the same way. Thread rules: any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>

#include "base/result.h"

namespace kvcore {

Status secure_random(std::span<std::byte> out);

class RandomSource {
 public:
  virtual ~RandomSource() = default;
  virtual Status fill(std::span<std::byte> out) = 0;
};

class SystemRandom final : public RandomSource {
 public:
  Status fill(std::span<std::byte> out) override { return secure_random(out); }
};

// The fake of tests and simulations (splitmix64): guessable, never for keys or grants of real
// peers.
class SeededRandom final : public RandomSource {
 public:
  explicit SeededRandom(std::uint64_t seed) : state_(seed) {}
  Status fill(std::span<std::byte> out) override;

 private:
  std::mutex mutex_;
  std::uint64_t state_;
};

}  // namespace kvcore
