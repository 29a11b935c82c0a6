// The fake itself: steps, faults, determinism.
#include "fixture.h"

namespace kvcore::transport {
namespace {

class Loopback : public LinkTest {};

TEST_P(Loopback, ManualModeRunsOneActionAStepHighestClassFirst) {
  connect();
  hub->set_manual(true);
  const Grant grant = grant_all();
  const Segment s{0, 0, 10};
  OpOptions background;
  background.priority = Priority::kBackground;
  ASSERT_TRUE(to_owner->write(peer_region, {&s, 1}, grant.ref, 1, background).ok());
  ASSERT_TRUE(to_owner->write(peer_region, {&s, 1}, grant.ref, 2).ok());
  ASSERT_TRUE(to_owner->send(bytes_of("m")).ok());
  EXPECT_EQ(hub->pending(), 3U);
  EXPECT_FALSE(owner->next<Arrival>(1).has_value());
  ASSERT_TRUE(hub->step());
  EXPECT_EQ(owner->next<Arrival>(1)->tag, 2U);
  ASSERT_TRUE(hub->step());
  EXPECT_TRUE(owner->next<Message>(1).has_value());
  ASSERT_TRUE(hub->step());
  EXPECT_EQ(owner->next<Arrival>(1)->tag, 1U);
  EXPECT_FALSE(hub->step());
}

TEST_P(Loopback, ArmedFaultsHitTheirAction) {
  connect();
  const Grant grant = grant_all();
  hub->arm(2, LoopbackFault::kFail);
  EXPECT_TRUE(write_and_wait(grant.ref, {{0, 0, 10}}).ok());
  EXPECT_EQ(write_and_wait(grant.ref, {{0, 0, 10}}).error().code, ErrorCode::kTransport);
  hub->arm(1, LoopbackFault::kCorrupt);
  EXPECT_EQ(write_and_wait(grant.ref, {{0, 0, 10}}).error().code, ErrorCode::kCorrupt);
  EXPECT_TRUE(owner->next<Arrival>(1)->status.ok());
  EXPECT_EQ(owner->next<Arrival>(1)->status.error().code, ErrorCode::kCorrupt);
  EXPECT_NE(std::memcmp(owner_memory.data(), peer_memory.data(), 10), 0);

  std::memset(owner_memory.data(), 0, 100);
  hub->arm(1, LoopbackFault::kHalf);
  EXPECT_EQ(write_and_wait(grant.ref, {{0, 0, 10}, {10, 10, 10}}).error().code,
            ErrorCode::kTransport);
  EXPECT_EQ(std::memcmp(owner_memory.data(), peer_memory.data(), 10), 0);
  EXPECT_EQ(owner_memory.data()[15], std::byte{0});

  hub->arm(1, LoopbackFault::kDrop);
  OpOptions options;
  options.deadline_ns = now_ns() + 3600'000 * kMs;
  const Segment s{0, 0, 10};
  ASSERT_TRUE(to_owner->write(peer_region, {&s, 1}, grant.ref, 9, options).ok());
  EXPECT_FALSE(peer->next<Completion>(5).has_value());
  hub->advance(3601'000 * kMs);
  EXPECT_EQ(peer->next<Completion>(1)->status.error().code, ErrorCode::kTimeout);

  hub->arm(1, LoopbackFault::kDown);
  ASSERT_TRUE(to_owner->write(peer_region, {&s, 1}, grant.ref, 9).ok());
  EXPECT_EQ(peer->next<Completion>(1)->status.error().code, ErrorCode::kPeerDead);
  EXPECT_EQ(peer->next<Down>(1)->status.error().code, ErrorCode::kPeerDead);
  EXPECT_EQ(owner->next<Down>(1)->status.error().code, ErrorCode::kPeerDead);
}

INSTANTIATE_TEST_SUITE_P(Links, Loopback, ::testing::Values("loopback"));

}  // namespace
}  // namespace kvcore::transport
