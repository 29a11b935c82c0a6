// The plan between unlike sides: every (layer, KV head, token) of a receiver exactly once, or a
// typed refusal.
#include <gtest/gtest.h>

#include <map>
#include <set>

#include "fixture.h"
#include "stream/plan.h"

namespace kvcore::stream {
namespace {

Side side(std::int32_t layers, Range32 heads, std::int32_t layer_begin = 0) {
  auto spec = testing::small_spec();
  spec.num_layers = layers;
  spec.num_kv_heads = heads.count;
  return {spec, layer_begin, heads.begin};
}

// Every rank of a model under tensor parallelism, or nothing where heads cannot be shared so.
std::vector<Side> ranks(std::int32_t heads, std::int32_t degree) {
  std::vector<Side> out;
  for (std::int32_t rank = 0; rank < degree; ++rank) {
    const auto range = heads_of_rank(heads, degree, rank);
    if (!range) {
      EXPECT_EQ(range.error().code, ErrorCode::kUnsupported);
      EXPECT_NE(range.error().message.find("tp_degree=" + std::to_string(degree)),
                std::string::npos);
      EXPECT_NE(range.error().message.find("num_kv_heads=" + std::to_string(heads)),
                std::string::npos);
      return {};
    }
    out.push_back(side(4, *range));
  }
  return out;
}

// How often each (layer, head) of the receiver is given; a share outside its sender is a failure.
std::map<std::pair<int, int>, int> cells(const std::vector<PlannedShare>& plan,
                                         const std::vector<Side>& senders) {
  std::map<std::pair<int, int>, int> out;
  for (const PlannedShare& p : plan) {
    const Side& from = senders[static_cast<std::size_t>(p.sender)];
    EXPECT_TRUE(from.layers().contains(p.share.layers) && from.heads().contains(p.share.heads));
    for (int layer = p.share.layers.begin; layer < p.share.layers.end(); ++layer)
      for (int head = p.share.heads.begin; head < p.share.heads.end(); ++head) ++out[{layer, head}];
  }
  return out;
}

TEST(Plan, EveryPairOfDegreesCoversEachHeadOnceOrIsRefused) {
  int planned = 0, refused = 0;
  for (const int heads : {1, 2, 3, 4, 8, 10}) {
    for (const int p : {1, 2, 4, 8, 16}) {
      for (const int d : {1, 2, 4, 8, 16}) {
        const auto senders = ranks(heads, p), receivers = ranks(heads, d);
        if (senders.empty() || receivers.empty()) {
          ++refused;
          continue;
        }
        ++planned;
        for (std::size_t rank = 0; rank < receivers.size(); ++rank) {
          const auto plan = plan_shares(senders, receivers[rank], static_cast<std::uint32_t>(rank));
          ASSERT_TRUE(plan.ok()) << heads << " " << p << " " << d;
          const auto given = cells(*plan, senders);
          EXPECT_EQ(given.size(), 4u * static_cast<std::size_t>(receivers[rank].heads().count));
          for (const auto& [cell, times] : given) {
            EXPECT_EQ(times, 1);
            EXPECT_TRUE(receivers[rank].heads().contains({cell.second, 1}));
          }
          std::vector<Share> shares;
          for (const auto& s : *plan) shares.push_back(s.share);
          EXPECT_TRUE(check_cover(shares, receivers[rank]).ok());
        }
      }
    }
  }
  EXPECT_GT(planned, 50);
  EXPECT_EQ(planned + refused, 150);
  EXPECT_GT(refused, 40);
}

TEST(Plan, EqualSidesNeedOneShare) {
  const auto plan = plan_shares(std::vector{side(4, {0, 8})}, side(4, {0, 8}));
  ASSERT_TRUE(plan.ok());
  EXPECT_EQ(*plan, (std::vector<PlannedShare>{{0, {{0, 4}, {0, 8}}}}));
}

TEST(Plan, StagesOfLayersMeetStagesOfOtherLengths) {
  // Two stages of 3 layers, each of two ranks, feed stages of 2 layers.
  std::vector<Side> senders;
  for (const int stage : {0, 3})
    for (const int head : {0, 2}) senders.push_back(side(3, {head, 2}, stage));
  for (const int begin : {0, 2, 4}) {
    const Side receiver = side(2, {0, 4}, begin);
    const auto plan = plan_shares(senders, receiver);
    ASSERT_TRUE(plan.ok());
    EXPECT_EQ(plan->size(), begin == 2 ? 4u : 2u);
    const auto given = cells(*plan, senders);
    EXPECT_EQ(given.size(), 8u);
    for (const auto& [cell, times] : given) EXPECT_EQ(times, 1);
  }
}

TEST(Plan, ReplicasShareTheWork) {
  // A latent cache: each of four ranks has all of it, and so does each of four receivers.
  auto latent = side(4, {0, 1});
  latent.spec.latent = true;
  latent.spec.layout = LayoutId::kCanonical;
  const std::vector<Side> senders(4, latent);
  std::set<std::int32_t> used;
  for (std::uint32_t rank = 0; rank < 4; ++rank) {
    const auto plan = plan_shares(senders, latent, rank);
    ASSERT_TRUE(plan.ok());
    ASSERT_EQ(plan->size(), 1u);  // the whole latent, once
    used.insert((*plan)[0].sender);
  }
  EXPECT_EQ(used.size(), 4u);
}

TEST(Plan, WhatCannotBeServedIsNamedWithBothValues) {
  const auto message = [](const Side& sender, const Side& receiver) {
    const auto plan = plan_shares(std::vector{sender}, receiver);
    EXPECT_FALSE(plan.ok());
    EXPECT_EQ(plan.error().code, ErrorCode::kUnsupported);
    return plan.error().message;
  };
  const Side sender = side(4, {0, 2});
  Side other = sender;
  other.spec.head_dim_v = 32;
  EXPECT_NE(message(sender, other).find("head_dim_v=32, the sender's have head_dim_v=16"),
            std::string::npos);
  other = sender;
  other.spec.latent = true;
  EXPECT_NE(message(sender, other).find("latent=1, the sender's have latent=0"), std::string::npos);
  EXPECT_NE(message(sender, side(5, {0, 2})).find("layer 4, KV head 0"), std::string::npos);
  EXPECT_NE(message(sender, side(4, {0, 3})).find("layer 0, KV head 2"), std::string::npos);
  other = sender;
  other.spec.page_size = 64;
  other.spec.format = Format::kF32;
  other.spec.layout = LayoutId::kCanonical;
  EXPECT_TRUE(plan_shares(std::vector{sender}, other).ok());
}

TEST(Plan, TheWayOfAShare) {
  const Side whole = side(4, {0, 4}), half = side(4, {0, 2});
  const Share all{{0, 4}, {0, 4}}, left{{0, 4}, {0, 2}};
  EXPECT_EQ(way_of(whole, whole, all, true), Way::kWhole);
  EXPECT_EQ(way_of(half, whole, left, false), Way::kHeads);
  EXPECT_EQ(way_of(whole, half, left, true), Way::kConvert);  // another header
  Side later = whole;
  later.layer_begin = 2;
  later.spec.num_layers = 2;
  EXPECT_EQ(way_of(whole, later, {{2, 2}, {0, 4}}, true), Way::kConvert);
  Side pages = whole;
  pages.spec.page_size = 64;
  EXPECT_EQ(way_of(whole, pages, all, true), Way::kConvert);
  EXPECT_EQ(way_of(half, pages, left, false), Way::kConvert);
}

TEST(Plan, EveryTokenLiesInOneSourcePlace) {
  for (const int from : {16, 32, 64, 128}) {
    for (const int to : {16, 32, 64, 128}) {
      for (const std::int64_t first : {0, to, 3 * to}) {
        for (const std::int64_t tokens : {1, 15, 16, 64, 100, 300}) {
          const PageMap map{from, to, first, tokens};
          std::int64_t next = first;  // of the sequence
          for (std::int32_t slot = 0; slot < (tokens + to - 1) / to; ++slot) {
            const SlotSource s = map.source_of(slot);
            const std::int64_t start = first / from * from;  // of the sender's list
            EXPECT_EQ(start + s.first_page * from + s.first_token, next);
            EXPECT_LE(s.first_page + s.num_pages, map.num_source_pages());
            EXPECT_EQ(s.num_pages, (s.first_token + s.num_tokens - 1) / from + 1);
            next += s.num_tokens;
          }
          EXPECT_EQ(next, first + tokens);
        }
      }
    }
  }
}

TEST(Plan, SharesThatDoNotCoverAreNamed) {
  const Side receiver = side(2, {4, 2}, 1);
  const auto message = [&](std::vector<Share> shares) {
    const auto status = check_cover(shares, receiver);
    EXPECT_FALSE(status.ok());
    return status.error().message;
  };
  EXPECT_NE(message({{{1, 2}, {4, 1}}}).find("layer 1, KV head 5 is in none"), std::string::npos);
  EXPECT_NE(message({{{1, 2}, {4, 2}}, {{2, 1}, {5, 1}}}).find("layer 2, KV head 5 is in two"),
            std::string::npos);
  EXPECT_NE(message({{{0, 3}, {4, 2}}}).find("layers 0 + 3"), std::string::npos);
  EXPECT_NE(message({{{1, 2}, {4, 0}}}).find("KV heads 4 + 0"), std::string::npos);
}

}  // namespace
}  // namespace kvcore::stream
