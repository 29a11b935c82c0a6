// The queue of pages to be sealed: who may read what, what is passed over, what is refused.
#include "compress/sealer.h"

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <vector>

namespace kvcore::compress {
namespace {

using pages::HeadFormats;
using pages::PageClass;
using pages::PageSpec;
using pages::Pool;

constexpr std::int32_t kOpen = 0, kBalanced = 1, kSmall = 2;

PageClass class_of(const PageSpec& spec, Format v) {
  return PageClass::make(spec, std::vector<HeadFormats>{{Format::kK4, v}}).value();
}

class SealerTest : public testing::Test {
 protected:
  void SetUp() override {
    const auto spec = PageSpec::make({.num_layers = 1,
                                      .num_kv_heads = 1,
                                      .head_dim_k = 64,
                                      .head_dim_v = 64,
                                      .page_size = 64,
                                      .extent_pages = 2});
    pool_ = Pool::make(*spec, 8, nullptr, false, 60).value();
    const std::vector<PageClass> classes = {class_of(*spec, Format::kV4),
                                            class_of(*spec, Format::kV3)};
    sealer_ = Sealer::make(pool_, classes, true).value();
    pages_ = pool_->alloc(4, 1).value();
    for (const std::int32_t page : pages_)
      std::memset(pool_->slice(page, 0), 0x3c,
                  static_cast<std::size_t>(pool_->spec().page_bytes()));
  }
  std::int32_t class_now(std::size_t i) { return pool_->place(pages_[i]).value().class_number; }

