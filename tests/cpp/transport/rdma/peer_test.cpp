// Two ends of an rdma link over a fake fabric that completes in any order and fails on command.
#include "transport/rdma/peer.h"
#include "transport/socket/frame.h"

#include "pair_fixture.h"

namespace kvcore::transport::rdma {
namespace {

bool same(const End& from, std::size_t at, const End& to, std::size_t there, std::size_t bytes) {
  return std::memcmp(from.memory.data() + at, to.memory.data() + there, bytes) == 0;
}

class Seeds : public ::testing::TestWithParam<std::uint64_t> {
 protected:
  static std::uint32_t rails(std::uint32_t most) {
    return 1 + static_cast<std::uint32_t>(GetParam()) % most;
  }
};

TEST_P(Seeds, WritesLandWhereTheyShouldAndAreAnnouncedOnce) {
  Wire w(GetParam(), rails(3));
  ASSERT_TRUE(w.ready());
  const Grant grant = w.b.grant({{4096, 100'000}, {300'000, 500'000}}, Rights::kWrite);
  std::vector<std::byte> expected = w.b.memory;
  const std::vector<Segment> segments = {
      {10, 5000, 90'000}, {200'000, 300'000, 500'000}, {90'010, 95'001, 1}};
  for (const Segment& s : segments)
    std::memcpy(expected.data() + s.remote_offset, w.a.memory.data() + s.local_offset, s.bytes);
  w.a.peer->outbound().start(w.a.job(1, grant.ref, segments));
  ASSERT_TRUE(w.until([&] { return w.a.done.contains(1) && w.arrivals(w.b) == 1; }));
  EXPECT_TRUE(w.a.done.at(1).ok()) << message_of(w.a.done.at(1));
  EXPECT_EQ(w.b.memory, expected);
  const auto& arrived = std::get<Inbound::Arrived>(w.b.deliveries.at(0));
  EXPECT_EQ(arrived.bytes, 590'001U);
  EXPECT_EQ(arrived.tag, 10U);
  EXPECT_EQ(arrived.grant, grant.ref);
  for (std::uint32_t r = 0; r < w.a.nics.size(); ++r)
    EXPECT_GT(w.a.peer->outbound().bytes_posted(r), 0U) << "rail " << r << " had no work";
  w.rounds(500);
  EXPECT_EQ(w.arrivals(w.b), 1U);
}

TEST_P(Seeds, ArrivalsAndMessagesOfOneClassComeAsPosted) {
  Wire w(GetParam(), 2);
  ASSERT_TRUE(w.ready());
  const Grant grant = w.b.grant({{0, kBytes}}, Rights::kWrite);
  for (std::uint64_t op = 1; op <= 40; ++op) {
    const std::uint64_t bytes = 1 + w.fabric.draw(100'000);
    w.a.peer->outbound().start(w.a.job(op, grant.ref, {{0, op, bytes}}));
    w.a.peer->outbound().send(Priority::kStream, {static_cast<std::byte>(op)});
  }
  ASSERT_TRUE(w.until([&] { return w.b.deliveries.size() == 80 && w.a.done.size() == 40; }));
  for (std::uint64_t op = 1; op <= 40; ++op) {
    EXPECT_EQ(std::get<Inbound::Arrived>(w.b.deliveries[2 * op - 2]).tag, op * 10);
    EXPECT_EQ(std::get<std::vector<std::byte>>(w.b.deliveries[2 * op - 1]).at(0),
              static_cast<std::byte>(op));
  }
}

TEST_P(Seeds, ReadsBringTheOwnersBytes) {
  Wire w(GetParam(), 2);
  ASSERT_TRUE(w.ready());
  const Grant grant = w.b.grant({{0, 400'000}}, Rights::kRead);
  w.a.peer->outbound().start(w.a.job(1, grant.ref, {{7, 100, 399'000}, {600'000, 0, 9}}, true));
  ASSERT_TRUE(w.until([&] { return w.a.done.contains(1); }));
  EXPECT_TRUE(w.a.done.at(1).ok()) << message_of(w.a.done.at(1));
  EXPECT_TRUE(same(w.b, 100, w.a, 7, 399'000));
  EXPECT_TRUE(same(w.b, 0, w.a, 600'000, 9));
  EXPECT_EQ(w.b.deliveries.size(), 0U);
}

// Whatever fails, whenever: each operation ends once, what was announced is there, and what was
// announced is never written again, although flushed work may have been executed.
TEST_P(Seeds, AnyOneFailureIsSurvivedAndNothingLandsAfterItsArrival) {
  const WorkStatus kinds[] = {WorkStatus::kRetry, WorkStatus::kReceiverNotReady,
                              WorkStatus::kFlushed, WorkStatus::kLocal};
  Wire w(GetParam(), rails(2));
  ASSERT_TRUE(w.ready());
  const Grant grant = w.b.grant({{0, kBytes}}, Rights::kWrite);
  std::size_t announced_bytes = 0;  // writes go one behind the other: [0, announced) is B's
  w.on_delivery = [&](End& end) {
    announced_bytes += std::get<Inbound::Arrived>(end.deliveries.back()).bytes;
  };
  w.fabric.on_touch = [&](const std::byte* p, std::size_t, bool written) {
    if (!written || p < w.b.memory.data() || p >= w.b.memory.data() + kBytes) return;
    EXPECT_GE(static_cast<std::size_t>(p - w.b.memory.data()), announced_bytes);
  };
  w.fabric.fail_work(static_cast<int>(1 + w.fabric.draw(9)), kinds[w.fabric.draw(4)],
                     w.fabric.draw(2) == 0);
  for (std::uint64_t op = 1; op <= 8; ++op)
    w.a.peer->outbound().start(
        w.a.job(op, grant.ref, {{(op - 1) * 100'000, (op - 1) * 100'000, 100'000}}));
  ASSERT_TRUE(w.until([&] { return w.a.done.size() == 8 && w.arrivals(w.b) == 8; }));
  for (const auto& [op, status] : w.a.done) EXPECT_TRUE(status.ok()) << message_of(status);
  EXPECT_TRUE(same(w.a, 0, w.b, 0, 800'000));
  EXPECT_TRUE(w.until([&] { return w.a.peer->outbound().reconnects() > 0; }));
}

TEST_P(Seeds, AFailedPostIsSurvived) {
  Wire w(GetParam(), 1);
  ASSERT_TRUE(w.ready());
  const Grant grant = w.b.grant({{0, 1000}, {2000, 1000}, {5000, 400'000}}, Rights::kReadWrite);
  w.fabric.fail_post(static_cast<int>(1 + w.fabric.draw(6)));  // a bind of B, or a write of A
  w.a.peer->outbound().start(w.a.job(1, grant.ref, {{0, 0, 10}, {5, 5000, 400'000}, {9, 2000, 7}}));
  ASSERT_TRUE(w.until([&] { return w.a.done.contains(1); }));
  EXPECT_TRUE(w.a.done.at(1).ok()) << message_of(w.a.done.at(1));
  EXPECT_TRUE(same(w.a, 5, w.b, 5000, 400'000));
}

TEST_P(Seeds, AfterTheFenceNoByteLands) {
  Wire w(GetParam(), rails(2));
  ASSERT_TRUE(w.ready());
  const Grant grant = w.b.grant({{0, 300'000}, {500'000, 300'000}}, Rights::kReadWrite);
  const Grant other = w.b.grant({{900'000, 50'000}}, Rights::kWrite);
  for (std::uint64_t op = 1; op <= 4; ++op)
    w.a.peer->outbound().start(
        w.a.job(op, grant.ref, {{0, 0, 300'000}, {400'000, 500'000, 300'000}}));
  w.a.peer->outbound().start(w.a.job(5, other.ref, {{1, 900'000, 50'000}}));
  w.a.peer->outbound().start(w.a.job(6, grant.ref, {{800'000, 100, 10'000}}, true));
  if (GetParam() % 3 == 0) w.fabric.stalled = {"b0"};  // no LOCAL_INV is carried out
  w.fabric.places_late = GetParam() % 2 == 0;
  w.rounds(static_cast<int>(w.fabric.draw(400)));
  w.b.grants.erase(grant.ref.id);
  if (!w.b.peer->inbound().revoke(grant.ref, w.now)) {
    ASSERT_TRUE(w.until([&] { return w.b.fenced.size() == 1; }));
    EXPECT_EQ(w.b.fenced[0], grant.ref);
  }
  w.fabric.stalled.clear();
  std::memset(w.b.memory.data(), 0x5a, 850'000);  // ours again
  const std::vector<std::byte> owned(w.b.memory.begin(), w.b.memory.begin() + 850'000);
  ASSERT_TRUE(w.until([&] { return w.a.done.size() == 6; }));
  w.rounds(1000);
  EXPECT_TRUE(std::equal(owned.begin(), owned.end(), w.b.memory.begin()));
  for (std::uint64_t op = 1; op <= 6; ++op) {
    const Status& status = w.a.done.at(op);
    if (op == 5) {
      EXPECT_TRUE(status.ok()) << message_of(status);  // another grant: replayed where it must be
    } else if (!status.ok()) {
      EXPECT_EQ(status.error().code, ErrorCode::kStale) << message_of(status);
    }
  }
  EXPECT_TRUE(same(w.a, 1, w.b, 900'000, 50'000));
  EXPECT_EQ(w.a.peer->outbound().rail_errors(0), 0U);  // a revocation is no fault of the rail
}

TEST_P(Seeds, WhatWasGivenUpIsNotTouchedAfterItsEnd) {
  Wire w(GetParam(), rails(2));
  ASSERT_TRUE(w.ready());
  const Grant grant = w.b.grant({{0, kBytes}}, Rights::kReadWrite);
  std::set<std::size_t> over;  // numbers of 50,000 byte places of A that are the caller's again
  w.on_done = [&](End&, std::uint64_t op) { over.insert(op - 1); };
  w.fabric.on_touch = [&](const std::byte* p, std::size_t, bool) {
    if (p < w.a.memory.data() || p >= w.a.memory.data() + kBytes) return;
    EXPECT_FALSE(over.contains(static_cast<std::size_t>(p - w.a.memory.data()) / 50'000));
  };
  if (GetParam() % 4 == 0) w.fabric.stalled = {"a0"};
  for (std::uint64_t op = 1; op <= 20; ++op) {
    w.a.peer->outbound().start(
        w.a.job(op, grant.ref, {{(op - 1) * 50'000, (op - 1) * 50'000, 50'000}}, op % 3 == 0));
    w.rounds(static_cast<int>(w.fabric.draw(30)));
    if (op % 2 == 0) w.a.peer->outbound().give_up(op, Error{ErrorCode::kCancelled, "test"}, w.now);
  }
  const bool stalled = !w.fabric.stalled.empty();
  ASSERT_TRUE(w.until([&] {
    for (std::uint64_t op = 2; op <= 20; op += 2)
      if (!w.a.done.contains(op)) return false;
    return true;
  })) << "given up, but never over"
      << stalled;
  w.fabric.stalled.clear();
  ASSERT_TRUE(w.until([&] { return w.a.done.size() == 20; }));
  for (const auto& [op, status] : w.a.done) {
    if (op % 2 == 1) {
      EXPECT_TRUE(status.ok()) << op << " " << message_of(status);
    } else if (!status.ok()) {
      EXPECT_EQ(status.error().code, ErrorCode::kCancelled) << message_of(status);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Fabric, Seeds, ::testing::Range<std::uint64_t>(1, 101));

TEST(Peer, WhatAGrantDoesNotAllowIsRefusedAndTheRailsGoOn) {
  Wire w(1, 1);
  ASSERT_TRUE(w.ready());
  const Grant readable = w.b.grant({{0, 1000}}, Rights::kRead);
  const Grant writable = w.b.grant({{0, 1000}, {2000, 1000}}, Rights::kWrite);
  const Grant expired = w.b.grant({{0, 1000}}, Rights::kWrite, w.now);
  Outbound& out = w.a.peer->outbound();
  out.start(w.a.job(1, readable.ref, {{0, 0, 10}}));
  out.start(w.a.job(2, writable.ref, {{0, 0, 10}}, true));
  out.start(w.a.job(3, writable.ref, {{0, 999, 2}}));
  out.start(w.a.job(4, writable.ref, {{0, ~std::uint64_t{0}, 2}}));
  out.start(w.a.job(5, {writable.ref.id, writable.ref.generation ^ 1}, {{0, 0, 10}}));
  out.start(w.a.job(6, expired.ref, {{0, 0, 10}}));
  out.start(w.a.job(7, writable.ref, {{0, 2000, 1000}}));
  ASSERT_TRUE(w.until([&] { return w.a.done.size() == 7; }));
  for (const std::uint64_t op : {1, 2, 3, 4})
    EXPECT_EQ(w.a.done.at(op).error().code, ErrorCode::kInvalidArgument) << op;
  for (const std::uint64_t op : {5, 6})
    EXPECT_EQ(w.a.done.at(op).error().code, ErrorCode::kStale) << op;
  EXPECT_TRUE(w.a.done.at(7).ok()) << message_of(w.a.done.at(7));
  EXPECT_EQ(out.reconnects(), 0U);
}

TEST(Peer, ALowerClassWaitsForWhatAHigherOneHasToPost) {
  Wire w(12, 1);
  ASSERT_TRUE(w.ready());
  const Grant grant = w.b.grant({{0, kBytes}}, Rights::kWrite);
  w.fabric.stalled = {"a0"};  // the rail takes one chunk and no more
  w.a.peer->outbound().start(w.a.job(1, grant.ref, {{0, 0, 500'000}}));
  w.a.peer->outbound().start(w.a.job(4, grant.ref, {{0, 0, 500'000}}));
  w.a.peer->outbound().send(Priority::kPrefetch, {std::byte{1}}, 2);
  w.a.peer->outbound().send(Priority::kPrefetch, {std::byte{2}}, 3);
  w.rounds(500);
  EXPECT_TRUE(w.b.deliveries.empty());
  w.a.peer->outbound().give_up(2, Error{ErrorCode::kCancelled, "test"}, w.now);
  w.rounds(10);
  ASSERT_TRUE(w.until([&] { return w.a.done.contains(2); }));
  EXPECT_NE(message_of(w.a.done.at(2)).find("taken back"), std::string::npos);
  w.fabric.stalled.clear();
  ASSERT_TRUE(w.until([&] { return w.a.done.contains(1) && w.a.done.contains(3); }));
  EXPECT_TRUE(w.a.done.at(1).ok() && w.a.done.at(3).ok());
  ASSERT_EQ(w.b.deliveries.size(), 3U);  // the two writes first
  EXPECT_EQ(std::get<std::vector<std::byte>>(w.b.deliveries[2]).at(0), std::byte{2});
}

TEST(Peer, AGrantThatExpiresLosesItsWindows) {
  Wire w(2, 1);
  ASSERT_TRUE(w.ready());
  const Grant grant = w.b.grant({{0, 1000}}, Rights::kWrite, w.now + 500'000'000);
  w.a.peer->outbound().start(w.a.job(1, grant.ref, {{0, 0, 10}}));
  ASSERT_TRUE(w.until([&] { return w.a.done.contains(1); }));
  EXPECT_TRUE(w.a.done.at(1).ok());
  EXPECT_EQ(w.b.peer->inbound().windows(), 1U);
  EXPECT_EQ(w.b.peer->inbound().next_timer_ns(), grant.expires_ns);
  w.now = grant.expires_ns;
  ASSERT_TRUE(w.until([&] { return w.b.peer->inbound().windows() == 0; }));
  w.a.peer->outbound().start(w.a.job(2, grant.ref, {{0, 0, 10}}));
  ASSERT_TRUE(w.until([&] { return w.a.done.contains(2); }));
  EXPECT_EQ(w.a.done.at(2).error().code, ErrorCode::kStale);
}

TEST(Peer, AGrantOfTooManyRangesIsRefusedWithTheLimit) {
  Wire w(3, 1);
  ASSERT_TRUE(w.ready());
  std::vector<Range> ranges;
  for (std::uint64_t i = 0; i <= kMaxWindows; ++i) ranges.push_back({i * 16, 8});
  const Grant grant = w.b.grant(ranges, Rights::kWrite);
  w.a.peer->outbound().start(w.a.job(1, grant.ref, {{0, 0, 8}}));
  ASSERT_TRUE(w.until([&] { return w.a.done.contains(1); }));
  EXPECT_EQ(w.a.done.at(1).error().code, ErrorCode::kUnsupported);
  EXPECT_NE(w.a.done.at(1).error().message.find("4096"), std::string::npos);
  ranges.pop_back();
  const Grant fits = w.b.grant(ranges, Rights::kWrite);  // more binds than the queue is deep
  w.a.peer->outbound().start(w.a.job(2, fits.ref, {{0, 16 * 4095, 8}}));
  ASSERT_TRUE(w.until([&] { return w.a.done.contains(2); }));
  EXPECT_TRUE(w.a.done.at(2).ok()) << message_of(w.a.done.at(2));
}

TEST(Peer, ADeadRailRestsAndTheOtherCarriesOn) {
  Wire w(4, 2);
  ASSERT_TRUE(w.ready());
  const Grant grant = w.b.grant({{0, kBytes}}, Rights::kWrite);
  w.fabric.dead = {"a1"};
  for (std::uint64_t op = 1; op <= 30; ++op)
    w.a.peer->outbound().start(w.a.job(op, grant.ref, {{0, 0, 600'000}}));
  ASSERT_TRUE(w.until([&] { return w.a.done.size() == 30; }));
  for (const auto& [op, status] : w.a.done) EXPECT_TRUE(status.ok()) << message_of(status);
  EXPECT_EQ(w.a.peer->outbound().rail_errors(1), 3U);  // then it rested
  EXPECT_EQ(w.a.peer->outbound().rail_state(1), Outbound::RailState::kDown);
  EXPECT_EQ(w.a.peer->outbound().rail_state(0), Outbound::RailState::kReady);
  EXPECT_TRUE(w.a.peer->outbound().failure().ok());
  w.fabric.dead.clear();
  w.now += RailHealth::kFirstRestNs;
  ASSERT_TRUE(w.ready());
}

TEST(Peer, WhenEveryRailRestsTheLinkHasFailed) {
  Wire w(5, 1);
  ASSERT_TRUE(w.ready());
  const Grant grant = w.b.grant({{0, kBytes}}, Rights::kWrite);
  w.fabric.dead = {"a0"};
  w.a.peer->outbound().start(w.a.job(1, grant.ref, {{0, 0, 1000}}));
  ASSERT_TRUE(w.until([&] { return !w.a.peer->outbound().failure().ok(); }));
  EXPECT_EQ(w.a.peer->outbound().failure().error().code, ErrorCode::kTransport);
  EXPECT_TRUE(w.a.done.empty());
  w.a.peer->close(w.a.peer->outbound().failure());
  const auto done = w.a.peer->outbound().take_done();
  ASSERT_EQ(done.size(), 1U);
  EXPECT_EQ(done[0].status.error().code, ErrorCode::kTransport);
}

TEST(Peer, AnOwnerWithoutWindowsOrQueuePairsSaysSo) {
  Wire w(6, 1);
  ASSERT_TRUE(w.ready());
  dynamic_cast<FakeNic&>(*w.b.nics[0]).windows_left = 2;
  const Grant grant = w.b.grant({{0, 10}, {20, 10}, {40, 10}}, Rights::kWrite);
  w.a.peer->outbound().start(w.a.job(1, grant.ref, {{0, 0, 5}}));
  ASSERT_TRUE(w.until([&] { return w.a.done.contains(1); }));
  EXPECT_EQ(w.a.done.at(1).error().code, ErrorCode::kIo);
  Wire refused(7, 1);
  refused.fabric.fail_connect(1'000'000);
  ASSERT_TRUE(refused.until([&] { return !refused.a.peer->outbound().failure().ok(); }));
}

TEST(Peer, APortThatGoesDownIsMadeAnew) {
  Wire w(8, 1);
  ASSERT_TRUE(w.ready());
  dynamic_cast<FakeNic&>(*w.a.nics[0]).events = {NicEvent::kPortDown};
  const Grant grant = w.b.grant({{0, kBytes}}, Rights::kWrite);
  w.a.peer->outbound().start(w.a.job(1, grant.ref, {{0, 0, 1000}}));
  ASSERT_TRUE(w.until([&] { return w.a.done.contains(1); }));
  EXPECT_TRUE(w.a.done.at(1).ok());
  EXPECT_EQ(w.a.peer->outbound().reconnects(), 1U);
}

TEST(Peer, ManyOperationsShareTheSlots) {
  Wire w(9, 1);
  ASSERT_TRUE(w.ready());
  const Grant grant = w.b.grant({{0, kBytes}}, Rights::kWrite);
  const std::size_t many = 3 * kMaxSlots;
  for (std::uint64_t op = 1; op <= many; ++op)
    w.a.peer->outbound().start(w.a.job(op, grant.ref, {{op, op, 3}}));
  ASSERT_TRUE(w.until([&] { return w.a.done.size() == many && w.arrivals(w.b) == many; }));
  for (const auto& [op, status] : w.a.done) EXPECT_TRUE(status.ok());
}

// A guessable packet number would let a stranger inject packets: rather no link.
TEST(Peer, WithoutRandomBytesBothSidesFail) {
  Wire w(11, 1);
  w.no_random = true;
  ASSERT_TRUE(w.until([&] { return !w.a.failed.ok(); }));
  EXPECT_EQ(w.a.failed.error().code, ErrorCode::kIo);
  Wire owner(12, 1);
  owner.turn(owner.a, owner.b, 0);  // the offer is on its way
  owner.no_random = true;
  ASSERT_FALSE(owner.b.inbox.empty());
  const Status refused = owner.b.peer->on_control(owner.b.inbox.front(), owner.now);
  EXPECT_EQ(refused.error().code, ErrorCode::kIo);
}

TEST(Peer, ABrokenPeerIsRefused) {
  Wire w(10, 2);
  ASSERT_TRUE(w.ready());
  Peer& peer = *w.b.peer;
  const Begin begin{7, 3, Priority::kStream, {1, 2}, 0, 10};
  ASSERT_TRUE(peer.on_control(encode(begin), w.now).ok());
  Begin same_slot = begin;
  same_slot.op = 8;
  for (const Control& bad :
       std::vector<Control>{begin, same_slot, Posted{7, 0, 1U << 2}, Map{{}, 2, 1, 1},
                            Offer{0, 1, {w.a.nics[0]->info().gid, QueuePairNumber{5}, 1, 4096}}})
    EXPECT_EQ(peer.on_control(encode(bad), w.now).error().code, ErrorCode::kCorrupt) << bad.index();
  WorkDone stray{0, QueuePairNumber{999'999}, WorkKind::kReceive, WorkStatus::kOk, 0};
  EXPECT_FALSE(*peer.on_work(w.b.nics[0].get(), stray, w.now));
}

// A message costs its bytes, a write its arrival; what will never be delivered is given back.
TEST(Peer, NothingIsSentWithoutCreditAndBothSidesCountAlike) {
  Wire w(12, 1);
  ASSERT_TRUE(w.ready());
  w.a.window = SendWindow();
  w.a.window.open({1000, 0});
  const Grant grant = w.b.grant({{0, kBytes}}, Rights::kReadWrite);
  for (std::uint64_t op = 1; op <= 100; ++op)
    w.a.peer->outbound().start(w.a.job(op, grant.ref, {{op, op, 3}}));
  w.a.peer->outbound().send(Priority::kStream, std::vector<std::byte>(500));
  w.a.peer->outbound().start(w.a.job(200, grant.ref, {{0, 0, 3}}, true));
  ASSERT_TRUE(w.until([&] { return w.a.done.contains(200); }));  // reads ask for none
  w.rounds(20'000);
  EXPECT_EQ(w.arrivals(w.b), 1000 / kBeginCredit);
  EXPECT_EQ(w.b.held, 1000 / kBeginCredit * kBeginCredit);
  w.a.window.open({100 * kBeginCredit + text_credit(500), 0});
  ASSERT_TRUE(w.until([&] { return w.b.deliveries.size() == 101; }));
  EXPECT_EQ(w.b.held, 100 * kBeginCredit + text_credit(500));
}

TEST(Peer, TheLargestMessageFitsIntoAFrame) {
  for (const std::size_t bytes : {kMaxMessageBytes, kMaxMessageBytes + 1}) {
    FramePrefix prefix;
    prefix.type = static_cast<std::uint8_t>(FrameType::kMessage);
    prefix.body_bytes = static_cast<std::uint32_t>(
        encode(Text{Priority::kStream, std::vector<std::byte>(bytes), 1}).size());
    EXPECT_EQ(check_prefix(prefix, true, kTextHeadBytes).ok(), bytes == kMaxMessageBytes);
  }
}

TEST(Peer, WritesThatFailHoldNoCredit) {
  Wire w(13, 1);
  ASSERT_TRUE(w.ready());
  for (std::uint64_t op = 1; op <= 20; ++op)
    w.a.peer->outbound().start(w.a.job(op, GrantRef{77, 7}, {{0, 0, 3}}));
  ASSERT_TRUE(w.until([&] { return w.a.done.size() == 20 && w.b.held == 0; }));
  for (const auto& [op, status] : w.a.done) EXPECT_EQ(status.error().code, ErrorCode::kStale);
}

TEST(Peer, WithoutReceivesASenderGetsAnErrorNotAWait) {
  Wire w(11, 1);
  ASSERT_TRUE(w.ready());
  dynamic_cast<FakeNic&>(*w.b.nics[0]).receives = 0;
  const Grant grant = w.b.grant({{0, kBytes}}, Rights::kWrite);
  w.a.peer->outbound().start(w.a.job(1, grant.ref, {{0, 0, 1000}}));
  ASSERT_TRUE(w.until([&] { return w.a.peer->outbound().rail_errors(0) > 0; }));
  (void)w.b.nics[0]->post_receives(8);
  ASSERT_TRUE(w.until([&] { return w.a.done.contains(1); }));
  EXPECT_TRUE(w.a.done.at(1).ok());
  EXPECT_EQ(w.arrivals(w.b), 1U);
}

}  // namespace
}  // namespace kvcore::transport::rdma
