#include "prefix/radix_tree.h"

#include <gtest/gtest.h>

#include <map>
#include <random>

#include "pages/test_pool.h"

namespace kvcore::prefix {
namespace {

using Pages = std::vector<std::int32_t>;
using Tokens = std::vector<std::int32_t>;

// One word per page of 16 tokens.
Tokens row(std::initializer_list<std::int32_t> words) {
  Tokens out;
  for (const std::int32_t w : words) out.insert(out.end(), 16, w);
  return out;
}

Tokens plus_one(Tokens tokens) {
  tokens.push_back(99);
  return tokens;
}

struct OneTree : testing::Test {
  std::shared_ptr<pages::Pool> pool = pages::small_pool(32, 1);
  std::unique_ptr<RadixTree> tree = RadixTree::make(pool, std::nullopt).value();

  Pages put(const Tokens& tokens) {
    Match m = tree->match("ns", tokens).value();
    const auto whole = static_cast<std::int64_t>(tokens.size() / 16);
    const Pages fresh = pool->alloc(whole - static_cast<std::int64_t>(m.pages.size())).value();
    m.pages.insert(m.pages.end(), fresh.begin(), fresh.end());
    EXPECT_TRUE(tree->insert("ns", tokens, m.pages).ok());
    EXPECT_TRUE(pool->decref(m.pages).ok());
    return m.pages;
  }
};

TEST_F(OneTree, MatchPinsWholePagesAndLeavesOneToken) {
  const Pages pages = put(row({1, 2, 3}));
  EXPECT_EQ(tree->match("ns", row({1, 2, 3})).value().num_tokens, 32);
  const Match m = tree->match("ns", plus_one(row({1, 2, 3}))).value();
  EXPECT_EQ(m.pages, pages);
  EXPECT_EQ(pool->refs(pages[0]).value().owner, 3);
  EXPECT_FALSE(tree->match("other", row({1, 2, 3})).value().node.has_value());
}

TEST_F(OneTree, SplitKeepsLocksWithTheLowerPart) {
  put(row({1, 2, 3, 4}));
  const Match m = tree->match("ns", plus_one(row({1, 2, 3, 4}))).value();
  ASSERT_TRUE(pool->decref(m.pages).ok());
  ASSERT_TRUE(tree->lock(*m.node).ok());
  put(row({1, 2, 5}));
  EXPECT_EQ(tree->stats().nodes, 3);
  EXPECT_EQ(tree->stats().protected_pages, 4);
  EXPECT_EQ(tree->evict(99).size(), 1u);  // only the new branch
  ASSERT_TRUE(tree->unlock(*m.node).ok());
  EXPECT_FALSE(tree->unlock(*m.node).ok());
  EXPECT_EQ(tree->evict(99).size(), 4u);
  EXPECT_EQ(pool->stats().free_frames, 32);
}

TEST_F(OneTree, DeepTreesNeedNoStack) {
  constexpr std::int32_t kDepth = 5000;
  pool = pages::small_pool(kDepth, 1);
  tree = RadixTree::make(pool, std::nullopt).value();
  const Pages pages = pool->alloc(kDepth).value();
  Tokens tokens;
  for (std::int32_t i = 0; i < kDepth; ++i) {  // one node per page, each below the last
    tokens.insert(tokens.end(), 16, i);
    ASSERT_TRUE(tree->insert("ns", tokens, pages).ok());
  }
  EXPECT_EQ(tree->stats().nodes, kDepth);
  ASSERT_TRUE(pool->decref(pages).ok());
  EXPECT_EQ(tree->peek("ns", plus_one(tokens)), kDepth * 16);
  EXPECT_EQ(tree->evict(kDepth).size(), static_cast<std::size_t>(kDepth));
  EXPECT_EQ(tree->stats().nodes, 0);
}

// The same prompts against a map from prefix to page, over many random histories.
TEST(RadixTree, AgreesWithAMap) {
  for (std::uint32_t seed = 0; seed < 200; ++seed) {
    std::mt19937 random(seed);
    const auto pool = pages::small_pool(24, seed % 2 ? 1 : 2);
    const auto tree = RadixTree::make(pool, std::nullopt).value();
    std::map<Tokens, std::int32_t> cached;
    for (int step = 0; step < 60; ++step) {
      Tokens tokens;
      const auto length = random() % 6;
      for (std::uint32_t i = 0; i < length; ++i)
        tokens.insert(tokens.end(), 16, static_cast<std::int32_t>(random() % 2));
      Match m = tree->match("ns", plus_one(tokens)).value();
      std::size_t want = 0;
      while (want < length &&
             cached.contains(Tokens(tokens.begin(),
                                    tokens.begin() + 16 * (static_cast<std::ptrdiff_t>(want) + 1))))
        ++want;
      ASSERT_EQ(m.pages.size(), want);
      const auto fresh = pool->alloc(static_cast<std::int64_t>(length - want));
      if (fresh) {
        m.pages.insert(m.pages.end(), fresh->begin(), fresh->end());
        ASSERT_TRUE(tree->insert("ns", tokens, m.pages).ok());
        for (std::size_t i = want; i < length; ++i)
          cached[Tokens(tokens.begin(),
                        tokens.begin() + 16 * (static_cast<std::ptrdiff_t>(i) + 1))] = m.pages[i];
      }
      ASSERT_TRUE(pool->decref(m.pages).ok());
      for (const std::int32_t page : tree->evict(random() % 3 == 0 ? 3 : 0))
        std::erase_if(cached, [&](const auto& entry) { return entry.second == page; });
      ASSERT_EQ(tree->stats().pages, static_cast<std::int64_t>(cached.size()));
      ASSERT_EQ(pool->stats().held_pages, static_cast<std::int64_t>(cached.size()));
    }
    tree->evict(1000);
    ASSERT_EQ(pool->stats().free_frames, 24);
  }
}

TEST(EventLog, IsANetDifference) {
  EventLog keys(2);
  const auto key = [](int i) { return pages::Key{static_cast<std::byte>(i)}; };
  keys.stored(key(1));
  keys.removed(key(1));
  EXPECT_TRUE(keys.drain().removed.empty());
  for (int i = 0; i < 3; ++i) keys.stored(key(i));
  EXPECT_TRUE(keys.drain().lost);
  EXPECT_FALSE(keys.drain().lost);
}

}  // namespace
}  // namespace kvcore::prefix
