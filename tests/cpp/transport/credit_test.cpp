// Credits: the windows by themselves, and what links promise with them.
#include <algorithm>
#include <deque>
#include <random>

#include "fixture.h"
#include "transport/core/credit_window.h"

namespace kvcore::transport {
namespace {

constexpr std::uint64_t kLargest = 1UL << 20;

// A sender and a receiver with announcements under way, in any order of events: what is held never
// passes the window by more than one frame, and everything gets through.
TEST(CreditWindow, HoldsItsBoundAndNeverStarves) {
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    std::mt19937_64 rng(seed);
    const std::uint64_t window = 1000 + rng() % (seed % 3 == 0 ? 20'000'000 : 100'000);
    SendWindow sender;
    ReceiveWindow receiver(window);
    sender.open({receiver.exposure(), 0});
    std::deque<std::uint64_t> wire, held;
    std::deque<Credit> back;
    std::uint64_t in_receiver = 0, sent = 0, quiet = 0;
    std::uint64_t next = 1 + rng() % kLargest;
    while (sent < 300) {
      ASSERT_LT(++quiet, 10'000U) << "nothing moves any more, seed " << seed;
      switch (rng() % 4) {
        case 0:
          if (!sender.fits(next, true)) break;
          sender.spend(next);
          wire.push_back(next);
          next = 1 + rng() % (rng() % 2 == 0 ? 100 : kLargest);
          ++sent;
          quiet = 0;
          break;
        case 1:
          if (wire.empty()) break;
          ASSERT_TRUE(receiver.take(wire.front(), kLargest));
          in_receiver += wire.front();
          held.push_back(wire.front());
          wire.pop_front();
          ASSERT_LE(in_receiver, window + kLargest);
          break;
        case 2:
          if (held.empty()) break;
          receiver.give_back(held.front());
          in_receiver -= held.front();
          held.pop_front();
          if (receiver.until_due() == 0) back.push_back(receiver.announce());
          break;
        default:
          if (back.empty()) break;
          ASSERT_TRUE(sender.plausible(back.front()));
          sender.open(back.front());
          back.pop_front();
      }
    }
  }
}

TEST(CreditWindow, ASenderBeyondItsLimitIsFound) {
  ReceiveWindow receiver(1000);
  EXPECT_TRUE(receiver.take(1000, 500));
  EXPECT_TRUE(receiver.take(500, 500));
  EXPECT_FALSE(receiver.take(1, 500));
}

TEST(CreditWindow, ASmallerShareNeverTakesBackWhatWasAnnounced) {
  ReceiveWindow receiver(1000);
  EXPECT_TRUE(receiver.take(400, 0));
  receiver.resize(100);
  receiver.give_back(400);
  EXPECT_GT(receiver.until_due(), 0U);  // 1000 are announced, 500 would be allowed
  EXPECT_TRUE(receiver.take(600, 0));
  receiver.give_back(600);
  EXPECT_EQ(receiver.until_due(), 0U);
  EXPECT_EQ(receiver.announce().limit, 1100U);
}

TEST(CreditWindow, TheHighestClassKeepsAQuarter) {
  SendWindow sender;
  sender.open({1000, 0});
  EXPECT_EQ(sender.available(true), 1000U);
  EXPECT_EQ(sender.available(false), 750U);
  sender.spend(750);
  EXPECT_FALSE(sender.fits(1, false));
  EXPECT_TRUE(sender.fits(250, true));
  sender.open({900, 100});  // late news changes nothing
  EXPECT_EQ(sender.available(true), 250U);
  EXPECT_FALSE(sender.plausible({2000, 751}));
  EXPECT_FALSE(sender.plausible({10, 20}));
}

// ---- over links

class CreditedLinks : public LinkTest {
 protected:
  static TransportOptions small(std::uint64_t bytes) {
    TransportOptions options;
    options.credits.total_bytes = bytes;
    return options;
  }
};

TEST_P(CreditedLinks, ASlowApplicationNeitherHidesItsPeerNorHoldsUpItsOwnOperations) {
  TransportOptions options = small(1UL << 20);
  if (!is_rdma()) options.keepalive_ns = 300 * kMs;  // guests and fake NICs are slow
  connect(options, options);
  const std::vector<std::byte> message(64 * 1024);
  while (to_owner->send(message).ok()) {
  }
  while (to_peer->send(message).ok()) {
  }
  // Nobody polls for three keep-alives: both sides stay, and results still come in.
  const Segment s{0, 0, 1000};
  const Range all{0, kBytes};
  const Grant grant = *peer->transport->create_grant(peer_region, {&all, 1}, Rights::kRead);
  ::usleep(1'000'000);
  ASSERT_TRUE(to_peer->info().up && to_owner->info().up);
  EXPECT_GT(to_owner->info().credit_stall_ns + to_peer->info().credit_stall_ns, 0U);
  EXPECT_LT(to_owner->info().credit_bytes, message.size());
  while (owner->next<Message>(200).has_value()) {
  }
  ASSERT_TRUE(to_peer->read(owner_region, {&s, 1}, grant.ref).ok());
  while (peer->next<Message>(200).has_value()) {
  }
  const auto done = owner->next<Completion>();
  ASSERT_TRUE(done && done->status.ok()) << message_of(done->status);
}

TEST_P(CreditedLinks, UnpolledArrivalsAreBoundedToo) {
  connect(small(64UL * 1024));
  const Grant grant = grant_all();
  const Segment s{0, 0, 8};
  std::size_t completed = 0;
  for (int i = 0; i < 5000; ++i)
    ASSERT_TRUE(to_owner->write(peer_region, {&s, 1}, grant.ref, 1).ok());
  for (; completed <= 100; ++completed) ASSERT_TRUE(peer->next<Completion>().has_value());
  while (peer->next<Completion>(300).has_value()) ++completed;
  EXPECT_LE(completed, 64UL * 1024 / kFrameCost + 1);
  for (int i = 0; i < 5000; ++i) ASSERT_TRUE(owner->next<Arrival>().has_value()) << i;
  for (; completed < 5000; ++completed) ASSERT_TRUE(peer->next<Completion>().has_value());
}

TEST_P(CreditedLinks, MessagesLargerThanTheWindowComeOneByOne) {
  connect(small(64UL * 1024));
  for (int i = 0; i < 4; ++i)
    ASSERT_TRUE(to_owner->send(std::vector<std::byte>(kMaxMessageBytes)).ok());
  for (int i = 0; i < 4; ++i)
    EXPECT_EQ(owner->next<Message>()->bytes.size(), kMaxMessageBytes) << i;
}

TEST_P(CreditedLinks, WritesThatFailGiveTheirCreditsBack) {
  connect(small(256UL * 1024));
  for (int i = 0; i < 300; ++i) {
    const Status status = write_and_wait(GrantRef{1, 2}, {{0, 0, 100'000}});
    ASSERT_EQ(status.error().code, ErrorCode::kStale) << i << " " << message_of(status);
  }
  EXPECT_TRUE(write_and_wait(grant_all().ref, {{0, 0, kBytes}}).ok());
  const Segment s{0, 0, 1};
  for (int i = 0; i < 3000; ++i) {
    ASSERT_TRUE(to_owner->read(peer_region, {&s, 1}, GrantRef{1, 2}).ok());
    ASSERT_TRUE(peer->next<Completion>().has_value()) << i;
  }
}

// Whoever came first holds what he was promised, used or not: those who come later get the rest.
TEST_P(CreditedLinks, AllLinksTogetherAreNeverPromisedMoreThanTheTotal) {
  constexpr std::uint64_t kTotal = 4UL << 20, kLeast = 64UL << 10;
  constexpr std::uint64_t kPeers = 8;
  owner.emplace(make(small(kTotal)));
  const auto address = owner->transport->listen(listen_address(GetParam()));
  ASSERT_TRUE(address.ok()) << address.error().message;
  std::vector<std::unique_ptr<Transport>> peers;
  std::vector<std::shared_ptr<Link>> links;
  std::uint64_t first = 0;
  for (std::uint64_t i = 0; i < kPeers; ++i) {
    peers.push_back(make({}));
    links.push_back(take(peers.back()->connect(*address)));
    ASSERT_TRUE(owner->next<Up>().has_value());
    const std::int64_t until = now_ns() + 20'000 * kMs;
    while (links[i]->info().credit_bytes < kLeast && now_ns() < until) ::usleep(1000);
    if (i == 0) {  // alone it may have all of it
      while (links[0]->info().credit_bytes < kTotal && now_ns() < until) ::usleep(1000);
      first = links[0]->info().credit_bytes;
    }
  }
  ::usleep(50'000);
  EXPECT_EQ(first, kTotal);
  std::uint64_t promised = 0;
  for (const auto& link : links) promised += link->info().credit_bytes;
  EXPECT_LE(promised, kTotal + kPeers * kLeast);
  EXPECT_GE(links.back()->info().credit_bytes, kLeast);
  for (const auto& peer : peers) peer->close();
}

TEST_P(CreditedLinks, TooLittleIsRefused) {
  EXPECT_EQ(try_make(small(1000)).error().code, ErrorCode::kInvalidArgument);
}

INSTANTIATE_TEST_SUITE_P(Links, CreditedLinks,
                         ::testing::ValuesIn(with_rdma({"shm", "tcp", "rdma_fake"})),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace kvcore::transport
