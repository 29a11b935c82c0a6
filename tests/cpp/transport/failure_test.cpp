// Socket links when things go wrong: dead, hung and lying peers, broken payload, limits, leaks.
#include <arpa/inet.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <algorithm>
#include <random>

#include "base/fault.h"
#include "fixture.h"
#include "transport/socket/address.h"

namespace kvcore::transport {
namespace {

using SocketLinks = LinkTest;

std::size_t open_fds() {
  std::size_t n = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd"))
    ++n;
  return n;
}

TEST_P(SocketLinks, FlippedPayloadIsCorruptOnBothSidesAndNeverArrives) {
  if (GetParam() == "shm") GTEST_SKIP() << "shm copies memory to memory without checksums";
  FaultPlan faults(1);
  TransportOptions options;
  options.faults = &faults;
  connect({}, options);
  const Grant grant = grant_all();
  for (const std::uint64_t bytes : {std::uint64_t{100}, std::uint64_t{5'000'000}}) {
    ASSERT_TRUE(faults.fail_nth("transport.flip_payload", bytes > 1000 ? 3 : 1).ok());
    EXPECT_EQ(write_and_wait(grant.ref, {{0, 0, bytes}}).error().code, ErrorCode::kCorrupt);
    const auto arrival = owner->next<Arrival>();
    ASSERT_TRUE(arrival.has_value());
    EXPECT_EQ(arrival->status.error().code, ErrorCode::kCorrupt);
    EXPECT_FALSE(owner->next<Arrival>(10).has_value());
    EXPECT_TRUE(write_and_wait(grant.ref, {{0, 0, bytes}}).ok());
    EXPECT_TRUE(owner->next<Arrival>()->status.ok());
  }
  ASSERT_TRUE(faults.fail_nth("transport.flip_payload", 1).ok());
  OpOptions unchecked;
  unchecked.checksum = false;
  EXPECT_TRUE(write_and_wait(grant.ref, {{0, 0, 1000}}, unchecked).ok());
  EXPECT_NE(std::memcmp(owner_memory.data(), peer_memory.data(), 1000), 0);
}

TEST_P(SocketLinks, PacingHoldsTheRate) {
  connect();
  const Grant grant = grant_all();
  to_owner->set_pacing(40'000'000);
  const std::int64_t start = now_ns();
  for (int i = 0; i < 2; ++i) EXPECT_TRUE(write_and_wait(grant.ref, {{0, 0, kBytes}}).ok());
  const double seconds = static_cast<double>(now_ns() - start) * 1e-9;
  const double rate = 2.0 * kBytes / seconds;
  EXPECT_LT(rate, 42e6);
  EXPECT_GT(rate, 15e6);  // a busy machine may be late, never early
}

TEST_P(SocketLinks, HigherClassOvertakesABulkTransfer) {
  connect();
  const Grant grant = grant_all();
  to_owner->set_pacing(100'000'000);
  OpOptions background;
  background.priority = Priority::kBackground;
  const Segment all{0, 0, kBytes}, small{0, 0, 1000};
  const auto bulk = to_owner->write(peer_region, {&all, 1}, grant.ref, 1, background);
  ::usleep(5000);
  const auto quick = to_owner->write(peer_region, {&small, 1}, grant.ref, 2);
  EXPECT_EQ(peer->next<Completion>()->op, *quick);
  EXPECT_EQ(peer->next<Completion>()->op, *bulk);
}

TEST_P(SocketLinks, UnreadMessagesStopTheSenderAndNothingIsLost) {
  TransportOptions small;
  small.credits.total_bytes = 256 * 1024;
  TransportOptions sender;
  sender.max_queued_bytes = 4UL * 1024 * 1024;
  connect(small, sender);
  const std::vector<std::byte> message(64 * 1024, std::byte{7});
  std::size_t sent = 0;
  const std::int64_t end = now_ns() + 5000 * kMs;
  while (now_ns() < end) {  // until the sender's queue has been full for a while
    if (to_owner->send(message).ok()) {
      ++sent;
      continue;
    }
    const std::size_t before = sent;
    ::usleep(100'000);
    while (to_owner->send(message).ok()) ++sent;
    if (sent == before) break;
  }
  EXPECT_LT(sent * message.size(), 48UL * 1024 * 1024);  // buffers of the kernel included
  EXPECT_EQ(to_owner->send(message).error().code, ErrorCode::kTransport);
  for (std::size_t i = 0; i < sent; ++i) ASSERT_TRUE(owner->next<Message>().has_value()) << i;
  EXPECT_TRUE(to_owner->send(message).ok());
  EXPECT_TRUE(owner->next<Message>().has_value());
}

TEST_P(SocketLinks, NothingIsLeftOpenAfterClose) {
  connect();  // lazily opened descriptors of the library exist from here on
  to_owner.reset();
  to_peer.reset();
  peer.reset();
  owner.reset();
  const std::size_t before = open_fds();
  for (int i = 0; i < 20; ++i) {
    connect();
    EXPECT_TRUE(write_and_wait(grant_all().ref, {{0, 0, 1000}}).ok());
    to_owner.reset();
    to_peer.reset();
    peer.reset();
    owner.reset();
  }
  EXPECT_EQ(open_fds(), before);
}

TEST_P(SocketLinks, ConnectToNobodyGoesDown) {
  peer.emplace(make({}));
  const std::string address = GetParam() == "shm" ? scratch_socket() : "tcp:127.0.0.1:1";
  auto link = peer->transport->connect(address);
  ASSERT_TRUE(link.ok());
  (void)(*link)->send(bytes_of("x")).ok();
  const auto down = peer->next<Down>();
  ASSERT_TRUE(down.has_value());
  EXPECT_EQ(down->status.error().code, ErrorCode::kPeerDead) << message_of(down->status);
}

TEST_P(SocketLinks, ASilentServerIsGivenUpAndASilentClientDropped) {
  TransportOptions quick;
  quick.handshake_ns = 200 * kMs;
  owner.emplace(make(quick));
  const auto address = owner->transport->listen(listen_address(GetParam()));
  Address parsed = *parse_address(*address);
  const UniqueFd silent = take(open_connection(parsed));
  pollfd p{silent.get(), POLLIN, 0};
  EXPECT_EQ(::poll(&p, 1, 2000), 1);  // closed by the owner
  EXPECT_TRUE(owner->seen.empty());

  Address mute = *parse_address(listen_address(GetParam()));
  const UniqueFd listener = take(open_listener(&mute));
  peer.emplace(make(quick));
  const std::int64_t start = now_ns();
  to_owner = *peer->transport->connect(mute.str());
  EXPECT_EQ(peer->next<Down>()->status.error().code, ErrorCode::kPeerDead);
  EXPECT_LT(now_ns() - start, 1000 * kMs);
}

// A process that dies before it reads the hello resets the connection; who refuses it has read it.
TEST_P(SocketLinks, DeathBeforeTheHandshakeIsToldFromARefusal) {
  Address address = *parse_address(listen_address(GetParam()));
  const UniqueFd listener = take(open_listener(&address));
  peer.emplace(make({}));
  for (const bool reads : {false, true}) {
    auto link = *peer->transport->connect(address.str());
    pollfd p{listener.get(), POLLIN, 0};
    ASSERT_EQ(::poll(&p, 1, 2000), 1);
    UniqueFd served(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    p = {served.get(), POLLIN, 0};
    ASSERT_EQ(::poll(&p, 1, 2000), 1);
    std::byte hello[4096];
    if (reads) {
      ASSERT_GT(::recv(served.get(), hello, sizeof hello, 0), 0);
    }
    served.reset();
    const auto down = peer->next<Down>(2000);
    ASSERT_TRUE(down.has_value());
    EXPECT_EQ(down->status.error().code, reads ? ErrorCode::kTransport : ErrorCode::kPeerDead)
        << message_of(down->status);
  }
}

TEST_P(SocketLinks, GarbageIsDroppedAndTheServiceGoesOn) {
  connect();
  const Grant grant = grant_all();
  Node extra(make({}));
  const auto address = owner->transport->listen(listen_address(GetParam()));
  std::mt19937_64 rng(3);
  for (int i = 0; i < 50; ++i) {
    const UniqueFd fd = take(open_connection(*parse_address(*address)));
    std::vector<std::byte> junk(1 + rng() % 2000);
    for (auto& b : junk) b = static_cast<std::byte>(rng());
    if (i % 2 == 0 && junk.size() > 8) std::memcpy(junk.data(), "KVCA\x01\x01\x20\x00", 8);
    ::usleep(1000);
    (void)!::send(fd.get(), junk.data(), junk.size(), MSG_NOSIGNAL);
  }
  auto link = extra.transport->connect(*address);
  ASSERT_TRUE(link.ok());
  EXPECT_TRUE(extra.next<Up>().has_value());
  EXPECT_TRUE(write_and_wait(grant.ref, {{0, 0, kBytes}}).ok());
}

// ---- another process

// The child writes for ever into the grant it is sent.
void write_for_ever(int from_parent) {
  char address[256] = {};
  if (::read(from_parent, address, sizeof address - 1) <= 0) return;
  constexpr std::size_t kBytes = 4UL * 1024 * 1024;
  SharedMemory memory(kBytes);
  memory.fill(9);
  auto transport = take(make_transport({}));
  const RegionId region = *transport->register_region(memory.data(), kBytes, memory.fd());
  auto link = *transport->connect(address);
  GrantRef grant{};
  std::size_t pending = 0;
  for (;;) {
    std::vector<Event> events;
    pollfd p{transport->event_fd(), POLLIN, 0};
    ::poll(&p, 1, 1000);
    transport->poll(&events);
    for (const Event& e : events) {
      if (const auto* m = std::get_if<Message>(&e))
        std::memcpy(&grant, m->bytes.data(), sizeof grant);
      if (std::holds_alternative<Completion>(e)) --pending;
      if (std::holds_alternative<Down>(e)) return;
    }
    for (; grant.id != 0 && pending < 4; ++pending) {
      const Segment s{0, 0, kBytes};
      if (!link->write(region, {&s, 1}, grant, 1).ok()) return;
    }
  }
}

class OtherProcess : public LinkTest {
 protected:
  void start(TransportOptions options) {
    child = fork_peer(write_for_ever, &pipe_fd);
    owner.emplace(make(std::move(options)));
    const auto address = owner->transport->listen(listen_address(GetParam()));
    ASSERT_EQ(::write(pipe_fd, address->data(), address->size()),
              static_cast<ssize_t>(address->size()));
    owner_region =
        *owner->transport->register_region(owner_memory.data(), kBytes, owner_memory.fd());
    const Grant grant = grant_all();
    const auto up = owner->next<Up>();
    ASSERT_TRUE(up.has_value());
    to_peer = owner->transport->link(up->link);
    if (GetParam() == "shm") {
      EXPECT_EQ(to_peer->info().peer_pid, child);
    }
    ASSERT_TRUE(to_peer->send(std::as_bytes(std::span(&grant.ref, 1))).ok());
    for (int i = 0; i < 5; ++i) ASSERT_TRUE(owner->next<Arrival>().has_value());
  }
  void TearDown() override {
    if (child > 0) {
      ::kill(child, SIGKILL);
      ::waitpid(child, nullptr, 0);
    }
    ::close(pipe_fd);
  }
  pid_t child = -1;
  int pipe_fd = -1;
};

TEST_P(OtherProcess, WritesLand) {
  start({});
  ::kill(child, SIGKILL);  // it writes on and on, and the memory is only ours when it has ended
  ASSERT_TRUE(owner->next<Down>().has_value());
  SharedMemory expected(4UL * 1024 * 1024);
  expected.fill(9);
  EXPECT_EQ(std::memcmp(owner_memory.data(), expected.data(), expected.bytes()), 0);
}

TEST_P(OtherProcess, KillIsNoticedAtOnce) {
  start({});
  const std::int64_t start_ns = now_ns();
  ::kill(child, SIGKILL);
  const auto down = owner->next<Down>();
  ASSERT_TRUE(down.has_value());
  EXPECT_EQ(down->status.error().code, ErrorCode::kPeerDead) << message_of(down->status);
  EXPECT_LT(now_ns() - start_ns, 1000 * kMs);
  const std::vector<std::byte> after = owner_memory.copy();
  ::usleep(20'000);
  EXPECT_EQ(owner_memory.copy(), after);
}

TEST_P(OtherProcess, StopIsNoticedWithinTheKeepAlive) {
  TransportOptions options;
  options.keepalive_ns = 400 * kMs;
  start(options);
  // Alive and idle for longer than the keep-alive is no reason to hang up.
  ::usleep(600'000);
  EXPECT_FALSE(owner->next<Down>(1).has_value());
  const std::int64_t start_ns = now_ns();
  ::kill(child, SIGSTOP);
  const auto down = owner->next<Down>();
  ASSERT_TRUE(down.has_value());
  EXPECT_EQ(down->status.error().code, ErrorCode::kPeerHung) << message_of(down->status);
  EXPECT_LT(now_ns() - start_ns, 1000 * kMs);
  // What the peer still believes in must not land once it wakes up.
  std::memset(owner_memory.data(), 0, kBytes);
  ::kill(child, SIGCONT);
  ::usleep(100'000);
  EXPECT_EQ(std::ranges::count(owner_memory.copy(), std::byte{0}),
            static_cast<std::ptrdiff_t>(kBytes));
}

// The writer's view: the owner of the grant dies or hangs.
TEST_P(OtherProcess, OperationsEndWhenTheOwnerHangs) {
  TransportOptions options;
  options.keepalive_ns = 400 * kMs;
  start(options);
  ::kill(child, SIGSTOP);
  ::waitpid(child, nullptr, WUNTRACED);  // stopped, not about to: it would still refuse the grant
  const Segment s{0, 0, 100'000};
  const auto op = to_peer->write(owner_region, {&s, 1}, GrantRef{1, 2}, 1);
  ASSERT_TRUE(op.ok());
  const std::int64_t start_ns = now_ns();
  const auto done = owner->next<Completion>();
  ASSERT_TRUE(done.has_value());
  EXPECT_EQ(done->status.error().code, ErrorCode::kPeerHung) << message_of(done->status);
  EXPECT_LT(now_ns() - start_ns, 1500 * kMs);
}

INSTANTIATE_TEST_SUITE_P(Links, SocketLinks, ::testing::Values("shm", "tcp"),
                         [](const auto& info) { return info.param; });
INSTANTIATE_TEST_SUITE_P(Links, OtherProcess, ::testing::ValuesIn(with_rdma({"shm", "tcp"})),
                         [](const auto& info) { return info.param; });

// ---- addresses

TEST(LinkAddress, NonLoopbackNeedsAKey) {
  auto bare = take(make_transport({}));
  for (const char* address : {"tcp:0.0.0.0:0", "tcp:[::]:0"})
    EXPECT_EQ(bare->listen(address).error().code, ErrorCode::kInvalidArgument) << address;
  EXPECT_EQ(bare->connect("tcp:192.0.2.1:9").error().code, ErrorCode::kInvalidArgument);
  for (const char* address : {"", "tcp:", "tcp:x", "tcp:127.0.0.1:", "tcp:127.0.0.1:70000",
                              "shm:relative", "ftp:x:1", "tcp:127.0.0.1:-1"})
    EXPECT_EQ(bare->listen(address).error().code, ErrorCode::kInvalidArgument) << address;
  TransportOptions options;
  options.key = "short";
  EXPECT_EQ(make_transport(options).error().code, ErrorCode::kInvalidArgument);
}

TEST(LinkAddress, SocketFileIsPrivateStaleIsReplacedLiveAndForeignAreRefused) {
  const std::string address = scratch_socket();
  const std::string path = address.substr(4);
  auto a = take(make_transport({}));
  ASSERT_TRUE(a->listen(address).ok());
  struct stat st {};
  ASSERT_EQ(::stat(path.c_str(), &st), 0);
  EXPECT_EQ(st.st_mode & 0777, 0600U);
  auto b = take(make_transport({}));
  EXPECT_EQ(b->listen(address).error().code, ErrorCode::kInvalidArgument);
  a->close();
  EXPECT_NE(::stat(path.c_str(), &st), 0);
  {
    Address parsed = *parse_address(address);
    const UniqueFd left_behind = take(open_listener(&parsed));
  }
  EXPECT_TRUE(b->listen(address).ok());
  b->close();
  ::close(::open(path.c_str(), O_CREAT | O_WRONLY, 0600));
  auto c = take(make_transport({}));
  EXPECT_EQ(c->listen(address).error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(::stat(path.c_str(), &st), 0);
}

}  // namespace
}  // namespace kvcore::transport
