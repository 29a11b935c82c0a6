#include "base/xxh3.h"

#include <algorithm>
#include <bit>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvcore {
namespace {

static_assert(std::endian::native == std::endian::little, "loads below read little-endian words");

constexpr std::uint64_t kPrime32_1 = 0x9E3779B1u;
constexpr std::uint64_t kPrime32_2 = 0x85EBCA77u;
constexpr std::uint64_t kPrime32_3 = 0xC2B2AE3Du;
constexpr std::uint64_t kPrime64_1 = 0x9E3779B185EBCA87u;
constexpr std::uint64_t kPrime64_2 = 0xC2B2AE3D27D4EB4Fu;
constexpr std::uint64_t kPrime64_3 = 0x165667B19E3779F9u;
constexpr std::uint64_t kPrime64_4 = 0x85EBCA77C2B2AE63u;
constexpr std::uint64_t kPrime64_5 = 0x27D4EB2F165667C5u;

constexpr std::size_t kStripe = 64;
constexpr std::size_t kSecretBytes = 192;
constexpr std::size_t kStripesPerBlock = (kSecretBytes - kStripe) / 8;
constexpr std::size_t kShortest = 240;  // up to here the short forms apply

alignas(64) constexpr std::uint8_t kSecret[kSecretBytes] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e};

using Acc = std::array<std::uint64_t, 8>;
constexpr Acc kInitial = {kPrime32_3, kPrime64_1, kPrime64_2, kPrime64_3,
                          kPrime64_4, kPrime32_2, kPrime64_5, kPrime32_1};

template <class T>
T load(const void* p) noexcept {
  T value;
  std::memcpy(&value, p, sizeof(value));
  return value;
}
std::uint64_t word(const std::byte* p) noexcept { return load<std::uint64_t>(p); }
std::uint64_t secret(std::size_t offset) noexcept { return load<std::uint64_t>(kSecret + offset); }

std::uint64_t fold(std::uint64_t a, std::uint64_t b) noexcept {
  __extension__ using Wide = unsigned __int128;
  const Wide product = static_cast<Wide>(a) * b;
  return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
}

std::uint64_t avalanche(std::uint64_t h) noexcept {
  h ^= h >> 37;
  h *= 0x165667919E3779F9u;
  return h ^ (h >> 32);
}

std::uint64_t avalanche_xxh64(std::uint64_t h) noexcept {
  h ^= h >> 33;
  h *= kPrime64_2;
  h ^= h >> 29;
  h *= kPrime64_3;
  return h ^ (h >> 32);
}

std::uint64_t up_to_16(const std::byte* in, std::size_t n) noexcept {
  if (n > 8) {
    const std::uint64_t low = word(in) ^ (secret(24) ^ secret(32));
    const std::uint64_t high = word(in + n - 8) ^ (secret(40) ^ secret(48));
    return avalanche(n + __builtin_bswap64(low) + high + fold(low, high));
  }
  if (n >= 4) {
    const std::uint64_t first = load<std::uint32_t>(in);
    const std::uint64_t last = load<std::uint32_t>(in + n - 4);
    std::uint64_t h = (last + (first << 32)) ^ (secret(8) ^ secret(16));
    h ^= std::rotl(h, 49) ^ std::rotl(h, 24);
    h *= 0x9FB21C651E98DF25u;
    h ^= (h >> 35) + n;
    h *= 0x9FB21C651E98DF25u;
    return h ^ (h >> 28);
  }
  if (n == 0) return avalanche_xxh64(secret(56) ^ secret(64));
  const auto byte = [&](std::size_t i) { return static_cast<std::uint32_t>(in[i]); };
  const std::uint32_t combined =
      (byte(0) << 16) | (byte(n >> 1) << 24) | byte(n - 1) | (static_cast<std::uint32_t>(n) << 8);
  const std::uint32_t flip = load<std::uint32_t>(kSecret) ^ load<std::uint32_t>(kSecret + 4);
  return avalanche_xxh64(combined ^ flip);
}

