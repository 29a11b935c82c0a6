// Values come from PyPI xxhash and hashlib (tests/python/base/golden has the full tables).
#include <gtest/gtest.h>

#include <cstdio>
#include <string>
#include <vector>

#include "base/blake2b.h"
#include "base/xxh3.h"

namespace kvcore {
namespace {

std::vector<std::byte> golden_data(std::size_t length) {
  std::vector<std::byte> out(length);
  std::uint32_t state = 12345;
  for (std::byte& b : out) {
    state = (state * 1103515245u + 12345u) & 0x7FFFFFFFu;
    b = static_cast<std::byte>(state >> 16 & 0xFF);
  }
  return out;
}

std::string hex(std::span<const std::byte> bytes) {
  std::string out;
  for (const std::byte b : bytes) {
    char two[3];
    std::snprintf(two, sizeof(two), "%02x", static_cast<unsigned>(b));
    out += two;
  }
  return out;
}

struct Golden {
  std::size_t length;
  std::uint64_t digest;
};
constexpr Golden kXxh3[] = {
    {0, 0x2d06800538d394c2u},    {1, 0xb95d064157e4a8b4u},    {3, 0x4b2bf643aad9977cu},
    {4, 0x1a322462ca4049e4u},    {8, 0x7b6cbf2b8364e41du},    {9, 0x89efc25121f13282u},
    {16, 0x65140316743838f8u},   {17, 0xd15eb938f2b03cd0u},   {128, 0xb9c0abe395dfa8a1u},
    {129, 0x5ecbf4005614dab4u},  {240, 0x084e5622e8f1d582u},  {241, 0xe458863ec159b424u},
    {1024, 0xc5eb3b0e7580130fu}, {1025, 0x40846007943e297du}, {5000, 0x0420ed15c973d820u}};

TEST(Xxh3, EqualsTheReferenceValues) {
  const auto data = golden_data(5000);
  for (const Golden& g : kXxh3) EXPECT_EQ(xxh3_64(data.data(), g.length), g.digest) << g.length;
}

TEST(Xxh3, PiecesOfAnySizeGiveTheSameValue) {
  const auto data = golden_data(5000);
  for (const std::size_t piece : {1u, 7u, 63u, 64u, 65u, 255u, 256u, 257u, 1000u}) {
    for (const std::size_t length : {0u, 200u, 241u, 256u, 257u, 320u, 1024u, 1087u, 5000u}) {
      Xxh3 hash;
      for (std::size_t at = 0; at < length; at += piece)
        hash.update(std::span(data).subspan(at, std::min(piece, length - at)));
      EXPECT_EQ(hash.digest(), xxh3_64(data.data(), length)) << piece << " " << length;
    }
  }
}

TEST(Xxh3, EveryFlippedBitOfASliceShows) {
  auto data = golden_data(320);
  const std::uint64_t before = xxh3_64(data);
  for (std::size_t bit = 0; bit < data.size() * 8; ++bit) {
    data[bit / 8] ^= static_cast<std::byte>(1 << (bit % 8));
    EXPECT_NE(xxh3_64(data), before) << bit;
    data[bit / 8] ^= static_cast<std::byte>(1 << (bit % 8));
  }
}

TEST(Blake2b, EqualsTheReferenceValues) {
  const char abc[] = {'a', 'b', 'c'};
  EXPECT_EQ(hex(blake2b_256(std::as_bytes(std::span(abc))).value()),
            "bddd813c634239723171ef3fee98579b94964e3bb1cb3e427262c8c068d52319");
  const auto data = golden_data(300);
  Blake2b hash = Blake2b::make(64, std::span(data).first(64)).value();
  for (const std::byte& b : data) hash.update(std::span(&b, 1));
  std::byte out[64];
  hash.finish(out);
  EXPECT_EQ(hex(out),
            "47f7cdba3e67fa7cd91e14ace8effa9b55bde09868ca80ef6ed6e1c65543ed03"
            "8f695781deb03cc0f9e6661221f1eadfd0a967d7ffcbdb120323917d66ef7b44");
}

TEST(Blake2b, RefusesSizesOutOfRange) {
  const auto data = golden_data(65);
  EXPECT_EQ(Blake2b::make(0).error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(Blake2b::make(65).error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(Blake2b::make(32, data).error().message, "key has 65 bytes: allowed 0 to 64");
}

}  // namespace
}  // namespace kvcore
