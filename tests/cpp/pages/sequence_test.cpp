#include "pages/sequence.h"

#include <gtest/gtest.h>

#include <thread>

#include "pages/test_pool.h"

namespace kvcore::pages {
namespace {

TEST(SequencePages, GrowsByFramesAndGivesAllBack) {
  const auto pool = small_pool(4, 2);
  {
    SequencePages sequence(pool);
    ASSERT_TRUE(sequence.grow(33).ok());
    EXPECT_EQ(sequence.pages().size(), 4u);
    EXPECT_EQ(sequence.capacity_tokens(), 64);
    EXPECT_EQ(sequence.grow(200).error().code, ErrorCode::kOutOfPages);
    EXPECT_EQ(sequence.num_tokens(), 33);
    EXPECT_FALSE(sequence.grow(32).ok());
  }
  EXPECT_EQ(pool->stats().free_frames, 4);
}

TEST(SequencePages, TruncateKeepsTheFrameOfTheLastToken) {
  const auto pool = small_pool(4, 2);
  SequencePages sequence(pool);
  ASSERT_TRUE(sequence.grow(100).ok());
  ASSERT_TRUE(sequence.truncate(33).ok());
  EXPECT_EQ(sequence.pages().size(), 4u);
  ASSERT_TRUE(sequence.truncate(0).ok());
  EXPECT_TRUE(sequence.pages().empty());
  EXPECT_FALSE(sequence.truncate(1).ok());
  EXPECT_FALSE(sequence.truncate(-1).ok());
  EXPECT_EQ(pool->stats().free_frames, 4);
}

TEST(SequencePages, ReleaseFromManyThreadsHappensOnce) {
  const auto pool = small_pool(4, 1);
  for (int round = 0; round < 100; ++round) {
    SequencePages sequence(pool);
    ASSERT_TRUE(sequence.grow(64).ok());
    const std::vector<std::int32_t> pages = sequence.pages();
    ASSERT_TRUE(pool->incref(pages).ok());
    std::vector<std::jthread> threads;
    for (int t = 0; t < 3; ++t) threads.emplace_back([&] { sequence.release(); });
    threads.clear();
    for (const std::int32_t page : pages) ASSERT_EQ(pool->refs(page).value().owner, 1);
    ASSERT_TRUE(pool->decref(pages).ok());
    EXPECT_FALSE(sequence.grow(64).ok());
  }
}

TEST(SequencePages, ReplacePrefixTakesBeforeItGives) {
  const auto pool = small_pool(4, 1);
  SequencePages sequence(pool);
  ASSERT_TRUE(sequence.grow(40).ok());
  const std::vector<std::int32_t> own = sequence.pages();
  const std::vector<std::int32_t> shared = pool->alloc(1).value();
  ASSERT_TRUE(sequence.replace_prefix(shared).ok());
  EXPECT_EQ(sequence.pages()[0], shared[0]);
  EXPECT_EQ(pool->refs(shared[0]).value().owner, 2);
  EXPECT_EQ(pool->refs(own[0]).value().owner, 0);
  ASSERT_TRUE(sequence.replace_prefix(shared).ok());  // by itself: nothing changes
  EXPECT_EQ(pool->refs(shared[0]).value().owner, 2);
  const std::vector<std::int32_t> free_page = {own[0]};
  EXPECT_FALSE(sequence.replace_prefix(free_page).ok());
  EXPECT_EQ(sequence.pages()[0], shared[0]);
}

}  // namespace
}  // namespace kvcore::pages
