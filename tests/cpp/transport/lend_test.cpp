// Lending: bytes that a peer reads where they lie, and how long the lender must leave them alone.
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include <algorithm>

#include "fixture.h"
#include "transport/core/credit_window.h"
#include "transport/core/grants.h"
#include "transport/core/remote_region.h"

namespace kvcore::transport {
namespace {

class Lending : public LinkTest {
 protected:
  Borrowed borrow(GrantRef grant, std::vector<Range> ranges, std::int64_t deadline_ns = 0) {
    const auto op = to_owner->borrow(grant, ranges, deadline_ns);
    if (!op) return Borrowed{{}, {}, {}, {}, {}, 0, op.error()};
    auto out = peer->next<Borrowed>();
    if (!out) return Borrowed{{}, {}, {}, {}, {}, 0, Error{ErrorCode::kInternal, "no answer"}};
    EXPECT_EQ(out->op, *op);
    return std::move(*out);
  }
  bool returned_soon() { return owner->next<Returned>(100).has_value(); }
};

std::vector<std::byte> bytes_in(std::span<const std::byte> span) {
  return {span.begin(), span.end()};
}

TEST_P(Lending, BytesAreReadWhereTheyLie) {
  connect();
  const Grant grant = grant_all(Rights::kRead);
  const Borrowed got = borrow(grant.ref, {{3, 1000}, {5'000'000, 70'000}, {0, 1}});
  ASSERT_TRUE(got.status.ok()) << message_of(got.status);
  ASSERT_EQ(got.spans.size(), 3U);
  EXPECT_EQ(got.expires_ns, 0);
  const auto* own = owner_memory.data();
  EXPECT_EQ(bytes_in(got.spans[0]), std::vector(own + 3, own + 1003));
  EXPECT_EQ(bytes_in(got.spans[1]), std::vector(own + 5'000'000, own + 5'070'000));
  EXPECT_EQ(got.spans[2].size(), 1U);
  owner_memory.data()[10] ^= std::byte{0xff};  // the same memory, not a copy of it
  EXPECT_EQ(got.spans[0][7], owner_memory.data()[10]);
  EXPECT_FALSE(returned_soon());
  to_owner->give_back(got.lease);
  const auto returned = owner->next<Returned>();
  ASSERT_TRUE(returned && returned->status.ok());
  EXPECT_EQ(returned->lease, got.lease);
  EXPECT_EQ(returned->grant, grant.ref);
  EXPECT_EQ(returned->link, to_peer->id());
  EXPECT_EQ(to_owner->info().outstanding_ops, 0U);
  EXPECT_EQ(to_owner->info().bytes_in, 0U);
  EXPECT_EQ(owner->transport->revoke_grant(grant.ref), Fence::kDone);
}

TEST_P(Lending, TheBorrowerCannotWrite) {
  connect();
  const Borrowed got = borrow(grant_all().ref, {{0, 4096}});
  ASSERT_TRUE(got.status.ok());
  auto* page = const_cast<std::byte*>(got.spans[0].data());
  EXPECT_EQ(::mprotect(page, 4096, PROT_READ | PROT_WRITE), -1);
  EXPECT_EQ(errno, EACCES);
  const std::byte first = owner_memory.data()[0];
  EXPECT_EXIT(
      *static_cast<volatile std::byte*>(page) = std::byte{1};
      ::_exit(0), [](int status) { return status != 0; }, "");  // SIGSEGV, or its report
  EXPECT_EQ(owner_memory.data()[0], first);
}

TEST_P(Lending, WhatIsNotGrantedIsNotLent) {
  TransportOptions named;
  named.identity = "decode 1";
  connect({}, named);
  const Range part{4096, 8192};
  const auto grant = [&](Rights rights, std::int64_t expires = 0, std::string_view who = {}) {
    return owner->transport->create_grant(owner_region, {&part, 1}, rights, expires, who)->ref;
  };
  const GrantRef ours = grant(Rights::kRead, 0, "decode 1");
  const auto code = [&](GrantRef ref, Range range) {
    const Borrowed got = borrow(ref, {range});
    EXPECT_FALSE(got.status.ok());
    EXPECT_TRUE(got.spans.empty() && got.keep == nullptr);
    return got.status.ok() ? ErrorCode::kInternal : got.status.error().code;
  };
  EXPECT_EQ(code({ours.id, ours.generation + 1}, part), ErrorCode::kStale);
  EXPECT_EQ(code({1, 2}, part), ErrorCode::kStale);
  EXPECT_EQ(code(grant(Rights::kRead, 0, "decode 2"), part), ErrorCode::kStale);
  EXPECT_EQ(code(grant(Rights::kRead, now_ns() - 1), part), ErrorCode::kStale);
  EXPECT_EQ(code(grant(Rights::kWrite), part), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code(ours, {4095, 10}), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code(ours, {4096, 8193}), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code(ours, {~std::uint64_t{0} - 5, 10}), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code(ours, {4096, 0}), ErrorCode::kInvalidArgument);
  EXPECT_EQ(to_owner->borrow(ours, {}).error().code, ErrorCode::kInvalidArgument);
  std::vector<std::byte> plain(10'000);  // no file that a peer could map
  const RegionId region = *owner->transport->register_region(plain.data(), plain.size());
  const Range all{0, plain.size()};
  EXPECT_EQ(code(owner->transport->create_grant(region, {&all, 1}, Rights::kRead)->ref, all),
            ErrorCode::kUnsupported);
  EXPECT_TRUE(borrow(ours, {part}).status.ok());
  EXPECT_FALSE(returned_soon());  // of what was refused nothing is out
}

TEST_P(Lending, ARevokeWaitsForEveryLease) {
  connect();
  const Grant grant = grant_all();
  const Borrowed one = borrow(grant.ref, {{0, 100}}), two = borrow(grant.ref, {{0, 100}});
  ASSERT_TRUE(one.status.ok() && two.status.ok());
  EXPECT_EQ(owner->transport->revoke_grant(grant.ref), Fence::kPending);
  EXPECT_EQ(borrow(grant.ref, {{0, 100}}).status.error().code, ErrorCode::kStale);
  EXPECT_EQ(write_and_wait(grant.ref, {{0, 0, 100}}).error().code, ErrorCode::kStale);
  EXPECT_EQ(owner->transport->unregister_region(owner_region).error().code,
            ErrorCode::kInvalidArgument);
  to_owner->give_back(one.lease);
  ASSERT_TRUE(owner->next<Returned>().has_value());
  EXPECT_FALSE(owner->next<Fenced>(50).has_value());
  to_owner->give_back(two.lease);
  ASSERT_TRUE(owner->next<Returned>().has_value());
  const auto fenced = owner->next<Fenced>();
  ASSERT_TRUE(fenced.has_value());
  EXPECT_EQ(fenced->grant, grant.ref);
  EXPECT_TRUE(owner->transport->unregister_region(owner_region).ok());
}

TEST_P(Lending, GivingBackTwiceOrWhatWasNeverLentIsNothing) {
  connect();
  const Grant grant = grant_all();
  const Borrowed one = borrow(grant.ref, {{0, 100}}), two = borrow(grant.ref, {{0, 100}});
  to_owner->give_back(LeaseId{999});
  to_owner->give_back(one.lease);
  to_owner->give_back(one.lease);
  const auto returned = owner->next<Returned>();
  ASSERT_TRUE(returned.has_value());
  EXPECT_EQ(returned->lease, one.lease);
  EXPECT_FALSE(returned_soon());
  to_owner->give_back(two.lease);
  EXPECT_EQ(owner->next<Returned>()->lease, two.lease);
  EXPECT_TRUE(write_and_wait(grant.ref, {{0, 0, 100}}).ok());  // the link is none the worse
}

TEST_P(Lending, ALeaseEndsWithItsGrantsTime) {
  connect();
  const Range all{0, kBytes};
  const std::int64_t expires = now_ns() + 150 * kMs;
  const Grant grant =
      *owner->transport->create_grant(owner_region, {&all, 1}, Rights::kRead, expires);
  const Borrowed got = borrow(grant.ref, {{0, 100}});
  ASSERT_TRUE(got.status.ok()) << message_of(got.status);
  EXPECT_EQ(got.expires_ns, expires);
  const auto returned = owner->next<Returned>();  // nobody gives it back
  ASSERT_TRUE(returned.has_value());
  EXPECT_EQ(returned->status.error().code, ErrorCode::kTimeout);
  EXPECT_GE(now_ns(), expires);
  EXPECT_LT(now_ns(), expires + 1000 * kMs);
  to_owner->give_back(got.lease);
  EXPECT_FALSE(returned_soon());
  EXPECT_EQ(owner->transport->revoke_grant(grant.ref), Fence::kDone);
}

TEST_P(Lending, WhatIsGivenUpIsNotOut) {
  connect();
  const Grant grant = grant_all();
  EXPECT_EQ(borrow(grant.ref, {{0, 100}}, 1).status.error().code, ErrorCode::kTimeout);
  if (hub) hub->set_manual(true);
  for (int i = 0; i < 50; ++i) {
    const Range range{0, 100};
    const auto op = to_owner->borrow(grant.ref, {&range, 1});
    ASSERT_TRUE(op.ok());
    to_owner->cancel(*op);
    const auto got = peer->next<Borrowed>();
    ASSERT_TRUE(got.has_value());
    if (got->status.ok())
      to_owner->give_back(got->lease);  // the answer was on its way
    else
      EXPECT_EQ(got->status.error().code, ErrorCode::kCancelled);
  }
  if (hub) hub->set_manual(false);
  if (owner->transport->revoke_grant(grant.ref) == Fence::kPending) {
    EXPECT_TRUE(owner->next<Fenced>().has_value());
  }
}

TEST_P(Lending, ClosingTheLinkGivesEverythingBack) {
  connect();
  const Grant grant = grant_all();
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(borrow(grant.ref, {{0, 100}}).status.ok());
  to_owner->close();
  for (int i = 0; i < 3; ++i) {
    const auto returned = owner->next<Returned>();
    ASSERT_TRUE(returned && returned->status.ok());
  }
  EXPECT_TRUE(owner->next<Down>().has_value());
  EXPECT_EQ(owner->transport->revoke_grant(grant.ref), Fence::kDone);
}

TEST_P(Lending, TheMemoryOutlivesTheLender) {
  connect();
  std::optional<SharedMemory> memory(std::in_place, 1 << 20);
  memory->fill(5);
  const std::vector<std::byte> expected = memory->copy();
  const RegionId region =
      *owner->transport->register_region(memory->data(), memory->bytes(), memory->fd());
  const Range all{0, memory->bytes()};
  const Grant grant = *owner->transport->create_grant(region, {&all, 1}, Rights::kRead);
  const Borrowed got = borrow(grant.ref, {all});
  ASSERT_TRUE(got.status.ok()) << message_of(got.status);
  EXPECT_EQ(owner->transport->revoke_grant(grant.ref), Fence::kPending);
  owner->transport->close();
  const auto returned = owner->next<Returned>();
  ASSERT_TRUE(returned.has_value());
  EXPECT_EQ(returned->status.error().code, ErrorCode::kCancelled);
  EXPECT_TRUE(owner->next<Fenced>().has_value());
  to_peer.reset();
  owner.reset();
  memory.reset();
  EXPECT_TRUE(peer->next<Down>().has_value());
  peer.reset();
  EXPECT_EQ(bytes_in(got.spans[0]), expected);
}

INSTANTIATE_TEST_SUITE_P(Links, Lending, ::testing::Values("loopback", "shm"),
                         [](const auto& info) { return info.param; });

class ShmLending : public Lending {
 protected:
  void TearDown() override {
    if (child > 0) {
      ::kill(child, SIGKILL);
      ::waitpid(child, nullptr, 0);
    }
    ::close(pipe_fd);  // its children wait for that
  }
  // A child that borrows all of a grant it is sent; it ends when `then` does.
  void start(TransportOptions options, const std::function<void(int)>& then) {
    child = fork_peer([&](int from_parent) { borrow_in_child(from_parent, then); }, &pipe_fd);
    owner.emplace(make(std::move(options)));
    const auto address = owner->transport->listen(listen_address("shm"));
    ASSERT_EQ(::write(pipe_fd, address->data(), address->size()),
              static_cast<ssize_t>(address->size()));
    owner_region =
        *owner->transport->register_region(owner_memory.data(), kBytes, owner_memory.fd());
    grant = grant_all();
    const auto up = owner->next<Up>();
    ASSERT_TRUE(up.has_value());
    to_peer = owner->transport->link(up->link);
    ASSERT_TRUE(to_peer->send(std::as_bytes(std::span(&grant.ref, 1))).ok());
    ASSERT_TRUE(owner->next<Message>().has_value());  // it has it
    EXPECT_EQ(owner->transport->revoke_grant(grant.ref), Fence::kPending);
  }
  static void borrow_in_child(int from_parent, const std::function<void(int)>& then) {
    char address[256] = {};
    if (::read(from_parent, address, sizeof address - 1) <= 0) return;
    Node self(take(make_transport({})));
    auto link = take(self.transport->connect(address));
    GrantRef ref;
    std::memcpy(&ref, self.next<Message>()->bytes.data(), sizeof ref);
    const Range all{0, kBytes};
    (void)link->borrow(ref, {&all, 1}).ok();
    const auto got = self.next<Borrowed>();
    if (!got || !got->status.ok()) return;
    (void)link->send(bytes_of("borrowed")).ok();
    then(from_parent);
  }
  static void wait_for_the_end(int from_parent) {
    char c = 0;
    while (::read(from_parent, &c, 1) > 0) {
    }
  }
  Grant grant{};
  pid_t child = -1;
  int pipe_fd = -1;
};

TEST_P(ShmLending, ADeadBorrowersLeasesComeBack) {
  start({}, wait_for_the_end);
  EXPECT_FALSE(returned_soon());
  const std::int64_t start_ns = now_ns();
  ::kill(child, SIGKILL);
  const auto returned = owner->next<Returned>();
  ASSERT_TRUE(returned && returned->status.ok());
  EXPECT_TRUE(owner->next<Fenced>().has_value());
  EXPECT_EQ(owner->next<Down>()->status.error().code, ErrorCode::kPeerDead);
  EXPECT_LT(now_ns() - start_ns, 1000 * kMs);
}

TEST_P(ShmLending, AHungBorrowerKeepsItsLeasesUntilItIsDead) {
  TransportOptions options;
  options.keepalive_ns = 300 * kMs;
  start(options, wait_for_the_end);
  ::kill(child, SIGSTOP);
  const auto down = owner->next<Down>();
  ASSERT_TRUE(down.has_value());
  EXPECT_EQ(down->status.error().code, ErrorCode::kPeerHung);
  EXPECT_FALSE(owner->next<Returned>(300).has_value());  // it may wake up and read on
  EXPECT_FALSE(owner->next<Fenced>(1).has_value());
  ::kill(child, SIGKILL);
  ASSERT_TRUE(owner->next<Returned>().has_value());
  EXPECT_TRUE(owner->next<Fenced>().has_value());
}

TEST_P(ShmLending, AChildThatHoldsTheSocketHidesNoDeath) {
  start({}, [](int from_parent) {
    if (::fork() == 0) {  // with the socket of its parent
      wait_for_the_end(from_parent);
      ::_exit(0);
    }
    wait_for_the_end(from_parent);
  });
  ::usleep(50'000);  // it has forked
  const std::int64_t start_ns = now_ns();
  ::kill(child, SIGKILL);
  const auto down = owner->next<Down>();
  ASSERT_TRUE(down.has_value());
  EXPECT_EQ(down->status.error().code, ErrorCode::kPeerDead);
  EXPECT_NE(down->status.error().message.find("process has ended"), std::string::npos);
  EXPECT_LT(now_ns() - start_ns, 1000 * kMs);
  EXPECT_TRUE(owner->next<Fenced>().has_value());
}

TEST_P(ShmLending, ReturnedThatNobodyPollsHoldsTheBorrowersCredits) {
  TransportOptions small;
  small.credits.total_bytes = small.credits.per_link_bytes = 64 * 1024;
  connect(small);
  const Grant all = grant_all();
  const Range range{0, 100};
  std::size_t posted = 0, answered = 0;
  const std::int64_t end = now_ns() + 2000 * kMs;
  for (; posted < 4000; ++posted) ASSERT_TRUE(to_owner->borrow(all.ref, {&range, 1}).ok());
  while (now_ns() < end) {  // as fast as the lender lets it
    const auto got = peer->next<Borrowed>(200);
    if (!got) break;
    ASSERT_TRUE(got->status.ok()) << message_of(got->status);
    to_owner->give_back(got->lease);
    ++answered;
  }
  EXPECT_LE(answered, 64U * 1024 / kFrameCost + 1);
  EXPECT_GE(answered, 300U);
  const std::int64_t late = now_ns() + 20'000 * kMs;
  while (answered < posted && now_ns() < late) {  // the lender polls: on it goes
    std::vector<Event> events;
    owner->transport->poll(&events, 4096);
    while (const auto got = peer->next<Borrowed>(5)) {
      ASSERT_TRUE(got->status.ok()) << message_of(got->status);
      to_owner->give_back(got->lease);
      ++answered;
    }
  }
  EXPECT_EQ(answered, posted);
}

INSTANTIATE_TEST_SUITE_P(Links, ShmLending, ::testing::Values("shm"),
                         [](const auto& info) { return info.param; });

using TcpLending = Lending;

TEST_P(TcpLending, IsRefused) {
  connect();
  const Borrowed got = borrow(grant_all().ref, {{0, 100}});
  EXPECT_EQ(got.status.error().code, ErrorCode::kUnsupported);
  EXPECT_NE(got.status.error().message.find("tcp"), std::string::npos);
}

INSTANTIATE_TEST_SUITE_P(Links, TcpLending, ::testing::Values("tcp"),
                         [](const auto& info) { return info.param; });

// What shm links copy with, around the size from which it goes past the caches.
TEST(CopyBytes, EverySizeAndAlignmentLandsWholeAndNowhereElse) {
  std::vector<std::byte> from(kStreamingBytes + 4096), to(from.size() + 256);
  for (std::size_t i = 0; i < from.size(); ++i) from[i] = static_cast<std::byte>(i * 37 + i / 256);
  for (const std::size_t base : {std::size_t{0}, kStreamingBytes - 65, kStreamingBytes}) {
    for (std::size_t bytes = base; bytes < base + 200; bytes += 7) {
      for (const std::size_t at : {0UL, 1UL, 15UL, 33UL, 64UL}) {
        std::ranges::fill(to, std::byte{0xee});
        copy_bytes(to.data() + 64 + at, from.data() + bytes % 63, bytes);
        ASSERT_EQ(std::memcmp(to.data() + 64 + at, from.data() + bytes % 63, bytes), 0) << bytes;
        ASSERT_EQ(to[63 + at], std::byte{0xee}) << bytes;
        ASSERT_EQ(to[64 + at + bytes], std::byte{0xee}) << bytes;
      }
    }
  }
}

// The table of grants, where a revoke also waits for a device.
TEST(GrantLeases, AFenceNeedsBothTheDeviceAndTheLeases) {
  for (const bool device_first : {true, false}) {
    SharedMemory memory(4096);
    GrantTable table;
    table.set_on_revoke([](GrantRef) { return Fence::kPending; });
    const RegionId region = *table.add_region({memory.data(), 4096, memory.fd()});
    const Range all{0, 4096};
    const GrantRef ref = table.create(region, {&all, 1}, Rights::kRead, 0)->ref;
    ASSERT_TRUE(table.lend(ref, {&all, 1}, 0, "").ok());
    EXPECT_EQ(table.revoke(ref), Fence::kPending);
    EXPECT_FALSE(device_first ? table.fenced(ref) : table.take_back(ref));
    EXPECT_FALSE(table.remove_region(region).ok());
    EXPECT_TRUE(device_first ? table.take_back(ref) : table.fenced(ref));
    EXPECT_FALSE(table.fenced(ref));
    EXPECT_TRUE(table.remove_region(region).ok());
  }
}

TEST(GrantLeases, ExpiredGrantsAreForgottenWhereARevokeReachesADevice) {
  SharedMemory memory(4096);
  GrantTable table;
  std::size_t revoked = 0;
  table.set_on_revoke([&](GrantRef) {
    ++revoked;
    return Fence::kPending;
  });
  const RegionId region = *table.add_region({memory.data(), 4096, memory.fd()});
  const Range all{0, 4096};
  std::vector<GrantRef> refs;
  for (int i = 0; i < 5000; ++i) {
    table.forget_expired(100);
    refs.push_back(table.create(region, {&all, 1}, Rights::kWrite, 50)->ref);
  }
  EXPECT_LE(table.num_grants(), 1100U);
  EXPECT_GE(revoked, 3900U);
  for (const GrantRef& ref : refs) EXPECT_FALSE(table.fenced(ref));  // nobody waits for it
}

}  // namespace
}  // namespace kvcore::transport
