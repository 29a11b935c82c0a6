// What every fuzz target gives: one run over any bytes, and valid inputs to start from.
//
// A target is one file fuzz_<decoder>.cpp. It is built twice: by clang with libFuzzer (CMake option
// KVCORE_FUZZ, `make fuzz`), and by any compiler with replay.cpp, which runs the seeds, the kept
// corpus and seeded mutations of both as a normal test. A broken promise calls require(), which
// aborts, as a sanitizer report does. Thread rules: one thread.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <span>
#include <vector>

namespace kvcore::fuzz {

using Input = std::span<const std::byte>;
using Seed = std::vector<std::byte>;

void run(Input input);      // must return for any bytes
std::vector<Seed> seeds();  // inputs that reach deep

// The promise that a target checks.
inline void require(bool holds, const char* promise) {
  if (holds) return;
  std::fprintf(stderr, "broken promise: %s\n", promise);
  std::abort();
}

// The input as a stream of choices; zeros once it has ended.
class Choices {
 public:
  explicit Choices(Input in) : in_(in) {}
  template <class T = std::uint8_t>
  T number() {
    T value{};
    const Input part = bytes(sizeof value);
    std::memcpy(&value, part.data(), part.size());
    return value;
  }
  // Up to n bytes.
  Input bytes(std::size_t n) {
    const Input part = in_.first(std::min(n, in_.size()));
    in_ = in_.subspan(part.size());
    return part;
  }
  Input rest() { return bytes(in_.size()); }
  bool empty() const { return in_.empty(); }

 private:
  Input in_;
};

// Puts a seed together in the order in which Choices takes it apart.
class Builder {
 public:
  template <class T>
  Builder& number(T value) {
    return raw({reinterpret_cast<const std::byte*>(&value), sizeof value});
  }
  Builder& raw(Input part) {
    for (const std::byte b : part) out_.push_back(b);  // gcc 12 warns of a bulk insert, wrongly
    return *this;
  }
  Seed take() { return std::move(out_); }

 private:
  Seed out_;
};

}  // namespace kvcore::fuzz