std::uint64_t mix16(const std::byte* in, std::size_t at) noexcept {
  return fold(word(in) ^ secret(at), word(in + 8) ^ secret(at + 8));
}

std::uint64_t up_to_128(const std::byte* in, std::size_t n) noexcept {
  std::uint64_t acc = n * kPrime64_1;
  for (std::size_t i = (n - 1) / 32 + 1; i-- > 0;)
    acc += mix16(in + 16 * i, 32 * i) + mix16(in + n - 16 * (i + 1), 32 * i + 16);
  return avalanche(acc);
}

std::uint64_t up_to_240(const std::byte* in, std::size_t n) noexcept {
  std::uint64_t acc = n * kPrime64_1;
  for (std::size_t i = 0; i < 8; ++i) acc += mix16(in + 16 * i, 16 * i);
  acc = avalanche(acc) + mix16(in + n - 16, 136 - 17);
  for (std::size_t i = 8; i < n / 16; ++i) acc += mix16(in + 16 * i, 16 * (i - 8) + 3);
  return avalanche(acc);
}

void accumulate(Acc& acc, const std::byte* in, std::size_t at) noexcept {
  for (std::size_t i = 0; i < 8; ++i) {
    const std::uint64_t value = word(in + 8 * i);
    const std::uint64_t key = value ^ secret(at + 8 * i);
    acc[i ^ 1] += value;
    acc[i] += (key & 0xFFFFFFFFu) * (key >> 32);
  }
}

void scramble(Acc& acc) noexcept {
  for (std::size_t i = 0; i < 8; ++i)
    acc[i] = (acc[i] ^ (acc[i] >> 47) ^ secret(kSecretBytes - kStripe + 8 * i)) * kPrime32_1;
}

// `count` stripes from `in`; the place inside the block goes on from stripes_in_block.
void consume_plain(Acc& acc, std::size_t& stripes_in_block, const std::byte* in,
                     std::size_t count) noexcept {
  Acc local = acc;
  for (std::size_t i = 0; i < count; ++i) {
    accumulate(local, in + i * kStripe, stripes_in_block * 8);
    if (++stripes_in_block == kStripesPerBlock) {
      scramble(local);
      stripes_in_block = 0;
    }
  }
  acc = local;
}

#if defined(__x86_64__)
[[gnu::target("avx2"), gnu::always_inline]] inline __m256i load256(const void* p) noexcept {
  return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}

// The same on two vectors of four words.
[[gnu::target("avx2")]] void consume_avx2(Acc& acc, std::size_t& stripes_in_block,
                                          const std::byte* in, std::size_t count) noexcept {
  constexpr std::size_t kPrefetch = 512;
  const __m256i prime = _mm256_set1_epi64x(kPrime32_1);
  __m256i sums[2] = {load256(acc.data()), load256(acc.data() + 4)};
  for (std::size_t i = 0; i < count; ++i, in += kStripe) {
    _mm_prefetch(reinterpret_cast<const char*>(in) + kPrefetch, _MM_HINT_T0);
    for (std::size_t half = 0; half < 2; ++half) {
      const __m256i value = load256(in + 32 * half);
      const __m256i key =
          _mm256_xor_si256(value, load256(kSecret + stripes_in_block * 8 + 32 * half));
      const __m256i product = _mm256_mul_epu32(key, _mm256_srli_epi64(key, 32));
      const __m256i swapped = _mm256_shuffle_epi32(value, _MM_SHUFFLE(1, 0, 3, 2));
      sums[half] = _mm256_add_epi64(sums[half], _mm256_add_epi64(product, swapped));
    }
    if (++stripes_in_block < kStripesPerBlock) continue;
    stripes_in_block = 0;
    for (std::size_t half = 0; half < 2; ++half) {
      __m256i x = _mm256_xor_si256(sums[half], _mm256_srli_epi64(sums[half], 47));
      x = _mm256_xor_si256(x, load256(kSecret + kSecretBytes - kStripe + 32 * half));
      const __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), prime);
      sums[half] = _mm256_add_epi64(_mm256_mul_epu32(x, prime), _mm256_slli_epi64(high, 32));
    }
  }
  for (std::size_t half = 0; half < 2; ++half)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(acc.data() + 4 * half), sums[half]);
}
#endif

