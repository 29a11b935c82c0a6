// BLAKE2b (RFC 7693), keyed, digest length 1..64. Golden vectors: Python's hashlib.blake2b.
// Thread rules: a plain value; one hash at a time per object.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace kvcore {

class Blake2b {
 public:
  // digest_bytes in [1, 64], key at most 64 bytes: both are the caller's constants, asserted.
  explicit Blake2b(std::size_t digest_bytes, std::span<const std::byte> key = {}) noexcept;
  void update(std::span<const std::byte> data) noexcept;
  void final(
      std::span<std::byte> digest) noexcept;  // digest.size() == digest_bytes; ends the object

 private:
  void compress(bool last) noexcept;

  std::array<std::uint64_t, 8> h_;
  std::uint64_t total_ = 0;  // bytes hashed (2^64 is enough for us; RFC allows 2^128)
  std::array<std::byte, 128> block_{};
  std::size_t fill_ = 0;
  std::size_t digest_bytes_;
};

template <std::size_t N>
std::array<std::byte, N> blake2b(std::span<const std::byte> data,
                                 std::span<const std::byte> key = {}) noexcept {
  Blake2b hash(N, key);
  hash.update(data);
  std::array<std::byte, N> out;
  hash.final(out);
  return out;
}

}  // namespace kvcore
