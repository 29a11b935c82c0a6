// BLAKE2b (RFC 7693) with key and digest length: page keys (32 bytes) and message MACs.
// Same values as Python's hashlib.blake2b(data, key=..., digest_size=...).
// Thread rules: a Blake2b object belongs to one thread; copies are independent (a keyed object that
// is copied per message saves hashing the key block again).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "base/result.h"

namespace kvcore {

constexpr std::size_t kBlake2bMaxBytes = 64;
using Digest32 = std::array<std::byte, 32>;

class Blake2b {
 public:
  // key: 0 to 64 bytes; digest_bytes: 1 to 64.
  static Result<Blake2b> make(std::size_t digest_bytes, std::span<const std::byte> key = {});

  void update(std::span<const std::byte> data) noexcept;
  // Writes digest_bytes bytes; `out` must have exactly that size. The object is not used
  // afterwards.
  void finish(std::span<std::byte> out) noexcept;

 private:
  Blake2b(std::size_t digest_bytes, std::span<const std::byte> key) noexcept;
  void compress(const std::byte* block, bool last) noexcept;

  static constexpr std::size_t kBlock = 128;
  std::array<std::uint64_t, 8> h_;
  std::array<std::byte, kBlock> buffer_{};
  std::size_t buffered_ = 0;
  std::uint64_t hashed_ = 0;  // bytes; messages stay below 2^64
};

// The unkeyed or keyed 32-byte digest of one message; key at most 64 bytes.
Result<Digest32> blake2b_256(std::span<const std::byte> data, std::span<const std::byte> key = {});

}  // namespace kvcore