  std::shared_ptr<Pool> pool_;
  std::unique_ptr<Sealer> sealer_;
  std::vector<std::int32_t> pages_;
};

TEST_F(SealerTest, PagesAreQueuedOnceAndSealedInOrder) {
  EXPECT_EQ(sealer_->add(pages_, 0, false).value(), 4);
  EXPECT_EQ(sealer_->add(pages_, kBalanced, false).value(), 0);
  EXPECT_EQ(sealer_->run(3).value(), 3);
  EXPECT_EQ(class_now(2), 2);
  EXPECT_EQ(class_now(3), 0);
  sealer_->set_step_pages(1);
  ASSERT_TRUE(sealer_->step(true).ok());
  EXPECT_FALSE(sealer_->under_way());
  EXPECT_EQ(sealer_->sealed(), 4);
  EXPECT_EQ(sealer_->add(pages_, 0, false).value(), 0);
}

TEST_F(SealerTest, HighFirstSealsFromTheHighestAddressDown) {
  std::int32_t highest = pages_[0];
  for (const std::int32_t page : pages_)
    if (pool_->slice(page, 0) > pool_->slice(highest, 0)) highest = page;
  EXPECT_EQ(sealer_->add(pages_, 0, true).value(), 4);
  EXPECT_EQ(sealer_->run(1).value(), 1);
  EXPECT_EQ(pool_->place(highest).value().class_number, 2);
}

TEST_F(SealerTest, ReadersOfABetterRankKeepPagesAsTheyAre) {
  const std::span all(pages_);
  ASSERT_TRUE(sealer_->hold(all.first(1), kOpen).ok());
  ASSERT_TRUE(sealer_->hold(all.first(2), kBalanced).ok());
  ASSERT_TRUE(sealer_->hold(all.first(2), kBalanced).ok());
  ASSERT_TRUE(sealer_->hold(all, kSmall).ok());
  EXPECT_EQ(sealer_->held(), 5);
  EXPECT_EQ(sealer_->add(all, kSmall, false).value(), 2);
  ASSERT_TRUE(sealer_->drop(all.first(2), kBalanced).ok());
  EXPECT_EQ(sealer_->add(all.first(2), kSmall, false).value(), 0);
  EXPECT_EQ(sealer_->add(all.first(2), kBalanced, false).value(), 1);
  ASSERT_TRUE(sealer_->drop(all.first(1), kOpen).ok());
  ASSERT_TRUE(sealer_->drop(all.first(2), kBalanced).ok());
  EXPECT_EQ(sealer_->held(), 0);
  EXPECT_FALSE(sealer_->drop(all.first(1), kOpen).ok());
  EXPECT_EQ(sealer_->held(), 0);
}

TEST_F(SealerTest, APageCountsAsWhatItWillBeAndAsTheWorstBeforeIt) {
  const std::span all(pages_);
  EXPECT_EQ(sealer_->add(all.subspan(1, 1), kBalanced, false).value(), 1);
  EXPECT_EQ(sealer_->faithful(all, kOpen).value(), 1);
  EXPECT_EQ(sealer_->faithful(all, kBalanced).value(), 4);
  ASSERT_TRUE(sealer_->computed(all).ok());
  EXPECT_EQ(sealer_->faithful(all.subspan(2), kOpen).value(), 0);
  EXPECT_EQ(sealer_->add(all.subspan(2, 1), kSmall, false).value(), 1);
  EXPECT_EQ(sealer_->faithful(all, kBalanced).value(), 2);
  EXPECT_EQ(sealer_->faithful(all, kSmall).value(), 4);
  // A page that came free says nothing about the next one with its id.
  ASSERT_TRUE(pool_->decref(all.subspan(2, 1)).ok());
  ASSERT_EQ(pool_->alloc(1, 1).value().front(), pages_[2]);
  EXPECT_EQ(sealer_->faithful(all.subspan(2, 1), kOpen).value(), 1);
}

TEST_F(SealerTest, PagesThatCannotBeEncodedStayOpenAndFreedOnesArePassedOver) {
  std::memset(pool_->slice(pages_[0], 0) + kSliceHeaderBytes, 0xff, 64);  // NaN
  EXPECT_EQ(sealer_->add(pages_, 0, false).value(), 4);
  ASSERT_TRUE(pool_->decref(std::span(pages_).subspan(1, 1)).ok());
  EXPECT_EQ(sealer_->run(9).value(), 2);
  EXPECT_EQ(sealer_->refused(), 1);
  EXPECT_EQ(sealer_->waiting(), 0);
  EXPECT_EQ(class_now(0), 0);
  EXPECT_EQ(sealer_->add(std::span(pages_).first(1), 0, false).value(), 0);
}

TEST_F(SealerTest, PagesThatArriveCompressedCountAsTheirClass) {
  ASSERT_TRUE(sealer_->hold(pages_, kBalanced).ok());
  const std::int64_t open_bytes = pool_->stats().open_bytes;
  const auto fresh = sealer_->exchange(pages_, kBalanced).value();
  ASSERT_EQ(fresh.size(), pages_.size());
  EXPECT_EQ(pool_->stats().open_bytes, 0);
  EXPECT_LT(pool_->stats().compressed_bytes, open_bytes / 2);  // runs are rounded up to 4 KiB
  EXPECT_EQ(sealer_->held(), 4);
  for (const std::int32_t page : fresh)
    EXPECT_EQ(pool_->place(page).value().class_number, sealer_->class_number(1));
  EXPECT_EQ(sealer_->faithful(fresh, kOpen).value(), 0);
  EXPECT_EQ(sealer_->faithful(fresh, kBalanced).value(), 4);
  EXPECT_EQ(sealer_->add(fresh, kBalanced, false).value(), 0);  // nothing is left to seal
  ASSERT_TRUE(sealer_->drop(fresh, kBalanced).ok());
  EXPECT_EQ(sealer_->held(), 0);
  ASSERT_TRUE(pool_->decref(fresh).ok());
  EXPECT_EQ(pool_->stats().compressed_bytes, 0);
  const auto open = pool_->alloc(2, 1).value();
  EXPECT_EQ(sealer_->exchange(open, kOpen).value(), open);
}

TEST_F(SealerTest, WrongPagesAndTablesAreRefused) {
  const std::vector<std::int32_t> beyond = {pages_[0], 60}, below = {-1};
  EXPECT_FALSE(sealer_->hold(beyond, kOpen).ok());
  EXPECT_EQ(sealer_->held(), 0);
  EXPECT_FALSE(sealer_->faithful(below, kOpen).ok());
  EXPECT_FALSE(sealer_->add(beyond, 0, false).ok());
  EXPECT_EQ(sealer_->waiting(), 0);
  EXPECT_FALSE(sealer_->add(pages_, 3, false).ok());
  EXPECT_FALSE(sealer_->hold(pages_, -1).ok());
  EXPECT_FALSE(Sealer::make(pool_, {}, false).ok());
}

}  // namespace
}  // namespace kvcore::compress