void consume_stripes(Acc& acc, std::size_t& stripes_in_block, const std::byte* in,
                     std::size_t count) noexcept {
#if defined(__x86_64__)
  static const bool has_avx2 = __builtin_cpu_supports("avx2") != 0;
  if (has_avx2) return consume_avx2(acc, stripes_in_block, in, count);
#endif
  consume_plain(acc, stripes_in_block, in, count);
}

std::uint64_t finish(Acc acc, const std::byte* last_stripe, std::uint64_t total) noexcept {
  accumulate(acc, last_stripe, kSecretBytes - kStripe - 7);
  std::uint64_t h = total * kPrime64_1;
  for (std::size_t i = 0; i < 4; ++i)
    h += fold(acc[2 * i] ^ secret(11 + 16 * i), acc[2 * i + 1] ^ secret(11 + 16 * i + 8));
  return avalanche(h);
}

std::uint64_t short_form(const std::byte* in, std::size_t n) noexcept {
  return n <= 16 ? up_to_16(in, n) : n <= 128 ? up_to_128(in, n) : up_to_240(in, n);
}

}  // namespace

std::uint64_t xxh3_64(std::span<const std::byte> data) noexcept {
  const std::size_t n = data.size();
  if (n <= kShortest) return short_form(data.data(), n);
  Acc acc = kInitial;
  std::size_t stripes_in_block = 0;
  consume_stripes(acc, stripes_in_block, data.data(), (n - 1) / kStripe);
  return finish(acc, data.data() + n - kStripe, n);
}

Xxh3::Xxh3() noexcept : acc_(kInitial) {}

void Xxh3::consume(const std::byte* stripes, std::size_t count) noexcept {
  consume_stripes(acc_, stripes_in_block_, stripes, count);
}

void Xxh3::update(std::span<const std::byte> data) noexcept {
  total_ += data.size();
  if (data.empty()) return;
  if (buffered_ + data.size() <= kBuffer) {
    std::memcpy(buffer_.data() + buffered_, data.data(), data.size());
    buffered_ += data.size();
    return;
  }
  if (buffered_ > 0) {
    const std::size_t fill = kBuffer - buffered_;
    std::memcpy(buffer_.data() + buffered_, data.data(), fill);
    consume(buffer_.data(), kBuffer / kStripe);
    data = data.subspan(fill);
  }
  if (data.size() > kBuffer) {  // straight from the input, but the last stripe stays behind
    const std::size_t stripes = (data.size() - 1) / kStripe;
    consume(data.data(), stripes);
    std::memcpy(buffer_.data() + kBuffer - kStripe, data.data() + (stripes - 1) * kStripe, kStripe);
    data = data.subspan(stripes * kStripe);
  }
  std::memcpy(buffer_.data(), data.data(), data.size());
  buffered_ = data.size();
}

std::uint64_t Xxh3::digest() const noexcept {
  if (total_ <= kShortest) return short_form(buffer_.data(), static_cast<std::size_t>(total_));
  Acc acc = acc_;
  std::size_t stripes_in_block = stripes_in_block_;
  std::array<std::byte, kStripe> last;
  if (buffered_ >= kStripe) {
    consume_stripes(acc, stripes_in_block, buffer_.data(), (buffered_ - 1) / kStripe);
    std::memcpy(last.data(), buffer_.data() + buffered_ - kStripe, kStripe);
  } else {  // the rest of the last stripe lies at the buffer's end, from the bytes before
    const std::size_t missing = kStripe - buffered_;
    std::memcpy(last.data(), buffer_.data() + kBuffer - missing, missing);
    std::memcpy(last.data() + missing, buffer_.data(), buffered_);
  }
  return finish(acc, last.data(), total_);
}

}  // namespace kvcore
