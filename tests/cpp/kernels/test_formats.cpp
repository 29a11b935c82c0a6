// Compressed head blocks: memory of exactly the right size (for the sanitizers), equal bytes at
// every level, round trips, refusals. Numbers are checked against the reference in tests/python.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "kernels/dispatch/table.h"
#include "kernels/formats/formats.h"

namespace kvcore::kernels {
namespace {

constexpr std::pair<Format, Part> kCodecs[] = {{Format::kInt8, Part::kK}, {Format::kInt8, Part::kV},
                                               {Format::kFp8, Part::kK},  {Format::kFp8, Part::kV},
                                               {Format::kK4, Part::kK},   {Format::kV4, Part::kV},
                                               {Format::kV3, Part::kV}};

class FormatLevels : public testing::Test {
 protected:
  ~FormatLevels() override { EXPECT_TRUE(set_isa(before_)); }

 private:
  std::string before_ = kernel_table().value()->name;
};

std::vector<float> random_rows(std::int64_t count) {
  std::mt19937 generator(7);
  std::normal_distribution<float> normal;
  std::vector<float> rows(static_cast<std::size_t>(count));
  for (float& x : rows) x = normal(generator);
  return rows;
}

// The upper halves of floats: bf16 by truncation.
std::vector<std::uint16_t> halves(const std::vector<float>& rows) {
  std::vector<std::uint16_t> out(rows.size());
  for (std::size_t i = 0; i < rows.size(); ++i) {
    std::uint32_t bits;
    std::memcpy(&bits, &rows[i], 4);
    out[i] = static_cast<std::uint16_t>(bits >> 16);
  }
  return out;
}

std::vector<std::byte> encoded(const BlockSpec& spec, const void* rows, DType dtype) {
  std::vector<std::byte> block(static_cast<std::size_t>(block_bytes(spec).value()));
  EXPECT_TRUE(encode_page_block(spec, rows, spec.dim, dtype, block));
  EXPECT_TRUE(check_block(spec, block));
  return block;
}

TEST_F(FormatLevels, EveryShapeAtEveryLevelGivesTheSameBytesAndComesBack) {
  for (const auto& [format, part] : kCodecs)
    for (const std::int64_t tokens : {16, 32, 64, 128})
      for (const std::int64_t dim : {8, 24, 64, 80, 120, 192, 256}) {
        const BlockSpec spec{format, part, tokens, dim};
        const std::vector<float> rows = random_rows(tokens * dim);
        const std::vector<std::uint16_t> small = halves(rows);
        std::vector<std::byte> first, first_small;
        for (const std::string& isa : available_isas()) {
          ASSERT_TRUE(set_isa(isa));
          const auto block = encoded(spec, rows.data(), DType::kF32);
          const auto block_small = encoded(spec, small.data(), DType::kBf16);
          if (first.empty()) first = block, first_small = block_small;
          EXPECT_EQ(block, first) << isa << " " << static_cast<int>(format) << " " << dim;
          EXPECT_EQ(block_small, first_small) << isa << " " << static_cast<int>(format);
          std::vector<float> back(rows.size());
          std::vector<std::uint16_t> back_small(small.size());
          ASSERT_TRUE(decode_page_block(spec, block, back.data(), dim, DType::kF32));
          ASSERT_TRUE(decode_page_block(spec, block_small, back_small.data(), dim, DType::kBf16));
          double error = 0, energy = 0;
          for (std::size_t i = 0; i < rows.size(); ++i) {
            error += std::pow(back[i] - rows[i], 2.0);
            energy += std::pow(rows[i], 2.0);
          }
          EXPECT_LT(error, 0.06 * energy) << isa << " " << static_cast<int>(format);
        }
      }
}

TEST(Formats, NumbersThatCannotBeKeptAreNamed) {
  for (const auto& [format, part] : kCodecs)
    for (const float bad : {std::numeric_limits<float>::quiet_NaN(),
                            std::numeric_limits<float>::infinity(), 65505.f}) {
      const BlockSpec spec{format, part, 16, 24};
      std::vector<float> rows = random_rows(16 * 24);
      rows[5 * 24 + 23] = bad;
      std::vector<std::byte> block(static_cast<std::size_t>(block_bytes(spec).value()));
      const Status done = encode_page_block(spec, rows.data(), 24, DType::kF32, block);
      ASSERT_FALSE(done);
      EXPECT_EQ(done.error().code, ErrorCode::kInvalidArgument);
      EXPECT_NE(done.error().message.find("[token 5][dim 23]"), std::string::npos)
          << done.error().message;
    }
}

TEST(Formats, OtherSizesOfBlocksAndRowsAreRefused) {
  const BlockSpec spec{Format::kK4, Part::kK, 16, 16};
  std::vector<std::byte> block(static_cast<std::size_t>(block_bytes(spec).value()));
  const std::vector<float> rows(256);
  const std::span<std::byte> shorter = std::span(block).first(block.size() - 64);
  EXPECT_FALSE(encode_page_block(spec, rows.data(), 16, DType::kF32, shorter));
  EXPECT_FALSE(encode_page_block(spec, rows.data(), 15, DType::kF32, block));
  EXPECT_FALSE(check_block(spec, shorter));
  EXPECT_FALSE(block_bytes({Format::kBf16, Part::kK, 16, 16}));
  EXPECT_FALSE(block_bytes({static_cast<Format>(99), Part::kK, 16, 16}));
}

TEST(Formats, ABlockOfZeroBytesIsDamaged) {
  for (const auto& [format, part] : kCodecs) {
    const BlockSpec spec{format, part, 32, 64};
    const std::vector<std::byte> block(static_cast<std::size_t>(block_bytes(spec).value()));
    const Status done = check_block(spec, block);
    ASSERT_FALSE(done);
    EXPECT_EQ(done.error().code, ErrorCode::kCorrupt);
  }
}

}  // namespace
}  // namespace kvcore::kernels
