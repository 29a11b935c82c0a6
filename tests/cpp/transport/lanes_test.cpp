// tcp links with a connection per priority class: who may join one, what passes what, how they end.
#include <sys/socket.h>

#include <algorithm>

#include "base/auth_session.h"
#include "fixture.h"
#include "transport/core/hello.h"
#include "transport/core/io_loop.h"
#include "transport/socket/address.h"
#include "transport/socket/frame.h"

namespace kvcore::transport {
namespace {

class Lanes : public LinkTest {
 protected:
  static std::size_t sockets() {
    std::size_t n = 0;
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
      std::error_code gone;
      n += std::filesystem::read_symlink(entry.path(), gone).string().starts_with("socket:");
    }
    return n;
  }
  // Until `n` sockets are there: those of the lower classes come after Up.
  static bool wait_for_sockets(std::size_t n) {
    for (int i = 0; i < 500 && sockets() != n; ++i) ::usleep(2000);
    return sockets() == n;
  }
  Status in_class(Priority priority, std::uint64_t bytes) {
    OpOptions options;
    options.priority = priority;
    return write_and_wait(grant_all().ref, {{0, 0, bytes}}, options);
  }
};

TEST_P(Lanes, OneConnectionPerClassIsOnePlaceForBothSides) {
  const std::size_t before = sockets();
  connect();
  EXPECT_TRUE(wait_for_sockets(before + 1 + 2 * 3)) << sockets() - before;  // and the listener
  for (const Priority p : {Priority::kStream, Priority::kPrefetch, Priority::kBackground})
    EXPECT_TRUE(in_class(p, 1'000'000).ok());
  EXPECT_EQ(std::memcmp(owner_memory.data(), peer_memory.data(), 1'000'000), 0);
  for (int i = 0; i < 20; ++i) EXPECT_TRUE(in_class(Priority::kStream, 10).ok());
  EXPECT_EQ(sockets(), before + 7);  // no connection per operation
}

TEST_P(Lanes, EitherSideCanAskForOneConnection) {
  for (const bool owner_asks : {true, false}) {
    const std::size_t before = sockets();
    TransportOptions one, many;
    one.tcp_connection_per_class = false;
    connect(owner_asks ? one : many, owner_asks ? many : one);
    for (const Priority p : {Priority::kBackground, Priority::kStream})
      EXPECT_TRUE(in_class(p, 100'000).ok());
    EXPECT_EQ(sockets(), before + 3);
    to_owner.reset();
    to_peer.reset();
    peer.reset();
    owner.reset();
  }
}

TEST_P(Lanes, LastWordsOfEveryClassArriveBeforeTheEnd) {
  for (int round = 0; round < 20; ++round) {
    connect();
    std::size_t sent = 0;
    for (const Priority p : {Priority::kBackground, Priority::kStream, Priority::kPrefetch})
      for (int i = 0; i < 5; ++i)
        sent += to_owner->send(std::vector<std::byte>(100'000), {p}).ok() ? 1 : 0;
    EXPECT_EQ(sent, 15U);
    to_owner->close();
    const auto down = owner->next<Down>();
    ASSERT_TRUE(down.has_value());
    EXPECT_TRUE(down->status.ok()) << message_of(down->status);
    EXPECT_EQ(owner->count<Message>(), sent);
    to_owner.reset();
    to_peer.reset();
    peer.reset();
    owner.reset();
  }
}

// The connections of the last link that may be there look like strangers, and are none.
TEST_P(Lanes, ALinkCountsOnceAndGetsItsLanesInAFullHouse) {
  TransportOptions one;
  one.max_links = 1;
  const std::size_t before = sockets();
  connect(one, one);
  EXPECT_TRUE(wait_for_sockets(before + 7)) << sockets() - before;
  for (const Priority p : {Priority::kStream, Priority::kPrefetch, Priority::kBackground})
    EXPECT_TRUE(in_class(p, 100'000).ok());
  const std::string address = *owner->transport->listen(listen_address(GetParam()));
  Node next(make({}));
  ASSERT_TRUE(next.transport->connect(address).ok());
  EXPECT_TRUE(next.next<Down>(3000).has_value());
  EXPECT_TRUE(in_class(Priority::kStream, 100'000).ok());
}

// Lanes that lose their place among strangers before they have joined are dialled again.
TEST_P(Lanes, AFloodOfStrangersCostsNoLinkItsLanes) {
  owner.emplace(make({}));
  const std::string address = *owner->transport->listen(listen_address(GetParam()));
  std::vector<UniqueFd> idle;
  for (int round = 0; round < 5; ++round) {
    peer.emplace(make({}));
    auto link = *peer->transport->connect(address);
    ASSERT_TRUE(peer->next<Up>().has_value());
    ASSERT_TRUE(owner->next<Up>().has_value());
    for (int i = 0; i < 300; ++i) idle.push_back(take(open_connection(*parse_address(address))));
    for (const Priority p : {Priority::kBackground, Priority::kPrefetch, Priority::kStream})
      ASSERT_TRUE(link->send(bytes_of("here"), {p}).ok());
    for (int i = 0; i < 3; ++i) ASSERT_TRUE(owner->next<Message>(3000).has_value()) << round;
    EXPECT_FALSE(peer->next<Down>(1).has_value());
    idle.clear();
  }
}

// A lane stops being a stranger when it has joined: more of them than strangers may be stay.
TEST_P(Lanes, LanesOfManyLinksAreNoStrangers) {
  owner.emplace(make({}));
  peer.emplace(make({}));
  const std::string address = *owner->transport->listen(listen_address(GetParam()));
  constexpr std::size_t kLinks = kMaxStrangersPerSource / 2 + 5;  // two lanes of each come later
  std::vector<std::shared_ptr<Link>> links;
  for (std::size_t i = 0; i < kLinks; ++i) {
    links.push_back(*peer->transport->connect(address));
    ASSERT_TRUE(peer->next<Up>().has_value()) << i;
  }
  for (const auto& link : links)
    for (const Priority p : {Priority::kBackground, Priority::kPrefetch})
      ASSERT_TRUE(link->send(bytes_of("here"), {p}).ok());
  for (std::size_t i = 0; i < 2 * kLinks; ++i) ASSERT_TRUE(owner->next<Message>().has_value()) << i;
  EXPECT_FALSE(peer->next<Down>(10).has_value());
}

// What stands in a full socket of the lowest class does not hold up the highest.
TEST_P(Lanes, AFullBackgroundConnectionDoesNotHoldUpTheStream) {
  TransportOptions small;
  small.credits.total_bytes = 8UL * 1024 * 1024;
  connect(small);
  const std::vector<std::byte> message(kMaxMessageBytes);
  std::size_t sent = 0;
  while (to_owner->send(message, {Priority::kBackground}).ok()) ++sent;  // nobody polls
  EXPECT_GT(sent, 30U);
  ::usleep(50'000);
  const Grant grant = grant_all();
  const Segment s{0, 0, 1000};
  for (int i = 0; i < 50; ++i) {
    const std::int64_t start = now_ns();
    ASSERT_TRUE(to_owner->write(peer_region, {&s, 1}, grant.ref, 1).ok());
    const auto done = peer->next<Completion>();
    ASSERT_TRUE(done && done->status.ok()) << message_of(done->status);
    EXPECT_LT(now_ns() - start, 500 * kMs);
  }
}

// ---- a hand-made peer

// The initiator's side of a handshake over a plain socket; empty when the owner closed it.
std::optional<AuthSession> shake_hands(int fd, const std::string& key,
                                       const std::vector<std::byte>& hello) {
  auto auth = take(AuthSession::make(AuthSession::Side::kInitiator, std::as_bytes(std::span(key)),
                                     "kvcore-link-4", hello));
  std::vector<std::byte> out = auth.start();
  while (!auth.established()) {
    if (::send(fd, out.data(), out.size(), MSG_NOSIGNAL) < 0) return std::nullopt;
    out.clear();
    std::byte in[1];
    const auto n = ::recv(fd, in, 1, 0);
    if (n <= 0 || !auth.feed(Bytes(in, 1), &out)) return std::nullopt;
  }
  if (::send(fd, out.data(), out.size(), MSG_NOSIGNAL) < 0) return std::nullopt;
  return auth;
}

UniqueFd blocking_connection(const std::string& address) {
  UniqueFd fd = take(open_connection(*parse_address(address)));
  ::fcntl(fd.get(), F_SETFL, ::fcntl(fd.get(), F_GETFL) & ~O_NONBLOCK);
  pollfd p{fd.get(), POLLOUT, 0};
  EXPECT_EQ(::poll(&p, 1, 2000), 1);
  return fd;
}

bool closed_by_the_owner(int fd) {
  std::byte in[64];
  timeval limit{2, 0};
  ::setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  for (;;) {
    const auto n = ::recv(fd, in, sizeof in, 0);
    if (n <= 0) return n == 0 || errno == ECONNRESET;
  }
}

TEST_P(Lanes, OnlyTheFirstSessionCanNameItsLanes) {
  const std::string key(32, 'k');
  TransportOptions options;
  options.key = key;
  owner.emplace(make(options));
  const std::string address = *owner->transport->listen(listen_address(GetParam()));
  const UniqueFd first = blocking_connection(address);
  const auto session = shake_hands(first.get(), key, make_link_hello(options, 3, 1 << 20));
  ASSERT_TRUE(session.has_value());
  ASSERT_TRUE(owner->next<Up>().has_value());

  auto hello = make_join_hello(*session, 1);
  for (const std::size_t at : {std::size_t{4}, std::size_t{8}, std::size_t{16}, std::size_t{31}}) {
    auto forged = hello;
    forged[at] ^= std::byte{1};  // another lane, another session, another token
    const UniqueFd fd = blocking_connection(address);
    (void)shake_hands(fd.get(), key, forged);
    EXPECT_TRUE(closed_by_the_owner(fd.get())) << at;
  }
  for (const std::uint32_t lane : {0U, 3U, 255U}) {
    const UniqueFd fd = blocking_connection(address);
    (void)shake_hands(fd.get(), key, make_join_hello(*session, lane));
    EXPECT_TRUE(closed_by_the_owner(fd.get())) << lane;
  }
  const UniqueFd good = blocking_connection(address);
  ASSERT_TRUE(shake_hands(good.get(), key, hello).has_value());
  std::byte joined[sizeof(FramePrefix) + kMacBytes];  // the ping that says so
  ASSERT_EQ(::recv(good.get(), joined, sizeof joined, MSG_WAITALL),
            static_cast<ssize_t>(sizeof joined));
  const UniqueFd twice = blocking_connection(address);
  (void)shake_hands(twice.get(), key, hello);
  EXPECT_TRUE(closed_by_the_owner(twice.get()));
  pollfd p{good.get(), POLLIN | POLLRDHUP, 0};
  EXPECT_EQ(::poll(&p, 1, 50), 0);  // still there
  EXPECT_FALSE(owner->next<Down>(1).has_value());
}

TEST_P(Lanes, APeerWithoutItsOtherConnectionsIsGivenUp) {
  const std::string key(32, 'k');
  TransportOptions options;
  options.key = key;
  options.handshake_ns = 200 * kMs;
  owner.emplace(make(options));
  const std::string address = *owner->transport->listen(listen_address(GetParam()));
  const UniqueFd first = blocking_connection(address);
  ASSERT_TRUE(shake_hands(first.get(), key, make_link_hello(options, 3, 1 << 20)).has_value());
  ASSERT_TRUE(owner->next<Up>().has_value());
  const auto down = owner->next<Down>(1000);
  ASSERT_TRUE(down.has_value());
  EXPECT_EQ(down->status.error().code, ErrorCode::kTransport) << message_of(down->status);
}

INSTANTIATE_TEST_SUITE_P(Links, Lanes, ::testing::Values("tcp", "tcp6"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace kvcore::transport
