#include "prefix/cluster_index.h"

#include <gtest/gtest.h>

namespace kvcore::prefix {
namespace {

using Keys = std::vector<pages::Key>;

pages::Key key(int i) { return pages::Key{static_cast<std::byte>(i), std::byte{7}}; }

TEST(ClusterIndex, CountsLeadingKeysPerWorker) {
  ClusterIndex index;
  const Keys all = {key(1), key(2), key(3)};
  EXPECT_EQ(index.apply("a", 1, 0, all, {}), Applied::kOk);
  EXPECT_EQ(index.apply("b", 1, 0, std::span(all).last(2), {}), Applied::kOk);
  const auto found = index.query(all);
  ASSERT_EQ(found.size(), 1u);
  EXPECT_EQ(found[0], (std::pair<std::string, std::int64_t>("a", 3)));
}

TEST(ClusterIndex, AGapAsksForASnapshot) {
  ClusterIndex index;
  const Keys keys = {key(1)};
  EXPECT_EQ(index.apply("a", 1, 0, keys, {}), Applied::kOk);
  EXPECT_EQ(index.apply("a", 1, 0, keys, {}), Applied::kStale);
  EXPECT_EQ(index.apply("a", 1, 2, {}, {}), Applied::kResync);
  EXPECT_TRUE(index.query(keys).empty());
  EXPECT_EQ(index.apply_snapshot("a", 1, 3, keys), Applied::kOk);
  EXPECT_EQ(index.apply("a", 1, 4, {}, keys), Applied::kOk);
  EXPECT_EQ(index.num_keys(), 0);
  EXPECT_TRUE(index.drop("a"));
  EXPECT_FALSE(index.drop("a"));
}

}  // namespace
}  // namespace kvcore::prefix
