#include "pages/keys.h"

#include <gtest/gtest.h>

#include <numeric>

namespace kvcore::pages {
namespace {

TEST(KeyChain, ExtendingTokenByTokenEqualsAtOnce) {
  std::vector<std::int32_t> tokens(200);
  std::iota(tokens.begin(), tokens.end(), 3);
  const KeyMaker maker = KeyMaker::make({}, 16).value();
  KeyChain whole(maker, Digest32{}), slow(maker, Digest32{});
  EXPECT_EQ(whole.extend(tokens), 12u);
  for (const std::int32_t& token : tokens) (void)slow.extend({&token, 1});
  EXPECT_EQ(whole.keys(), slow.keys());
  EXPECT_EQ(slow.num_tokens(), 200);
}

TEST(KeyChain, AKeyNamesTheWholePrefixAndItsNamespace) {
  std::vector<std::int32_t> a(64, 1), b(64, 1);
  b[0] = 2;
  const KeyMaker maker = KeyMaker::make({}, 16).value();
  Digest32 other{};
  other[31] = std::byte{1};
  KeyChain chain_a(maker, Digest32{}), chain_b(maker, Digest32{}), chain_c(maker, other);
  (void)chain_a.extend(a);
  (void)chain_b.extend(b);
  (void)chain_c.extend(a);
  for (std::size_t i = 0; i < 4; ++i) {
    EXPECT_NE(chain_a.keys()[i], chain_b.keys()[i]);
    EXPECT_NE(chain_a.keys()[i], chain_c.keys()[i]);
  }
}

TEST(NamespaceDigest, FieldsDoNotRunTogether) {
  const NamespaceField one[] = {{"rope", "ab"}, {"lora", "c"}};
  const NamespaceField two[] = {{"rope", "a"}, {"lora", "bc"}};
  EXPECT_NE(namespace_digest(one), namespace_digest(two));
  EXPECT_EQ(namespace_digest(one), namespace_digest(one));
}

TEST(KeyMaker, RefusesUnitsOutOfRange) {
  EXPECT_FALSE(KeyMaker::make({}, 0).ok());
  EXPECT_FALSE(KeyMaker::make({}, 4097).ok());
}

}  // namespace
}  // namespace kvcore::pages
