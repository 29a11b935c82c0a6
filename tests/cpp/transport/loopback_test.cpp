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

TEST_P(Loopback, ALateFenceIsPendingUntilItsAction) {
  connect();
  const Grant grant = grant_all();
  EXPECT_EQ(owner->transport->revoke_grant(grant_all().ref), Fence::kDone);
  hub->set_manual(true);
  hub->set_late_fences(true);
  EXPECT_EQ(owner->transport->revoke_grant(grant.ref), Fence::kPending);
  EXPECT_EQ(owner->transport->revoke_grant(grant.ref), Fence::kDone);  // unknown by now
  EXPECT_EQ(owner->transport->unregister_region(owner_region).error().code,
            ErrorCode::kInvalidArgument);
  EXPECT_FALSE(owner->next<Fenced>(1).has_value());
  ASSERT_TRUE(hub->step());
  EXPECT_EQ(owner->next<Fenced>(1)->grant, grant.ref);
  EXPECT_TRUE(owner->transport->unregister_region(owner_region).ok());

  owner_region = *owner->transport->register_region(owner_memory.data(), kBytes, owner_memory.fd());
  const Grant last = grant_all();
  EXPECT_EQ(owner->transport->revoke_grant(last.ref), Fence::kPending);
  owner->transport->close();
  EXPECT_EQ(owner->next<Fenced>(1)->grant, last.ref);
}

TEST_P(Loopback, ClockAndRandomSourceMakeARunRepeatable) {
  const auto run = [&](std::uint64_t seed) {
    ManualClock clock(1'000'000);
    SeededRandom random(seed);
    hub = make_loopback_hub(&clock);
    TransportOptions options;
    options.random = &random;
    connect(options, options);
    const Grant grant = grant_all();
    clock.advance_ns(5 * kMs);
    EXPECT_TRUE(write_and_wait(grant.ref, {{0, 0, 10}}).ok());
    const auto arrival = owner->next<Arrival>(1);
    hub->set_manual(true);
    OpOptions late;
    late.deadline_ns = clock.now_ns() + kMs;
    const Segment s{0, 0, 10};
    EXPECT_TRUE(to_owner->write(peer_region, {&s, 1}, grant.ref, 1, late).ok());
    EXPECT_FALSE(peer->next<Completion>(5).has_value());  // however long it takes for real
    clock.advance_ns(kMs);
    EXPECT_EQ(peer->next<Completion>(1)->status.error().code, ErrorCode::kTimeout);
    to_owner.reset();
    to_peer.reset();
    peer.reset();
    owner.reset();
    return std::tuple(grant.ref.id, grant.ref.generation, arrival->at_ns);
  };
  EXPECT_EQ(run(1), run(1));
  EXPECT_NE(std::get<0>(run(1)), std::get<0>(run(2)));
  EXPECT_EQ(std::get<2>(run(3)), 6'000'000);
}

INSTANTIATE_TEST_SUITE_P(Links, Loopback, ::testing::Values("loopback"));

}  // namespace
}  // namespace kvcore::transport
