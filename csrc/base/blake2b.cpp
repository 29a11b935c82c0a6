#include "base/blake2b.h"

#include <algorithm>
#include <bit>
#include <cassert>
#include <cstring>

namespace kvcore {
namespace {

constexpr std::array<std::uint64_t, 8> kIv = {
    0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1,
    0x510e527fade682d1, 0x9b05688c2b3e6c1f, 0x1f83d9abfb41bd6b, 0x5be0cd19137e2179};

constexpr std::uint8_t kSigma[12][16] = {{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
                                         {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
                                         {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4},
                                         {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
                                         {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13},
                                         {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
                                         {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11},
                                         {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
                                         {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5},
                                         {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0},
                                         {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
                                         {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3}};

inline void mix(std::uint64_t* v, int a, int b, int c, int d, std::uint64_t x, std::uint64_t y) {
  v[a] += v[b] + x;
  v[d] = std::rotr(v[d] ^ v[a], 32);
  v[c] += v[d];
  v[b] = std::rotr(v[b] ^ v[c], 24);
  v[a] += v[b] + y;
  v[d] = std::rotr(v[d] ^ v[a], 16);
  v[c] += v[d];
  v[b] = std::rotr(v[b] ^ v[c], 63);
}

std::uint64_t load_le64(const std::byte* p) noexcept {
  std::uint64_t value = 0;
  for (int i = 0; i < 8; ++i) value |= static_cast<std::uint64_t>(p[i]) << (8 * i);
  return value;
}

}  // namespace

Blake2b::Blake2b(std::size_t digest_bytes, std::span<const std::byte> key) noexcept
    : h_(kIv), digest_bytes_(digest_bytes) {
  assert(digest_bytes >= 1 && digest_bytes <= 64 && key.size() <= 64);
  h_[0] ^= 0x01010000ULL ^ (static_cast<std::uint64_t>(key.size()) << 8) ^ digest_bytes;
  if (!key.empty()) {
    std::memcpy(block_.data(), key.data(), key.size());
    fill_ = block_.size();
  }
}

void Blake2b::compress(bool last) noexcept {
  std::uint64_t m[16];
  std::uint64_t v[16];
  for (std::size_t i = 0; i < 16; ++i) m[i] = load_le64(block_.data() + 8 * i);
  for (std::size_t i = 0; i < 8; ++i) {
    v[i] = h_[i];
    v[i + 8] = kIv[i];
  }
  v[12] ^= total_;
  if (last) v[14] = ~v[14];
  for (const auto& s : kSigma) {
    mix(v, 0, 4, 8, 12, m[s[0]], m[s[1]]);
    mix(v, 1, 5, 9, 13, m[s[2]], m[s[3]]);
    mix(v, 2, 6, 10, 14, m[s[4]], m[s[5]]);
    mix(v, 3, 7, 11, 15, m[s[6]], m[s[7]]);
    mix(v, 0, 5, 10, 15, m[s[8]], m[s[9]]);
    mix(v, 1, 6, 11, 12, m[s[10]], m[s[11]]);
    mix(v, 2, 7, 8, 13, m[s[12]], m[s[13]]);
    mix(v, 3, 4, 9, 14, m[s[14]], m[s[15]]);
  }
  for (std::size_t i = 0; i < 8; ++i) h_[i] ^= v[i] ^ v[i + 8];
}

void Blake2b::update(std::span<const std::byte> data) noexcept {
  while (!data.empty()) {
    if (fill_ == block_.size()) {  // never compress the last block before final
      total_ += fill_;
      compress(false);
      fill_ = 0;
    }
    const std::size_t n = std::min(block_.size() - fill_, data.size());
    std::memcpy(block_.data() + fill_, data.data(), n);
    fill_ += n;
    data = data.subspan(n);
  }
}

void Blake2b::final(std::span<std::byte> digest) noexcept {
  assert(digest.size() == digest_bytes_);
  total_ += fill_;
  std::memset(block_.data() + fill_, 0, block_.size() - fill_);
  compress(true);
  for (std::size_t i = 0; i < digest.size(); ++i)
    digest[i] = static_cast<std::byte>(h_[i / 8] >> (8 * (i % 8)));
}

}  // namespace kvcore
