// The sample of slices: whose turn it is, what is left out; its numbers are compared in Python.
#include "compress/page_meter.h"

#include <gtest/gtest.h>

#include <cstring>
#include <memory>

namespace kvcore::compress {
namespace {

using pages::PageSpec;
using pages::Pool;

constexpr std::uint8_t kOne = 0x3f;  // bf16 0x3f3f is about 0.75

class PageMeterTest : public testing::TestWithParam<std::int32_t> {
 protected:
  void SetUp() override {
    const auto spec = PageSpec::make({.num_layers = GetParam(),
                                      .num_kv_heads = 2,
                                      .head_dim_k = 80,
                                      .head_dim_v = 64,
                                      .page_size = 16,
                                      .extent_pages = 1});
    pool_ = Pool::make(*spec, 2, nullptr, false).value();
    pages_ = pool_->alloc(2).value();
    for (const std::int32_t page : pages_) fill(page, kOne);
  }
  void fill(std::int32_t page, std::uint8_t byte) {
    for (std::int32_t layer = 0; layer < GetParam(); ++layer)
      std::memset(pool_->slice(page, layer) + kSliceHeaderBytes, byte,
                  static_cast<std::size_t>(pool_->spec().slice_bytes() - kSliceHeaderBytes));
  }

  std::shared_ptr<Pool> pool_;
  std::vector<std::int32_t> pages_;
};

TEST_P(PageMeterTest, ARoundTakesSixtyFourPagesAndMeasuresEveryHead) {
  PageMeter meter(pool_->spec());
  for (std::int64_t i = 0; i < PageMeter::kSampleEvery; ++i) {
    EXPECT_EQ(meter.rounds(), 0);
    meter.pass(*pool_, pages_[0]);
  }
  EXPECT_EQ(meter.rounds(), 1);
  ASSERT_EQ(meter.means().size(), static_cast<std::size_t>(2 * GetParam()));
  for (const HeadMeans& head : meter.means()) {
    EXPECT_GT(head.key_square, 0.5);
    EXPECT_EQ(head.key_energy, std::vector<double>(80, 0));  // constant keys are their own mean
    EXPECT_EQ(head.key_error[0].size(), 80u);
    EXPECT_NEAR(head.value_energy, head.key_square * 64, 1e-6);
    EXPECT_GT(head.value_lost[0], head.value_lost[2]);  // v3 loses more than int8
  }
}

TEST_P(PageMeterTest, MeansAreOverRoundsAndBeginAnew) {
  PageMeter meter(pool_->spec());
  fill(pages_[1], 0x40);  // bf16 0x4040 = 3
  for (const std::int32_t page : pages_)
    for (std::int64_t i = 0; i < PageMeter::kSampleEvery; ++i) meter.pass(*pool_, page);
  EXPECT_EQ(meter.rounds(), 2);
  const double one = 0.74609375 * 0.74609375;
  for (const HeadMeans& head : meter.means()) EXPECT_NEAR(head.key_square, (one + 9) / 2, 1e-9);
  meter.restart();
  for (std::int64_t i = 0; i < PageMeter::kSampleEvery; ++i) meter.pass(*pool_, pages_[1]);
  for (const HeadMeans& head : meter.means()) EXPECT_NEAR(head.key_square, 9, 1e-9);
}

TEST_P(PageMeterTest, NumbersThatCannotBeEncodedAreLeftOut) {
  PageMeter meter(pool_->spec());
  fill(pages_[1], 0xff);  // NaN
  for (std::int64_t i = 0; i < 3 * PageMeter::kSampleEvery; ++i) meter.pass(*pool_, pages_[1]);
  EXPECT_EQ(meter.rounds(), 0);
  for (std::int64_t i = 0; i < PageMeter::kSampleEvery; ++i) meter.pass(*pool_, pages_[0]);
  EXPECT_EQ(meter.rounds(), 1);
  for (const HeadMeans& head : meter.means()) EXPECT_LT(head.key_square, 1);
}

INSTANTIATE_TEST_SUITE_P(Layers, PageMeterTest, testing::Values(1, 30, 80));

}  // namespace
}  // namespace kvcore::compress
