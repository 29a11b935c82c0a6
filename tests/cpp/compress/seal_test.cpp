// Sealing in every shape, for the sanitizers: what is in the blocks is compared in Python.
#include "compress/seal.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstring>
#include <random>
#include <vector>

#include "base/xxh3.h"

namespace kvcore::compress {
namespace {

using pages::HeadFormats;
using pages::PageClass;
using pages::PageSpec;
using pages::Pool;

constexpr std::int32_t kLayers = 2;
constexpr std::int32_t kHeads = 3;

std::shared_ptr<Pool> pool_of(std::int32_t page_size, std::int32_t dim, Format own) {
  const auto spec = PageSpec::make({.num_layers = kLayers,
                                    .num_kv_heads = kHeads,
                                    .head_dim_k = dim,
                                    .head_dim_v = dim,
                                    .page_size = page_size,
                                    .extent_pages = 2,
                                    .format = own});
  return Pool::make(*spec, 4, nullptr, false, 40).value();
}

std::int32_t add_class(Pool& pool) {
  const Format own = pool.spec().options().format;
  const std::vector<HeadFormats> table = {
      {Format::kK4, Format::kV4}, {Format::kInt8, Format::kV3}, {own, Format::kFp8},
      {Format::kFp8, own},        {Format::kK4, Format::kInt8}, {Format::kK4, Format::kV3}};
  return pool.add_class(PageClass::make(pool.spec(), table).value()).value();
}

// Numbers about 1 everywhere, in any of the formats.
void fill(const Pool& pool, std::int32_t page, std::mt19937& rng) {
  const Format own = pool.spec().options().format;
  for (std::int32_t layer = 0; layer < kLayers; ++layer) {
    std::byte* slice = pool.slice(page, layer);
    for (std::int64_t at = 0; at < pool.spec().slice_bytes(); at += 4) {
      const auto bits = static_cast<std::uint32_t>(rng());
      const std::uint32_t word = own == Format::kF32 ? 0x3f000000u | (bits & 0x7fffffu)
                                                     : 0x3c003c00u | (bits & 0x01ff01ffu);
      std::memcpy(slice + at, &word, sizeof word);
    }
  }
}

TEST(Seal, EveryShapeAndFormat) {
  std::mt19937 rng(1);
  for (const std::int32_t page_size : {16, 32, 64, 128}) {
    for (const std::int32_t dim : {16, 80, 256}) {
      for (const Format own : {Format::kBf16, Format::kF16, Format::kF32}) {
        const auto pool = pool_of(page_size, dim, own);
        const std::int32_t number = add_class(*pool);
        auto pages = pool->alloc(3, 1).value();
        pages.push_back(pool->alloc(2).value().front());
        for (const std::int32_t page : pages) fill(*pool, page, rng);
        const Status status = seal_pages(*pool, pages, number);
        ASSERT_TRUE(status.ok()) << status.error().message;
        for (const std::int32_t page : pages)
          EXPECT_EQ(pool->place(page).value().class_number, number);
      }
    }
  }
}

TEST(Seal, HeadersNameTheClassAndSumTheSlice) {
  std::mt19937 rng(2);
  const auto pool = pool_of(64, 64, Format::kBf16);
  const std::int32_t number = add_class(*pool);
  const auto pages = pool->alloc(1, 1).value();
  fill(*pool, pages[0], rng);
  ASSERT_TRUE(seal_pages(*pool, pages, number).ok());
  for (std::int32_t layer = 0; layer < kLayers; ++layer) {
    const auto bytes = pool->page_class(number).value().slice_bytes(layer);
    std::vector<std::byte> slice(pool->slice(pages[0], layer),
                                 pool->slice(pages[0], layer) + bytes);
    SliceHeader header;
    std::memcpy(&header, slice.data(), sizeof header);
    EXPECT_EQ(header.magic, kSliceMagic);
    EXPECT_EQ(header.class_id, static_cast<std::uint32_t>(number));
    EXPECT_EQ(header.layer, layer);
    EXPECT_EQ(header.valid_tokens, 64);
    EXPECT_EQ(header.format, layer == 0 ? Format::kK4 : Format::kFp8);
    EXPECT_EQ(header.layout, LayoutId::kPacked);
    std::memset(slice.data() + offsetof(SliceHeader, checksum), 0, sizeof header.checksum);
    EXPECT_EQ(header.checksum, xxh3_64(slice));
  }
}

}  // namespace
}  // namespace kvcore::compress
