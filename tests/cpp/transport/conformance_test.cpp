// What link.h promises, over every kind of link.
#include <algorithm>
#include <random>

#include "base/fault.h"
#include "fixture.h"

namespace kvcore::transport {
namespace {

using Conformance = LinkTest;

TEST_P(Conformance, BothSidesKnowEachOther) {
  TransportOptions a, b;
  a.identity = "decode worker 1";
  b.identity = "prefill worker 2";
  a.role = "decode";
  b.role = std::string(kMaxRoleBytes, 'p');
  a.model_digest = b.model_digest = digest_of(3);
  a.layout_digest = digest_of(4);
  connect(a, b);
  EXPECT_EQ(to_owner->info().peer_identity, "decode worker 1");
  EXPECT_EQ(to_peer->info().peer_identity, "prefill worker 2");
  EXPECT_EQ(to_owner->info().peer_role, "decode");
  EXPECT_EQ(to_peer->info().peer_role, b.role);
  EXPECT_EQ(to_owner->info().peer_model, digest_of(3));
  EXPECT_EQ(to_owner->info().peer_layout, digest_of(4));
  EXPECT_EQ(to_peer->info().peer_layout, Digest{});
  EXPECT_TRUE(to_owner->info().up && to_peer->info().up);
  EXPECT_EQ(to_owner->info().scheme, scheme_of(GetParam()));
}

TEST_P(Conformance, MessagesArriveWholeAndInOrderBothWays) {
  connect();
  std::vector<std::string> sent;
  for (int i = 0; i < 300; ++i)
    sent.push_back(std::string(static_cast<std::size_t>(i * 37 % 5000), 'x') + std::to_string(i));
  sent.push_back("");
  sent.push_back(std::string(kMaxMessageBytes, 'm'));
  for (const auto& s : sent) {
    ASSERT_TRUE(to_owner->send(bytes_of(s)).ok());
    ASSERT_TRUE(to_peer->send(bytes_of(s)).ok());
  }
  for (const auto& s : sent) {
    EXPECT_EQ(string_of(owner->next<Message>()->bytes), s);
    EXPECT_EQ(string_of(peer->next<Message>()->bytes), s);
  }
  const std::vector<std::byte> large(kMaxMessageBytes + 1);
  EXPECT_EQ(to_owner->send(large).error().code, ErrorCode::kInvalidArgument);
}

TEST_P(Conformance, ScatteredWriteLandsWhereItShouldAndNowhereElse) {
  connect();
  const Range ranges[] = {{1000, 3000}, {100'000, 2'000'000}};
  const Grant grant = *owner->transport->create_grant(owner_region, ranges, Rights::kWrite);
  const std::vector<Segment> segments = {
      {5, 1001, 1}, {4096, 1500, 2500}, {1'000'003, 100'000, 1'999'999}, {77, 2'099'999, 1}};
  std::vector<std::byte> expected = owner_memory.copy();
  for (const Segment& s : segments)
    std::memcpy(expected.data() + s.remote_offset, peer_memory.data() + s.local_offset, s.bytes);
  const auto op = to_owner->write(peer_region, segments, grant.ref, 0xfeedULL);
  ASSERT_TRUE(op.ok()) << op.error().message;
  const auto done = peer->next<Completion>();
  ASSERT_TRUE(done && done->status.ok()) << message_of(done->status);
  EXPECT_EQ(done->bytes, 2'002'501U);
  const auto arrival = owner->next<Arrival>();
  ASSERT_TRUE(arrival && arrival->status.ok());
  EXPECT_EQ(arrival->tag, 0xfeedULL);
  EXPECT_EQ(arrival->bytes, 2'002'501U);
  EXPECT_EQ(arrival->grant, grant.ref);
  EXPECT_LE(std::abs(now_ns() - arrival->at_ns), 5000 * kMs);
  EXPECT_EQ(owner_memory.copy(), expected);
  EXPECT_EQ(to_owner->info().bytes_out, 2'002'501U);
  EXPECT_EQ(to_peer->info().bytes_in, 2'002'501U);
}

TEST_P(Conformance, ReadBringsTheOwnersBytes) {
  connect();
  const Grant grant = grant_all(Rights::kRead);
  const std::vector<Segment> segments = {{0, 3, 1}, {10, 999'999, 3'000'001}, {7'000'000, 0, 500}};
  std::vector<std::byte> expected = peer_memory.copy();
  for (const Segment& s : segments)
    std::memcpy(expected.data() + s.local_offset, owner_memory.data() + s.remote_offset, s.bytes);
  ASSERT_TRUE(to_owner->read(peer_region, segments, grant.ref).ok());
  const auto done = peer->next<Completion>();
  ASSERT_TRUE(done && done->status.ok()) << message_of(done->status);
  EXPECT_EQ(done->bytes, 3'000'502U);
  EXPECT_EQ(peer_memory.copy(), expected);
  EXPECT_FALSE(owner->next<Arrival>(20).has_value());
}

TEST_P(Conformance, TheGrantorWritesToTheConnectorAsWell) {
  connect();
  const Range all{0, kBytes};
  const Grant grant = *peer->transport->create_grant(peer_region, {&all, 1}, Rights::kWrite);
  const Segment s{0, 4096, 100'000};
  ASSERT_TRUE(to_peer->write(owner_region, {&s, 1}, grant.ref, 1).ok());
  EXPECT_TRUE(owner->next<Completion>()->status.ok());
  EXPECT_EQ(peer->next<Arrival>()->bytes, 100'000U);
  EXPECT_EQ(std::memcmp(peer_memory.data() + 4096, owner_memory.data(), 100'000), 0);
}

TEST_P(Conformance, ArrivalsAndMessagesOfOneClassComeAsPosted) {
  connect();
  const Grant grant = grant_all();
  std::mt19937_64 rng(1);
  for (std::uint64_t i = 0; i < 100; ++i) {
    const Segment s{0, 0, 1 + rng() % 300'000};
    ASSERT_TRUE(to_owner->write(peer_region, {&s, 1}, grant.ref, i).ok());
    if (i % 3 == 0) {
      ASSERT_TRUE(to_owner->send(bytes_of(std::to_string(i))).ok());
    }
  }
  std::uint64_t arrivals = 0, messages = 0;
  while (arrivals < 100 || messages < 34) {
    std::vector<Event> events;
    owner->transport->poll(&events);
    for (const Event& e : events) {
      if (const auto* a = std::get_if<Arrival>(&e)) {
        EXPECT_EQ(a->tag, arrivals++);
      }
      if (const auto* m = std::get_if<Message>(&e)) {
        EXPECT_EQ(string_of(m->bytes), std::to_string(3 * messages++));
        EXPECT_EQ(arrivals, 3 * messages - 2);  // after the write that was posted before it
      }
    }
    ASSERT_EQ(owner->transport->link(to_peer->id()) != nullptr, true);
  }
  for (int i = 0; i < 100; ++i) EXPECT_TRUE(peer->next<Completion>()->status.ok());
}

TEST_P(Conformance, StaleExpiredAndForeignGrantsAreRefused) {
  connect();
  const Grant grant = grant_all();
  const Segment s{0, 0, 1000};
  const std::vector<std::byte> before = owner_memory.copy();
  GrantRef wrong = grant.ref;
  wrong.generation ^= 1;
  EXPECT_EQ(write_and_wait(wrong, {s}).error().code, ErrorCode::kStale);
  EXPECT_EQ(write_and_wait({grant.ref.id ^ 1, grant.ref.generation}, {s}).error().code,
            ErrorCode::kStale);
  const Range all{0, kBytes};
  const Grant expired =
      *owner->transport->create_grant(owner_region, {&all, 1}, Rights::kReadWrite, now_ns());
  EXPECT_EQ(write_and_wait(expired.ref, {s}).error().code, ErrorCode::kStale);
  revoke(grant.ref);
  EXPECT_EQ(write_and_wait(grant.ref, {s}).error().code, ErrorCode::kStale);
  ASSERT_TRUE(to_owner->read(peer_region, {&s, 1}, grant.ref).ok());
  EXPECT_EQ(peer->next<Completion>()->status.error().code, ErrorCode::kStale);
  const Grant readable = grant_all(Rights::kRead);
  EXPECT_EQ(write_and_wait(readable.ref, {s}).error().code, ErrorCode::kInvalidArgument);
  const Grant writable = grant_all(Rights::kWrite);
  ASSERT_TRUE(to_owner->read(peer_region, {&s, 1}, writable.ref).ok());
  EXPECT_EQ(peer->next<Completion>()->status.error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(owner_memory.copy(), before);
  EXPECT_TRUE(write_and_wait(writable.ref, {s}).ok());  // the link goes on
  EXPECT_FALSE(owner->next<Down>(1).has_value());
}

TEST_P(Conformance, RangesOutsideTheGrantAreRefused) {
  connect();
  const Range ranges[] = {{4096, 4096}, {16384, 4096}};
  const Grant grant = *owner->transport->create_grant(owner_region, ranges, Rights::kReadWrite);
  const std::vector<std::byte> before = owner_memory.copy();
  const std::uint64_t max = ~std::uint64_t{0};
  for (const Segment& s :
       {Segment{0, 4095, 10}, Segment{0, 8191, 2}, Segment{0, 0, 1}, Segment{0, 8192, 8192},
        Segment{0, max, 1}, Segment{0, max - 10, 4096}, Segment{0, max - 4095, 4096},
        Segment{0, 20480, 1}, Segment{0, kBytes, 1}, Segment{0, 4096, 4097}}) {
    EXPECT_EQ(write_and_wait(grant.ref, {s}).error().code, ErrorCode::kInvalidArgument)
        << s.remote_offset;
    ASSERT_TRUE(to_owner->read(peer_region, {&s, 1}, grant.ref).ok());
    EXPECT_EQ(peer->next<Completion>()->status.error().code, ErrorCode::kInvalidArgument);
  }
  EXPECT_EQ(owner_memory.copy(), before);
  EXPECT_TRUE(write_and_wait(grant.ref, {{0, 4096, 4096}, {1, 16384, 4096}}).ok());
}

TEST_P(Conformance, BadLocalArgumentsPostNothing) {
  connect();
  const Grant grant = grant_all();
  const std::uint64_t max = ~std::uint64_t{0};
  for (const Segment& s : {Segment{kBytes, 0, 1}, Segment{0, 0, 0}, Segment{max, 0, 2},
                           Segment{1, 0, kBytes}, Segment{0, 0, max}})
    EXPECT_EQ(to_owner->write(peer_region, {&s, 1}, grant.ref, 0).error().code,
              ErrorCode::kInvalidArgument);
  EXPECT_EQ(to_owner->write(peer_region, {}, grant.ref, 0).error().code,
            ErrorCode::kInvalidArgument);
  const Segment ok{0, 0, 1};
  EXPECT_EQ(to_owner->write(RegionId{999}, {&ok, 1}, grant.ref, 0).error().code,
            ErrorCode::kNotFound);
  EXPECT_EQ(to_owner->info().outstanding_ops, 0U);
  EXPECT_FALSE(peer->next<Completion>(5).has_value());

  Transport& t = *owner->transport;
  const Range overlapping[] = {{0, 100}, {50, 100}}, empty[] = {{5, 0}},
              outside[] = {{kBytes - 1, 2}};
  const Range overflow[] = {{max, 2}};
  for (const std::span<const Range> bad :
       {std::span<const Range>(overlapping), std::span<const Range>(empty),
        std::span<const Range>(outside), std::span<const Range>(overflow),
        std::span<const Range>()})
    EXPECT_EQ(t.create_grant(owner_region, bad, Rights::kWrite).error().code,
              ErrorCode::kInvalidArgument);
  EXPECT_EQ(t.register_region(nullptr, 10).error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(t.register_region(owner_memory.data(), kBytes + 1, owner_memory.fd()).error().code,
            ErrorCode::kInvalidArgument);
}

TEST_P(Conformance, ABoundGrantIsStaleForEveryoneElse) {
  TransportOptions thief;
  thief.identity = "thief";
  connect({}, thief);
  const Range all{0, kBytes};
  const auto bound_to = [&](const std::string& who) {
    return *owner->transport->create_grant(owner_region, {&all, 1}, Rights::kReadWrite, 0, who);
  };
  const std::vector<std::byte> before = owner_memory.copy();
  const Segment s{0, 0, 1000};
  for (const char* other : {"prefill 1", "thie", "thief2"}) {
    const Grant grant = bound_to(other);
    EXPECT_EQ(write_and_wait(grant.ref, {s}).error().code, ErrorCode::kStale) << other;
    ASSERT_TRUE(to_owner->read(peer_region, {&s, 1}, grant.ref).ok());
    EXPECT_EQ(peer->next<Completion>()->status.error().code, ErrorCode::kStale) << other;
  }
  EXPECT_EQ(owner_memory.copy(), before);
  EXPECT_TRUE(write_and_wait(bound_to("thief").ref, {s}).ok());
  EXPECT_EQ(owner->transport
                ->create_grant(owner_region, {&all, 1}, Rights::kRead, 0,
                               std::string(kMaxIdentityBytes + 1, 'x'))
                .error()
                .code,
            ErrorCode::kInvalidArgument);
}

TEST_P(Conformance, AQuietWriteLandsWithoutAnArrival) {
  connect();
  const Grant grant = grant_all();
  OpOptions quiet;
  quiet.notify = false;
  EXPECT_TRUE(write_and_wait(grant.ref, {{0, 0, 100'000}}, quiet).ok());
  EXPECT_TRUE(write_and_wait(grant.ref, {{1, 200'000, 10}}).ok());
  EXPECT_EQ(owner->next<Arrival>()->bytes, 10U);
  EXPECT_FALSE(owner->next<Arrival>(10).has_value());
  EXPECT_EQ(std::memcmp(owner_memory.data(), peer_memory.data(), 100'000), 0);
}

TEST_P(Conformance, ASendCompletesOnceThePeerHasIt) {
  connect();
  SendOptions asked;
  asked.completion = true;
  for (const std::size_t bytes : {std::size_t{0}, std::size_t{7}, kMaxMessageBytes}) {
    const std::vector<std::byte> message(bytes, std::byte{5});
    const auto op = to_owner->send(message, asked);
    ASSERT_TRUE(op.ok());
    const auto done = peer->next<Completion>();
    ASSERT_TRUE(done && done->status.ok()) << message_of(done->status);
    EXPECT_EQ(done->op, *op);
    EXPECT_EQ(done->bytes, bytes);
    std::vector<Event> there;  // without waiting: that is what the completion means
    owner->transport->poll(&there);
    ASSERT_EQ(there.size(), 1U);
    EXPECT_EQ(std::get<Message>(there[0]).bytes, message);
  }
  ASSERT_TRUE(to_owner->send(bytes_of("nobody asks")).ok());
  EXPECT_TRUE(owner->next<Message>().has_value());
  EXPECT_FALSE(peer->next<Completion>(10).has_value());
  EXPECT_EQ(to_owner->info().outstanding_ops, 0U);
}

TEST_P(Conformance, ALateOrCancelledSendIsTakenBack) {
  connect();
  if (is_loopback()) {
    hub->set_manual(true);
  } else {
    to_owner->set_pacing(1'000'000);  // a class 0 write holds everything of lower classes back
    const Segment all{0, 0, kBytes};
    ASSERT_TRUE(to_owner->write(peer_region, {&all, 1}, grant_all().ref, 1).ok());
    ::usleep(5000);
  }
  SendOptions late;
  late.priority = Priority::kPrefetch;
  late.deadline_ns = now_ns() + 30 * kMs;
  const auto first = to_owner->send(bytes_of("late"), late);
  late.deadline_ns = 0;
  late.completion = true;
  const auto second = to_owner->send(bytes_of("cancelled"), late);
  to_owner->cancel(*second);
  const auto cancelled = peer->next<Completion>();
  ASSERT_TRUE(cancelled.has_value());
  EXPECT_EQ(cancelled->op, *second);
  EXPECT_EQ(cancelled->status.error().code, ErrorCode::kCancelled);
  const auto timed_out = peer->next<Completion>();
  ASSERT_TRUE(timed_out.has_value());
  EXPECT_EQ(timed_out->op, *first);
  EXPECT_EQ(timed_out->status.error().code, ErrorCode::kTimeout) << message_of(timed_out->status);
  to_owner->set_pacing(0);
  if (is_loopback()) hub->set_manual(false);
  EXPECT_FALSE(owner->next<Message>(20).has_value());
}

TEST_P(Conformance, SendsThatAwaitACompletionEndWithTheLink) {
  connect();
  SendOptions asked;
  asked.completion = true;
  asked.priority = Priority::kBackground;
  if (is_loopback()) {
    hub->set_manual(true);
  } else {
    to_owner->set_pacing(1'000'000);
    const Segment all{0, 0, kBytes};
    ASSERT_TRUE(to_owner->write(peer_region, {&all, 1}, grant_all().ref, 1).ok());
  }
  const auto op = to_owner->send(bytes_of("x"), asked);
  ASSERT_TRUE(op.ok());
  ::usleep(2000);
  to_peer->close();
  ASSERT_TRUE(peer->next<Down>().has_value());
  std::size_t ended = 0;
  for (const Event& e : peer->seen) {
    const auto* done = std::get_if<Completion>(&e);
    if (done == nullptr || done->op != *op) continue;
    ++ended;
    EXPECT_EQ(done->status.error().code, ErrorCode::kPeerDead) << message_of(done->status);
  }
  EXPECT_EQ(ended, 1U);
}

TEST_P(Conformance, RegionsThatOthersCouldWriteAreRefused) {
  connect();
  constexpr std::size_t kSmall = 1UL << 20;
  SharedMemory sealed(kSmall);  // no seal can be added any more: it might still be mapped writable
  ASSERT_EQ(::fcntl(sealed.fd(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_SEAL), 0);
  Transport& t = *owner->transport;
  EXPECT_EQ(t.register_region(sealed.data(), kSmall, sealed.fd()).error().code,
            ErrorCode::kInvalidArgument);
  SharedMemory open(kSmall);
  ASSERT_TRUE(t.register_region(open.data(), kSmall, open.fd()).ok());
  const int again = ::open(text("/proc/self/fd/", open.fd()).c_str(), O_RDWR | O_CLOEXEC);
  ASSERT_GE(again, 0);
  EXPECT_EQ(::mmap(nullptr, kSmall, PROT_READ | PROT_WRITE, MAP_SHARED, again, 0), MAP_FAILED);
  EXPECT_LT(::pwrite(again, "x", 1, 0), 0);
  ::close(again);
  open.data()[0] = std::byte{1};  // its owner's mapping goes on
  EXPECT_EQ(t.register_region({open.data(), kSmall, -1, transport::Memory::kCuda}).error().code,
            ErrorCode::kUnsupported);
}

// Without keep-alive no timer repairs a wake-up that was forgotten.
TEST_P(Conformance, EveryClassMovesWithoutAnyTimer) {
  TransportOptions options;
  options.keepalive_ns = 0;
  connect(options, options);
  const Grant grant = grant_all();
  for (int i = 0; i < 30; ++i) {
    OpOptions in_class;
    in_class.priority = static_cast<Priority>(i % kNumPriorities);
    ASSERT_TRUE(write_and_wait(grant.ref, {{0, 0, kBytes}}, in_class).ok()) << i;
    const Segment s{0, 0, 1'000'000};
    ASSERT_TRUE(to_owner->read(peer_region, {&s, 1}, grant.ref, in_class).ok());
    const auto done = peer->next<Completion>();
    ASSERT_TRUE(done && done->status.ok()) << i;
    SendOptions asked;
    asked.completion = true;
    asked.priority = in_class.priority;
    ASSERT_TRUE(to_owner->send(bytes_of("m"), asked).ok());
    ASSERT_TRUE(peer->next<Completion>().has_value()) << i;
  }
}

TEST_P(Conformance, DeadlineEndsAnOperation) {
  connect();
  const Grant grant = grant_all();
  if (is_loopback())
    hub->set_manual(true);
  else
    to_owner->set_pacing(1'000'000);  // 8 MB would take 8 s
  const std::int64_t start = now_ns();
  OpOptions options;
  options.deadline_ns = start + 100 * kMs;
  const Status status = write_and_wait(grant.ref, {{0, 0, kBytes}}, options);
  EXPECT_EQ(status.error().code, ErrorCode::kTimeout);
  EXPECT_GE(now_ns() - start, 100 * kMs);
  EXPECT_LT(now_ns() - start, 1000 * kMs);
  if (is_loopback()) hub->set_manual(false);
  to_owner->set_pacing(0);
  EXPECT_FALSE(owner->next<Arrival>(20).has_value());
  EXPECT_TRUE(write_and_wait(grant.ref, {{0, 0, 1000}}).ok());
  EXPECT_EQ(to_owner->info().outstanding_ops, 0U);
  EXPECT_EQ(to_owner->info().queued_bytes, 0U);
}

TEST_P(Conformance, CancelledWriteFreesItsMemoryAndIsNeverAnnounced) {
  connect();
  const Grant grant = grant_all();
  if (is_loopback())
    hub->set_manual(true);
  else
    to_owner->set_pacing(50'000'000);
  const Segment all{0, 0, kBytes};
  for (int round = 0; round < 5; ++round) {
    const auto op = to_owner->write(peer_region, {&all, 1}, grant.ref, 1);
    ::usleep(static_cast<useconds_t>(round * 7000));
    to_owner->cancel(*op);
    const auto done = peer->next<Completion>();
    ASSERT_TRUE(done.has_value());
    EXPECT_EQ(done->op, *op);
    EXPECT_EQ(done->status.error().code, ErrorCode::kCancelled) << message_of(done->status);
    to_owner->cancel(*op);  // unknown by now
  }
  EXPECT_TRUE(peer->transport->unregister_region(peer_region).ok());
  EXPECT_FALSE(owner->next<Arrival>(30).has_value());
  EXPECT_FALSE(peer->next<Completion>(1).has_value());
}

TEST_P(Conformance, CancelledReadStopsWriting) {
  connect();
  const Grant grant = grant_all();
  if (is_loopback()) hub->set_manual(true);
  to_peer->set_pacing(50'000'000);  // on tcp the owner sends
  const Segment all{0, 0, kBytes};
  const auto op = to_owner->read(peer_region, {&all, 1}, grant.ref);
  ::usleep(5000);
  to_owner->cancel(*op);
  const auto done = peer->next<Completion>();
  ASSERT_TRUE(done.has_value());
  if (GetParam() != "shm" && !is_rdma()) {  // there the reader itself may be quicker
    EXPECT_EQ(done->status.error().code, ErrorCode::kCancelled);
  }
  const std::vector<std::byte> after = peer_memory.copy();
  ::usleep(30'000);
  EXPECT_EQ(peer_memory.copy(), after);
}

TEST_P(Conformance, AfterRevokeReturnsNoByteLands) {
  connect();
  for (int round = 0; round < 8; ++round) {
    const Grant grant = grant_all();
    if (is_loopback())
      hub->set_manual(true);
    else
      to_owner->set_pacing(round % 2 == 0 ? 200'000'000 : 0);
    std::vector<OpId> ops;
    for (int k = 0; k < 4; ++k) {
      const Segment all{0, 0, kBytes};
      ops.push_back(*to_owner->write(peer_region, {&all, 1}, grant.ref, 1));
    }
    ::usleep(static_cast<useconds_t>(round * 1500));
    revoke(grant.ref);
    std::memset(owner_memory.data(), round, kBytes);  // the ranges are ours again
    if (is_loopback()) hub->set_manual(false);
    for (std::size_t k = 0; k < ops.size(); ++k) {
      const auto done = peer->next<Completion>();
      ASSERT_TRUE(done.has_value());
      if (!done->status.ok()) {
        EXPECT_EQ(done->status.error().code, ErrorCode::kStale) << message_of(done->status);
      }
    }
    const std::vector<std::byte> now = owner_memory.copy();
    EXPECT_EQ(std::ranges::count(now, static_cast<std::byte>(round)),
              static_cast<std::ptrdiff_t>(kBytes));
  }
}

TEST_P(Conformance, UnregisterIsRefusedWhileOperationsUseTheRegion) {
  connect();
  const Grant grant = grant_all();
  if (is_loopback())
    hub->set_manual(true);
  else
    to_owner->set_pacing(1'000'000);
  const Segment all{0, 0, kBytes};
  const auto op = to_owner->write(peer_region, {&all, 1}, grant.ref, 1);
  EXPECT_EQ(peer->transport->unregister_region(peer_region).error().code,
            ErrorCode::kInvalidArgument);
  to_owner->cancel(*op);
  ASSERT_TRUE(peer->next<Completion>().has_value());
  EXPECT_TRUE(peer->transport->unregister_region(peer_region).ok());
  EXPECT_EQ(peer->transport->unregister_region(peer_region).error().code, ErrorCode::kNotFound);
  if (is_rdma()) revoke(grant.ref);  // its fence may be late, and then is waited for
  EXPECT_TRUE(owner->transport->unregister_region(owner_region).ok());  // its grants go with it
}

TEST_P(Conformance, CloseEndsEverythingInOrder) {
  connect();
  const Grant grant = grant_all();
  if (is_loopback())
    hub->set_manual(true);
  else
    to_owner->set_pacing(1'000'000);
  const Segment all{0, 0, kBytes};
  for (int i = 0; i < 3; ++i)
    ASSERT_TRUE(to_owner->write(peer_region, {&all, 1}, grant.ref, 1).ok());
  ASSERT_TRUE(to_owner->send(bytes_of("last words"), {Priority::kPrefetch}).ok() || is_loopback());
  ASSERT_TRUE(to_owner->send(bytes_of("control"), {Priority::kStream}).ok());
  to_owner->close();
  to_owner->close();
  for (int i = 0; i < 3; ++i) {
    const auto done = peer->next<Completion>();
    ASSERT_TRUE(done.has_value());
    EXPECT_EQ(done->status.error().code, ErrorCode::kCancelled) << message_of(done->status);
  }
  const auto mine = peer->next<Down>();
  ASSERT_TRUE(mine.has_value());
  EXPECT_EQ(mine->status.error().code, ErrorCode::kCancelled);
  const auto theirs = owner->next<Down>();
  ASSERT_TRUE(theirs.has_value());
  EXPECT_TRUE(theirs->status.ok()) << message_of(theirs->status);
  EXPECT_EQ(owner->count<Message>(), 2U);
  EXPECT_EQ(owner->transport->link(to_peer->id()), nullptr);
  EXPECT_EQ(to_peer->send(bytes_of("x")).error().code, ErrorCode::kPeerDead);
  EXPECT_EQ(to_owner->write(peer_region, {&all, 1}, grant.ref, 1).error().code,
            ErrorCode::kPeerDead);
  EXPECT_TRUE(peer->transport->unregister_region(peer_region).ok());
}

TEST_P(Conformance, PendingOperationsOfTheOtherSideEndWhenALinkCloses) {
  connect();
  const Grant grant = grant_all();
  if (is_loopback())
    hub->set_manual(true);
  else
    to_owner->set_pacing(1'000'000);
  const Segment all{0, 0, kBytes};
  ASSERT_TRUE(to_owner->write(peer_region, {&all, 1}, grant.ref, 1).ok());
  ::usleep(10'000);
  to_peer->close();
  EXPECT_EQ(peer->next<Completion>()->status.error().code, ErrorCode::kPeerDead);
  EXPECT_TRUE(peer->next<Down>()->status.ok());
}

TEST_P(Conformance, LinksAreSafeAfterTheirTransport) {
  connect();
  peer.reset();
  EXPECT_FALSE(to_owner->send(bytes_of("x")).ok());
  const Segment s{0, 0, 1};
  EXPECT_FALSE(to_owner->write(peer_region, {&s, 1}, GrantRef{}, 1).ok());
  to_owner->cancel(OpId{1});
  to_owner->close();
  EXPECT_TRUE(owner->next<Down>()->status.ok());
}

TEST_P(Conformance, PeersOfDifferentModelsGoDownWithTheReason) {
  TransportOptions a, b;
  a.model_digest = digest_of(1);
  b.model_digest = digest_of(2);
  owner.emplace(make(a));
  peer.emplace(make(b));
  const auto address = owner->transport->listen(listen_address(GetParam()));
  to_owner = *peer->transport->connect(*address);
  const auto down = peer->next<Down>();
  ASSERT_TRUE(down.has_value());
  EXPECT_EQ(down->status.error().code, ErrorCode::kUnsupported) << message_of(down->status);
  EXPECT_NE(message_of(down->status).find("01010101"), std::string::npos);
  EXPECT_FALSE(owner->next<Up>(50).has_value());
  EXPECT_TRUE(owner->seen.empty());
  Node neutral(make({}));  // without a digest: with anyone
  ASSERT_TRUE(neutral.transport->connect(*address).ok());
  EXPECT_TRUE(neutral.next<Up>().has_value());
}

TEST_P(Conformance, OptionsThatCannotBeToldToAPeerAreRefused) {
  for (int i = 0; i < 3; ++i) {
    TransportOptions options;
    if (i == 0) options.identity = std::string(kMaxIdentityBytes + 1, 'x');
    if (i == 1) options.role = std::string(kMaxRoleBytes + 1, 'x');
    if (i == 2) options.key = "short";
    const auto made = try_make(options);
    ASSERT_FALSE(made.ok());
    EXPECT_EQ(made.error().code, ErrorCode::kInvalidArgument) << i;
  }
}

TEST_P(Conformance, WrongKeyGetsNothing) {
  TransportOptions a, b;
  a.key = std::string(32, 'a');
  b.key = std::string(32, 'b');
  owner.emplace(make(a));
  peer.emplace(make(b));
  const auto address = owner->transport->listen(listen_address(GetParam()));
  to_owner = *peer->transport->connect(*address);
  (void)to_owner->send(bytes_of("let me in")).ok();
  const auto down = peer->next<Down>();
  ASSERT_TRUE(down.has_value());
  EXPECT_EQ(down->status.error().code, ErrorCode::kUnauthenticated) << message_of(down->status);
  EXPECT_FALSE(owner->next<Up>(50).has_value());
  EXPECT_TRUE(owner->seen.empty());
}

TEST_P(Conformance, ThousandRandomOperationsWithRandomCancelsEndClean) {
  connect();
  const Grant grant = grant_all();
  std::mt19937_64 rng(7);
  std::vector<std::uint64_t> posted, completed;
  std::size_t ok = 0, cancelled = 0;
  const auto collect = [&](std::int64_t timeout_ms) {
    const auto done = peer->next<Completion>(timeout_ms);
    if (!done) return false;
    completed.push_back(static_cast<std::uint64_t>(done->op));
    if (done->status.ok())
      ++ok;
    else
      EXPECT_EQ(done->status.error().code, ErrorCode::kCancelled) << message_of(done->status);
    cancelled += !done->status.ok();
    return true;
  };
  for (int i = 0; i < 1000; ++i) {
    // Writes go to the lower half from the lower half, reads into the upper half; the places of one
    // operation do not overlap.
    std::vector<Segment> segments;
    std::uint64_t at = rng() % 1'000'000;
    for (std::uint64_t k = 0; k < 1 + rng() % 6; ++k) {
      const std::uint64_t n = 1 + rng() % (rng() % 8 == 0 ? 400'000 : 9000);
      segments.push_back({at, at, n});
      at += n + rng() % 5000;
    }
    OpOptions options;
    options.priority = static_cast<Priority>(rng() % 3);
    const bool read = rng() % 4 == 0;
    if (read)
      for (Segment& s : segments) s.local_offset += kBytes / 2;
    const auto op = read ? to_owner->read(peer_region, segments, grant.ref, options)
                         : to_owner->write(peer_region, segments, grant.ref, rng(), options);
    ASSERT_TRUE(op.ok()) << op.error().message;
    posted.push_back(static_cast<std::uint64_t>(*op));
    if (rng() % 3 == 0)
      to_owner->cancel(
          OpId{posted[posted.size() - 1 - rng() % std::min<std::size_t>(posted.size(), 5)]});
    if (rng() % 16 == 0) collect(1);
  }
  while (completed.size() < posted.size()) ASSERT_TRUE(collect(10'000));
  std::ranges::sort(completed);
  EXPECT_EQ(completed, posted);  // each exactly once
  EXPECT_GT(ok, 500U);
  if (!is_loopback()) {
    EXPECT_GT(cancelled, 10U);
  }
  EXPECT_EQ(to_owner->info().outstanding_ops, 0U);
  EXPECT_EQ(to_owner->info().queued_bytes, 0U);
  EXPECT_FALSE(peer->next<Completion>(20).has_value());
  EXPECT_TRUE(write_and_wait(grant.ref, {{0, 0, kBytes}}).ok());
  EXPECT_EQ(std::memcmp(owner_memory.data(), peer_memory.data(), kBytes), 0);
  EXPECT_TRUE(peer->transport->unregister_region(peer_region).ok());
}

TEST_P(Conformance, ManySegmentsInOneOperation) {
  connect();
  const Grant grant = grant_all();
  std::vector<Segment> segments;
  for (std::uint64_t i = 0; i < kMaxSegments; ++i)
    segments.push_back({i * 64, kBytes - 64 - i * 64, 64});
  EXPECT_TRUE(write_and_wait(grant.ref, segments).ok());
  for (std::uint64_t i = 0; i < kMaxSegments; ++i)
    ASSERT_EQ(
        std::memcmp(owner_memory.data() + kBytes - 64 - i * 64, peer_memory.data() + i * 64, 64),
        0);
  ASSERT_TRUE(to_owner->read(peer_region, segments, grant.ref).ok());
  EXPECT_TRUE(peer->next<Completion>()->status.ok());
  segments.push_back({0, 0, 1});
  EXPECT_EQ(write_and_wait(grant.ref, segments).error().code, ErrorCode::kInvalidArgument);
}

INSTANTIATE_TEST_SUITE_P(Links, Conformance,
                         ::testing::ValuesIn(with_rdma({"loopback", "shm", "tcp", "tcp6",
                                                        "rdma_fake"})),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace kvcore::transport
