// XXH3, 64 bits, seed 0, default secret: the checksum of slices. Not a cryptographic hash: it finds
// accidents, not attackers (those meet the MAC of csrc/wire). Same values as the reference library.
// Thread rules: xxh3_64 is pure; an Xxh3 object belongs to one thread.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace kvcore {

std::uint64_t xxh3_64(std::span<const std::byte> data) noexcept;
inline std::uint64_t xxh3_64(const void* data, std::size_t bytes) noexcept {
  return xxh3_64({static_cast<const std::byte*>(data), bytes});
}

// The same value over bytes that come in pieces.
class Xxh3 {
 public:
  Xxh3() noexcept;
  void update(std::span<const std::byte> data) noexcept;
  std::uint64_t digest() const noexcept;

 private:
  static constexpr std::size_t kBuffer = 256;
  void consume(const std::byte* stripes, std::size_t count) noexcept;

  alignas(64) std::array<std::uint64_t, 8> acc_;
  std::array<std::byte, kBuffer>
      buffer_{};  // the last bytes seen; never emptied before more follow
  std::size_t buffered_ = 0;
  std::size_t stripes_in_block_ = 0;
  std::uint64_t total_ = 0;
};

}  // namespace kvcore
