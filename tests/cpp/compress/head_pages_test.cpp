// Pruned sequences in every shape, for the sanitizers: contents are compared in Python.
#include "compress/head_pages.h"

#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "compress/head_attention.h"
#include "compress/seal.h"

namespace kvcore::compress {
namespace {

using pages::HeadFormats;
using pages::PageClass;
using pages::PageSpec;
using pages::PageSpecOptions;
using pages::Pool;

constexpr std::int32_t kLayers = 2, kHeads = 3;

PageSpecOptions options(std::int32_t page_size, std::int32_t dim, Format format) {
  PageSpecOptions o;
  o.num_layers = kLayers;
  o.num_kv_heads = kHeads;
  o.head_dim_k = o.head_dim_v = dim;
  o.page_size = page_size;
  o.extent_pages = 2;
  o.format = format;
  return o;
}

std::shared_ptr<Pool> source_pool(const PageSpecOptions& o) {
  auto pool = Pool::make(*PageSpec::make(o), 4, nullptr, false).value();
  std::mt19937 rng(1);  // numbers about 1 in any of the formats
  for (std::int64_t at = 0; at < pool->arena()->bytes(); at += 4) {
    const auto bits = static_cast<std::uint32_t>(rng());
    const std::uint32_t word = o.format == Format::kF32 ? 0x3f000000u | (bits & 0x7fffffu)
                                                        : 0x3c003c00u | (bits & 0x01ff01ffu);
    std::memcpy(pool->arena()->data() + at, &word, sizeof word);
  }
  return pool;
}

std::shared_ptr<Pool> head_pool(PageSpecOptions o, std::int64_t num_pages) {
  o.num_layers = o.num_kv_heads = o.extent_pages = 1;
  o.align_bytes = 64;
  return Pool::make(*PageSpec::make(o), num_pages, nullptr, false, 4 * num_pages).value();
}

// Head i keeps every (i + 1)-th token; the last one keeps none.
struct Kept {
  explicit Kept(std::int32_t tokens) : offsets{0} {
    for (std::int32_t i = 0; i < kLayers * kHeads; ++i) {
      for (std::int32_t t = 0; t < tokens && i + 1 < kLayers * kHeads; t += i + 1)
        positions.push_back(t);
      offsets.push_back(static_cast<std::int64_t>(positions.size()));
    }
  }
  KeptTokens view() const { return {positions, offsets}; }
  std::vector<std::int32_t> positions;
  std::vector<std::int64_t> offsets;
};

TEST(HeadPages, EveryShapeIsCompactedSealedAndAttendedTo) {
  for (const std::int32_t page_size : {16, 32, 64, 128}) {
    for (const std::int32_t dim : {16, 80, 256}) {
      for (const Format format : {Format::kBf16, Format::kF16, Format::kF32}) {
        const PageSpecOptions o = options(page_size, dim, format);
        const auto source = source_pool(o);
        const std::vector<std::int32_t> held = source->alloc(5).value();
        const auto pool = head_pool(o, 40);
        const std::int32_t tokens = 4 * page_size + 3;
        auto heads = compact(*source, held, tokens, Kept(tokens).view(), pool).value();
        const std::int32_t number =
            pool->add_class(
                    PageClass::make(pool->spec(), std::array{HeadFormats{Format::kK4, Format::kV4}})
                        .value())
                .value();
        EXPECT_EQ(heads->seal(std::vector<std::int32_t>(6, number)).value(), 4);
        ASSERT_TRUE(heads->grow(2).ok());
        const auto plan = HeadAttention::make(pool, kLayers, kHeads, 2 * kHeads).value();
        ASSERT_TRUE(plan->prepare(std::array{heads}, std::array{0, 2}).ok());
        const std::vector<float> rows(static_cast<std::size_t>(2 * 2 * kHeads * dim), 0.5f);
        std::vector<float> out(rows.size());
        const std::int64_t q_width = 2 * kHeads * dim, width = kHeads * dim;
        const auto* data = reinterpret_cast<const char*>(rows.data());
        for (std::int32_t layer = 0; layer < kLayers; ++layer) {
          ASSERT_TRUE(plan->append(layer, {data, width}, {data, width}, DType::kF32).ok());
          ASSERT_TRUE(
              plan->attend(layer, {rows.data(), q_width, out.data(), q_width, nullptr, DType::kF32})
                  .ok());
        }
        EXPECT_FLOAT_EQ(out.back(), 0.5f);  // the last head of layer 1 holds new tokens only
        EXPECT_FALSE(plan->attend(kLayers, {}).ok());
        heads.reset();
        EXPECT_EQ(pool->stats().held_pages, 0);
      }
    }
  }
}

TEST(HeadPages, WrongTokensAreRefusedAndNothingIsTaken) {
  const PageSpecOptions o = options(16, 64, Format::kBf16);
  const auto source = source_pool(o);
  const std::vector<std::int32_t> held = source->alloc(2).value();
  const auto pool = head_pool(o, 4);
  const auto refused = [&](const Kept& kept, std::int64_t tokens, ErrorCode code) {
    const auto got = compact(*source, held, tokens, kept.view(), pool);
    ASSERT_FALSE(got.ok());
    EXPECT_EQ(got.error().code, code) << got.error().message;
    EXPECT_EQ(pool->stats().held_pages, 0);
  };
  refused(Kept(32), 31, ErrorCode::kInvalidArgument);
  refused(Kept(32), 33, ErrorCode::kInvalidArgument);
  refused(Kept(32), 32, ErrorCode::kOutOfPages);
  Kept wrong(8);
  std::swap(wrong.positions[2], wrong.positions[3]);
  refused(wrong, 32, ErrorCode::kInvalidArgument);
  for (const std::int64_t offset : {-1, 99, 7}) {  // 7: below the one before
    wrong = Kept(8);
    wrong.offsets[2] = offset;
    refused(wrong, 32, ErrorCode::kInvalidArgument);
  }
  wrong = Kept(8);
  wrong.offsets.pop_back();
  refused(wrong, 32, ErrorCode::kInvalidArgument);
}

}  // namespace
}  // namespace kvcore::compress
