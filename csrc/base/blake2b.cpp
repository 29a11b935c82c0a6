#include "base/blake2b.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/text.h"

namespace kvcore {
namespace {

static_assert(std::endian::native == std::endian::little, "words below are loaded little-endian");

constexpr std::array<std::uint64_t, 8> kInitial = {
    0x6a09e667f3bcc908u, 0xbb67ae8584caa73bu, 0x3c6ef372fe94f82bu, 0xa54ff53a5f1d36f1u,
    0x510e527fade682d1u, 0x9b05688c2b3e6c1fu, 0x1f83d9abfb41bd6bu, 0x5be0cd19137e2179u};

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

inline void mix(std::uint64_t& a, std::uint64_t& b, std::uint64_t& c, std::uint64_t& d,
                std::uint64_t x, std::uint64_t y) noexcept {
  a += b + x;
  d = std::rotr(d ^ a, 32);
  c += d;
  b = std::rotr(b ^ c, 24);
  a += b + y;
  d = std::rotr(d ^ a, 16);
  c += d;
  b = std::rotr(b ^ c, 63);
}

}  // namespace

Result<Blake2b> Blake2b::make(std::size_t digest_bytes, std::span<const std::byte> key) {
  if (digest_bytes < 1 || digest_bytes > kBlake2bMaxBytes)
    return invalid_argument(
        text("digest_bytes=", digest_bytes, " is out of range: allowed 1 to 64"));
  if (key.size() > kBlake2bMaxBytes)
    return invalid_argument(text("key has ", key.size(), " bytes: allowed 0 to 64"));
  return Blake2b(digest_bytes, key);
}

Blake2b::Blake2b(std::size_t digest_bytes, std::span<const std::byte> key) noexcept : h_(kInitial) {
  h_[0] ^= 0x01010000u ^ (key.size() << 8) ^ digest_bytes;
  if (key.empty()) return;
  std::array<std::byte, kBlock> block{};
  std::copy(key.begin(), key.end(), block.begin());
  update(block);
}

void Blake2b::update(std::span<const std::byte> data) noexcept {
  while (!data.empty()) {
    if (buffered_ == kBlock) {  // only now is it known not to be the last block
      hashed_ += kBlock;
      compress(buffer_.data(), false);
      buffered_ = 0;
    }
    const std::size_t take = std::min(kBlock - buffered_, data.size());
    std::memcpy(buffer_.data() + buffered_, data.data(), take);
    buffered_ += take;
    data = data.subspan(take);
  }
}

void Blake2b::finish(std::span<std::byte> out) noexcept {
  hashed_ += buffered_;
  std::fill(buffer_.begin() + static_cast<std::ptrdiff_t>(buffered_), buffer_.end(), std::byte{0});
  compress(buffer_.data(), true);
  std::memcpy(out.data(), h_.data(), std::min(out.size(), sizeof(h_)));
}

void Blake2b::compress(const std::byte* block, bool last) noexcept {
  std::uint64_t m[16];
  std::memcpy(m, block, sizeof(m));
  std::uint64_t v[16];
  std::copy(h_.begin(), h_.end(), v);
  std::copy(kInitial.begin(), kInitial.end(), v + 8);
  v[12] ^= hashed_;
  if (last) v[14] = ~v[14];
#pragma GCC unroll 12
  for (const auto& s : kSigma) {  // unrolled, so that the permutations are constants
    mix(v[0], v[4], v[8], v[12], m[s[0]], m[s[1]]);
    mix(v[1], v[5], v[9], v[13], m[s[2]], m[s[3]]);
    mix(v[2], v[6], v[10], v[14], m[s[4]], m[s[5]]);
    mix(v[3], v[7], v[11], v[15], m[s[6]], m[s[7]]);
    mix(v[0], v[5], v[10], v[15], m[s[8]], m[s[9]]);
    mix(v[1], v[6], v[11], v[12], m[s[10]], m[s[11]]);
    mix(v[2], v[7], v[8], v[13], m[s[12]], m[s[13]]);
    mix(v[3], v[4], v[9], v[14], m[s[14]], m[s[15]]);
  }
  for (std::size_t i = 0; i < 8; ++i) h_[i] ^= v[i] ^ v[i + 8];
}

Result<Digest32> blake2b_256(std::span<const std::byte> data, std::span<const std::byte> key) {
  KVCORE_ASSIGN_OR_RETURN(Blake2b hash, Blake2b::make(32, key));
  hash.update(data);
  Digest32 digest;
  hash.finish(digest);
  return digest;
}

}  // namespace kvcore
