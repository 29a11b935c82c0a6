// Whole transports over fake NICs: what the host does around its links.
#include <thread>

#include "../fixture.h"

namespace kvcore::transport {
namespace {

bool says_no_random(const Down& down) {
  return !down.status.ok() && down.status.error().code == ErrorCode::kIo &&
         message_of(down.status).find("no random bytes") != std::string::npos;
}

class Machine : public LinkTest {
 protected:
  void SetUp() override { machine = std::make_unique<rdma::FakeMachine>(); }
  RailInfo rail() const { return to_owner->info().rails.at(0); }
};

TEST_P(Machine, WithoutRandomBytesTheLinkFails) {
  machine->random.fails = true;
  owner.emplace(make({}));
  peer.emplace(make({}));
  const auto address = owner->transport->listen(listen_address(GetParam()));
  to_owner = *peer->transport->connect(*address);
  const auto down = peer->next<Down>();
  ASSERT_TRUE(down.has_value());
  const auto other = owner->next<Down>(500);  // whoever was first says why
  EXPECT_TRUE(says_no_random(*down) || (other && says_no_random(*other)))
      << message_of(down->status);
}

TEST_P(Machine, ADeviceThatCannotBeOpenedEndsTheLinkWithTheReason) {
  TransportOptions options;
  options.rdma.devices = {"mlx5_7"};
  owner.emplace(make({}));
  peer.emplace(make(options));
  const auto address = owner->transport->listen(listen_address(GetParam()));
  to_owner = *peer->transport->connect(*address);
  const auto down = peer->next<Down>();
  ASSERT_TRUE(down.has_value());
  EXPECT_EQ(down->status.error().code, ErrorCode::kInvalidArgument);
  EXPECT_NE(message_of(down->status).find("mlx5_7"), std::string::npos);
  Node other(make({}));  // and the machine still serves others
  ASSERT_TRUE(other.transport->connect(*address).ok());
  EXPECT_TRUE(other.next<Up>().has_value());
}

// Longer than the keep-alive: a thread that waited for it would lose every link.
TEST_P(Machine, OpeningAndRegisteringHoldNoLinkUp) {
  machine->fabric.open_ns = 900 * kMs;
  machine->fabric.register_ns = 450 * kMs;
  TransportOptions options;
  options.keepalive_ns = 400 * kMs;
  connect(options, options);
  const Grant grant = grant_all();
  const std::int64_t start = now_ns();
  const Segment s{0, 0, 100'000};
  ASSERT_TRUE(to_owner->write(peer_region, {&s, 1}, grant.ref, 1).ok());
  Node other(make(options));
  const auto back = *other.transport->connect(text(
      "rdma:", to_owner->info().peer_address.substr(to_owner->info().peer_address.find(':') + 1)));
  EXPECT_TRUE(other.next<Up>().has_value());
  const auto done = peer->next<Completion>();
  ASSERT_TRUE(done && done->status.ok()) << message_of(done->status);
  EXPECT_GE(now_ns() - start, 450 * kMs);  // two rails on either side, one after the other
  EXPECT_FALSE(peer->next<Down>(1).has_value());
  EXPECT_FALSE(owner->next<Down>(1).has_value());
  EXPECT_EQ(std::memcmp(owner_memory.data(), peer_memory.data(), 100'000), 0);
}

TEST_P(Machine, WhatWaitsForARegistrationCanBeCancelledAndKeepsItsOrder) {
  machine->fabric.register_ns = 300 * kMs;
  connect();
  const Grant grant = grant_all();
  const Segment s{0, 0, 1000};
  const auto first = to_owner->write(peer_region, {&s, 1}, grant.ref, 1);
  const auto second = to_owner->write(peer_region, {&s, 1}, grant.ref, 2);
  ASSERT_TRUE(to_owner->send(bytes_of("after")).ok());
  to_owner->cancel(*first);
  const auto cancelled = peer->next<Completion>(250);
  ASSERT_TRUE(cancelled.has_value());
  EXPECT_EQ(cancelled->op, *first);
  EXPECT_EQ(cancelled->status.error().code, ErrorCode::kCancelled);
  EXPECT_TRUE(owner->next<Message>().has_value());
  EXPECT_EQ(owner->count<Arrival>(), 1U);  // before the message
  EXPECT_EQ(owner->next<Arrival>()->tag, 2U);
  EXPECT_EQ(peer->next<Completion>()->op, *second);
}

TEST_P(Machine, ARegionThatGoesWhileItIsRegisteredIsNoTrouble) {
  machine->fabric.register_ns = 100 * kMs;
  connect();
  SharedMemory extra(1UL << 20);
  const RegionId region =
      *peer->transport->register_region(extra.data(), extra.bytes(), extra.fd());
  EXPECT_TRUE(peer->transport->unregister_region(region).ok());
  EXPECT_TRUE(write_and_wait(grant_all().ref, {{0, 0, 1000}}).ok());
}

// What the counters of the NIC say becomes the rate of all its links (rate_control.h).
TEST_P(Machine, CongestionLowersTheRateAndItRecovers) {
  connect();
  const Grant grant = grant_all();
  EXPECT_EQ(rail().rate_bytes_per_s, 0U);  // nothing is held back
  const auto write = [&] { ASSERT_TRUE(write_and_wait(grant.ref, {{0, 0, 200'000}}).ok()); };
  const auto until = [&](const std::function<bool()>& over) {
    const std::int64_t end = now_ns() + 30'000 * kMs;
    while (!over() && now_ns() < end) write();
    return over();
  };
  const auto line = static_cast<std::uint64_t>(machine->rate_gbps * 1e9 / 8);
  ASSERT_TRUE(until([&] {
    ++*machine->marks;
    return rail().rate_cuts >= 4;
  }));
  const RailInfo slow = rail();
  EXPECT_GT(slow.rate_bytes_per_s, 0U);
  EXPECT_LE(slow.rate_bytes_per_s, line / 4);
  EXPECT_GT(slow.congestion, 0U);
  EXPECT_TRUE(slow.ready);
  EXPECT_GT(slow.bytes_posted, 0U);
  EXPECT_EQ(slow.device, "fake0");
  ASSERT_TRUE(until([&] { return rail().rate_bytes_per_s == 0; })) << rail().rate_bytes_per_s;
  EXPECT_LE(rail().rate_cuts, slow.rate_cuts + 1);  // the last mark may not have been seen then
}

INSTANTIATE_TEST_SUITE_P(Links, Machine, ::testing::Values("rdma_fake"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace kvcore::transport
