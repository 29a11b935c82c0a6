// Strangers and liars: connections that say nothing, too little, too much or the wrong thing. The
// next honest client gets in within a second, memory and CPU stay bounded, nobody else notices.
#include <arpa/inet.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>

#include <algorithm>
#include <fstream>
#include <random>

#include "base/auth_session.h"
#include "fixture.h"
#include "transport/core/grants.h"
#include "transport/core/hello.h"
#include "transport/core/io_loop.h"
#include "transport/socket/address.h"
#include "transport/socket/frame.h"

namespace kvcore::transport {
namespace {

constexpr std::string_view kLabel = "kvcore-link-4";
constexpr std::int64_t kInTimeMs = 1000;
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr std::int64_t kShadow = 4;  // the sanitizer's own bytes for each of ours
#else
constexpr std::int64_t kShadow = 1;
#endif

std::int64_t resident_bytes() {
  std::ifstream in("/proc/self/statm");
  std::int64_t pages = 0, resident = 0;
  in >> pages >> resident;
  return resident * 4096;
}

std::int64_t cpu_ns() {
  timespec ts{};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &ts);
  return ts.tv_sec * 1'000'000'000LL + ts.tv_nsec;
}

// A peer that holds the key and makes frames by hand.
class RawPeer {
 public:
  RawPeer(const std::string& address, const TransportOptions& options)
      : fd_(take(open_connection(*parse_address(address)))),
        auth_(take(AuthSession::make(AuthSession::Side::kInitiator,
                                     std::as_bytes(std::span(options.key)), kLabel,
                                     make_link_hello(options, 1, 1 << 20)))) {
    wait_for(POLLOUT);
    send(auth_.start());
    std::vector<std::byte> in(4096), out;
    while (!auth_.established()) {
      if (!wait_for(POLLIN)) return;
      const ssize_t n = ::recv(fd_.get(), in.data(), in.size(), 0);
      if (n <= 0 || !auth_.feed(std::span(in).first(static_cast<std::size_t>(n)), &out).ok())
        return;
    }
    send(out);
  }
  bool up() const { return auth_.established(); }
  bool wait_for(short events, int timeout_ms = 2000) const {
    pollfd p{fd_.get(), events, 0};
    return ::poll(&p, 1, timeout_ms) == 1;
  }
  std::vector<std::byte> frame(FrameType type, std::vector<std::byte> body,
                               std::uint32_t payload_bytes = 0, std::uint16_t flags = 0) {
    FramePrefix prefix;
    prefix.type = static_cast<std::uint8_t>(type);
    prefix.flags = flags;
    prefix.body_bytes = static_cast<std::uint32_t>(body.size());
    prefix.payload_bytes = payload_bytes;
    std::vector<std::byte> out(sizeof prefix + body.size() + kMacBytes);
    std::memcpy(out.data(), &prefix, sizeof prefix);
    if (!body.empty()) std::memcpy(out.data() + sizeof prefix, body.data(), body.size());
    const std::size_t signed_bytes = out.size() - kMacBytes;
    const Mac mac = auth_.seal({std::span(out).first(signed_bytes)});
    std::memcpy(out.data() + signed_bytes, mac.data(), mac.size());
    return out;
  }
  // What the socket takes now; false when it takes no more.
  bool send(std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
      const ssize_t n = ::send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
      if (n < 0 && errno == EAGAIN && wait_for(POLLOUT, 1000)) continue;
      if (n < 0) return false;
      bytes = bytes.subspan(static_cast<std::size_t>(n));
    }
    return true;
  }
  bool closed_by_peer(int timeout_ms = 2000) {
    std::byte sink[4096];
    while (wait_for(POLLIN, timeout_ms)) {
      const ssize_t n = ::recv(fd_.get(), sink, sizeof sink, MSG_DONTWAIT);
      if (n == 0 || (n < 0 && errno != EAGAIN)) return true;
    }
    return false;
  }

 private:
  UniqueFd fd_;
  AuthSession auth_;
};

class HostileLinks : public LinkTest {
 protected:
  void serve(TransportOptions options = {}) {
    owner.emplace(make(std::move(options)));
    address = *owner->transport->listen(listen_address(GetParam()));
    owner_memory.fill(1);
    owner_region =
        *owner->transport->register_region(owner_memory.data(), kBytes, owner_memory.fd());
  }
  // The next honest client: its handshake, and a message through.
  std::int64_t honest_ms() {
    const std::int64_t start = now_ns();
    Node client(make({}));
    auto link = client.transport->connect(address);
    EXPECT_TRUE(link.ok());
    EXPECT_TRUE((*link)->send(bytes_of("hello")).ok());
    const auto message = owner->next<Message>(2 * kInTimeMs);
    EXPECT_TRUE(message.has_value());
    EXPECT_EQ(message ? string_of(message->bytes) : "nothing", "hello");
    return (now_ns() - start) / kMs;
  }
  void connect_to(int fd) {
    const Address to = *parse_address(address);
    sockaddr_un path{};
    path.sun_family = AF_UNIX;
    std::strncpy(path.sun_path, to.path.c_str(), sizeof path.sun_path - 1);
    sockaddr_in port{};
    port.sin_family = AF_INET;
    port.sin_port = htons(
        static_cast<std::uint16_t>(to.shm ? 0 : std::stoi(address.substr(address.rfind(':') + 1))));
    port.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    const bool shm = to.shm;
    EXPECT_EQ(shm ? ::connect(fd, reinterpret_cast<const sockaddr*>(&path), sizeof path)
                  : ::connect(fd, reinterpret_cast<const sockaddr*>(&port), sizeof port),
              0);
  }
  UniqueFd stranger() { return take(open_connection(*parse_address(address))); }

  std::string address;
};

TEST_P(HostileLinks, AThousandSilentConnectionsDelayNobody) {
  serve();
  EXPECT_LT(honest_ms(), kInTimeMs);
  const std::int64_t before = resident_bytes();
  std::vector<UniqueFd> idle;
  for (int i = 0; i < 1000; ++i) {
    idle.push_back(stranger());
    if (i % 100 == 0) {
      EXPECT_LT(honest_ms(), kInTimeMs) << "with " << i << " silent connections";
    }
  }
  EXPECT_LT(honest_ms(), kInTimeMs);
  EXPECT_LT(resident_bytes() - before, kShadow * (8 << 20));
  // The oldest made room: as many are left as may be.
  const auto closed = std::ranges::count_if(idle, [](const UniqueFd& fd) {
    pollfd p{fd.get(), POLLIN | POLLRDHUP, 0};
    return ::poll(&p, 1, 0) == 1;
  });
  EXPECT_GE(closed, static_cast<std::ptrdiff_t>(1000 - kMaxStrangersPerSource));
  const std::size_t honest = owner->count<Up>();
  for (std::size_t i = 0; i < honest; ++i) EXPECT_TRUE(owner->next<Down>(kInTimeMs).has_value());
  EXPECT_FALSE(owner->next<Down>(10).has_value());  // nobody is told of strangers
}

TEST_P(HostileLinks, SlowLorisIsOutInTheTimeOfAHandshake) {
  TransportOptions quick;
  quick.handshake_ns = 500 * kMs;
  serve(quick);
  std::vector<UniqueFd> loris;
  for (int i = 0; i < 100; ++i) loris.push_back(stranger());
  const char start[] = "KVCA\x01\x01\xf0\x00";
  const std::int64_t end = now_ns() + 1200 * kMs;
  for (std::size_t byte = 0; now_ns() < end; ++byte) {
    for (const UniqueFd& fd : loris)
      (void)!::send(fd.get(), byte < 8 ? &start[byte] : "x", 1, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (byte == 2) {
      EXPECT_LT(honest_ms(), kInTimeMs);
    }
    ::usleep(50'000);
  }
  for (const UniqueFd& fd : loris) {  // a byte now and then buys no time
    pollfd p{fd.get(), POLLIN | POLLRDHUP, 0};
    EXPECT_EQ(::poll(&p, 1, 0), 1);
  }
}

TEST_P(HostileLinks, ProvenLinksKeepTheirPlaceInAFlood) {
  TransportOptions few;
  few.max_links = 2;
  serve(few);
  Node first(make({}));
  auto link = *first.transport->connect(address);
  ASSERT_TRUE(first.next<Up>().has_value());
  ASSERT_TRUE(owner->next<Up>().has_value());  // proven to the owner, too
  std::vector<UniqueFd> idle;
  for (int i = 0; i < 400; ++i) idle.push_back(stranger());
  Node second(make({}));
  auto other = *second.transport->connect(address);
  EXPECT_TRUE(second.next<Up>(kInTimeMs).has_value());  // strangers count against no limit of links
  ASSERT_TRUE(owner->next<Up>().has_value());
  Node third(make({}));
  auto refused = *third.transport->connect(address);
  EXPECT_TRUE(third.next<Down>(3000).has_value());  // but proven links do
  EXPECT_TRUE(link->send(bytes_of("still here")).ok());
  EXPECT_TRUE(owner->next<Message>(kInTimeMs).has_value());
}

TEST_P(HostileLinks, OutOfDescriptorsItWaitsInsteadOfSpinning) {
  serve();
  EXPECT_LT(honest_ms(), kInTimeMs);
  // Sockets that only need to connect, then not one more descriptor in this process.
  std::vector<UniqueFd> waiting;
  for (int i = 0; i < 8; ++i)
    waiting.emplace_back(
        ::socket(GetParam() == "shm" ? AF_UNIX : AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  const UniqueFd lowest_free(::dup(0));
  rlimit none = before;
  none.rlim_cur = static_cast<rlim_t>(lowest_free.get());
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
  for (const UniqueFd& fd : waiting) connect_to(fd.get());
  const std::int64_t busy = cpu_ns();
  ::usleep(500'000);
  EXPECT_LT(cpu_ns() - busy, 30 * kMs);  // spinning takes all it can get
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_LT(honest_ms(), kInTimeMs);
}

TEST_P(HostileLinks, AReplayedFrameEndsItsLinkAndIsNotDelivered) {
  serve();
  RawPeer peer(address, {});
  ASSERT_TRUE(peer.up());
  const auto message = peer.frame(FrameType::kMessage, bytes_of("once"));
  ASSERT_TRUE(peer.send(message));
  EXPECT_TRUE(owner->next<Message>(kInTimeMs).has_value());
  (void)peer.send(message);
  const auto down = owner->next<Down>(kInTimeMs);
  ASSERT_TRUE(down.has_value());
  EXPECT_EQ(down->status.error().code, ErrorCode::kCorrupt) << message_of(down->status);
  EXPECT_FALSE(owner->next<Message>(10).has_value());
  EXPECT_LT(honest_ms(), kInTimeMs);
}

TEST_P(HostileLinks, AReplayedHandshakeProvesNothing) {
  serve();
  // Every byte that an honest client says, said again on a connection of one's own.
  AuthSession honest = take(AuthSession::make(AuthSession::Side::kInitiator, {}, kLabel,
                                              make_link_hello({}, 1, 1 << 20)));
  const auto record = [&](AuthSession* session, bool replay, const std::vector<std::byte>& said) {
    const UniqueFd fd = stranger();
    pollfd p{fd.get(), POLLOUT, 0};
    ::poll(&p, 1, 1000);
    std::vector<std::byte> all = said;
    const auto hello = replay ? said : session->start();
    EXPECT_EQ(::send(fd.get(), hello.data(), hello.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(hello.size()));
    p.events = POLLIN;
    ::poll(&p, 1, 1000);
    std::vector<std::byte> in(4096), proof;
    const ssize_t n = ::recv(fd.get(), in.data(), in.size(), MSG_DONTWAIT);
    if (!replay && n > 0) {
      EXPECT_TRUE(session->feed(std::span(in).first(static_cast<std::size_t>(n)), &proof).ok());
      EXPECT_EQ(::send(fd.get(), proof.data(), proof.size(), MSG_NOSIGNAL),
                static_cast<ssize_t>(proof.size()));
      all = hello;
      all.insert(all.end(), proof.begin(), proof.end());
      EXPECT_TRUE(owner->next<Up>(kInTimeMs).has_value());
    }
    if (replay) {
      EXPECT_FALSE(owner->next<Up>(300).has_value());
    }
    return all;
  };
  const auto said = record(&honest, false, {});
  record(&honest, true, said);
  EXPECT_LT(honest_ms(), kInTimeMs);
}

TEST_P(HostileLinks, LyingSizesAreRefusedFromThePrefix) {
  serve();
  const std::int64_t before = resident_bytes();
  for (const std::uint32_t bytes :
       {0x7fffffffU, 0x80000000U, 0xffffffffU, static_cast<std::uint32_t>(kMaxBodyBytes) + 1}) {
    for (int type = 0; type <= 255; ++type) {
      if (type % 16 != 3 && type > kLastFrameType + 1) continue;  // a link each
      RawPeer peer(address, {});
      ASSERT_TRUE(peer.up());
      FramePrefix prefix;
      prefix.type = static_cast<std::uint8_t>(type);
      prefix.body_bytes = bytes;
      ASSERT_TRUE(peer.send(std::as_bytes(std::span(&prefix, 1))));
      EXPECT_TRUE(peer.closed_by_peer()) << "type " << type << " with a body of " << bytes;
      const auto down = owner->next<Down>(kInTimeMs);
      ASSERT_TRUE(down.has_value());
      EXPECT_EQ(down->status.error().code, ErrorCode::kCorrupt) << message_of(down->status);
    }
  }
  EXPECT_LT(resident_bytes() - before, kShadow * (8 << 20));
  EXPECT_LT(honest_ms(), kInTimeMs);
}

TEST_P(HostileLinks, AFrameThatEndsTooEarlyLeavesNothingBehind) {
  serve();
  const auto fds = [] {
    std::size_t n = 0;
    for ([[maybe_unused]] const auto& e : std::filesystem::directory_iterator("/proc/self/fd")) ++n;
    return n;
  };
  const std::size_t before = fds();
  for (std::size_t cut = 1; cut < 60; cut += 7) {
    RawPeer peer(address, {});
    ASSERT_TRUE(peer.up());
    const auto frame = peer.frame(FrameType::kMessage, std::vector<std::byte>(100));
    ASSERT_TRUE(peer.send(std::span(frame).first(cut)));
  }
  for (std::size_t cut = 1; cut < 60; cut += 7)
    EXPECT_TRUE(owner->next<Down>(kInTimeMs).has_value());
  EXPECT_FALSE(owner->next<Message>(1).has_value());
  EXPECT_EQ(fds(), before);
  EXPECT_LT(honest_ms(), kInTimeMs);
}

// Reads asked for without end by a peer that takes no answer.
TEST_P(HostileLinks, AFloodOfRequestsIsBoundedInMemory) {
  TransportOptions generous;  // the limit of ranges comes before that of credits
  generous.credits.per_link_bytes = generous.credits.total_bytes = 40UL << 20;
  serve(generous);
  const Grant grant = grant_all(Rights::kRead);
  RawPeer peer(address, {});
  ASSERT_TRUE(peer.up());
  ASSERT_TRUE(owner->next<Up>(kInTimeMs).has_value());
  const std::int64_t before = resident_bytes();
  std::vector<Range> ranges(kMaxSegments, Range{0, 64});
  std::uint64_t op = 1;
  const std::int64_t end = now_ns() + 1500 * kMs;
  while (now_ns() < end) {
    const auto request = peer.frame(
        FrameType::kReadRequest,
        make_body(ReadHead{op++, grant.ref, ranges.size()}, std::span<const Range>(ranges)));
    if (!peer.send(request)) break;
  }
  EXPECT_GT(op, 17U);  // past the limit, which is 16 of these
  // 16 MiB of ranges, twice while they grow.
  EXPECT_LT(resident_bytes() - before, kShadow * (48 << 20));
  EXPECT_LT(honest_ms(), kInTimeMs);
}

TEST_P(HostileLinks, WhoSendsMoreThanItsCreditsIsOut) {
  TransportOptions small;
  small.credits.per_link_bytes = 64UL << 10;
  serve(small);
  RawPeer peer(address, {});
  ASSERT_TRUE(peer.up());
  ASSERT_TRUE(owner->next<Up>(kInTimeMs).has_value());
  ::usleep(20'000);
  const std::int64_t before = resident_bytes();
  const std::vector<std::byte> message(kMaxMessageBytes);
  int sent = 0;
  while (sent < 64 && peer.send(peer.frame(FrameType::kMessage, message))) ++sent;
  EXPECT_LT(resident_bytes() - before, kShadow * (24 << 20));
  const auto down = owner->next<Down>(kInTimeMs);
  ASSERT_TRUE(down.has_value());
  EXPECT_EQ(down->status.error().code, ErrorCode::kCorrupt) << message_of(down->status);
  EXPECT_LE(owner->count<Message>(), 3U);  // the window, and a largest frame of grace
  owner->seen.clear();
  EXPECT_LT(honest_ms(), kInTimeMs);
}

TEST_P(HostileLinks, AReadAskedForTwiceEndsTheLink) {
  serve();
  const Grant grant = grant_all(Rights::kRead);
  RawPeer peer(address, {});
  ASSERT_TRUE(peer.up());
  const Range big{0, kBytes};
  for (int i = 0; i < 2; ++i)
    ASSERT_TRUE(
        peer.send(peer.frame(FrameType::kReadRequest, make_body(ReadHead{1, grant.ref, 1},
                                                                std::span<const Range>(&big, 1)))));
  const auto down = owner->next<Down>(kInTimeMs);
  ASSERT_TRUE(down.has_value());
  EXPECT_EQ(down->status.error().code, ErrorCode::kCorrupt) << message_of(down->status);
}

TEST_P(HostileLinks, APeersWordsArePlainText) {
  serve();
  RawPeer peer(address, {});
  ASSERT_TRUE(peer.up());
  const auto up = owner->next<Up>(kInTimeMs);
  ASSERT_TRUE(up.has_value());
  const Segment all{0, 0, 100};
  const auto op = owner->transport->link(up->link)->write(owner_region, {&all, 1}, {1, 2}, 3);
  ASSERT_TRUE(op.ok());
  ASSERT_TRUE(peer.wait_for(POLLIN));
  ::usleep(20'000);
  ASSERT_TRUE(peer.send(
      peer.frame(FrameType::kResult,
                 make_result(static_cast<std::uint64_t>(*op),
                             Error{ErrorCode::kStale, "no\xff\xfe\x1b[31m such\ngrant"}))));
  const auto done = owner->next<Completion>(kInTimeMs);
  ASSERT_TRUE(done.has_value());
  EXPECT_EQ(done->status.error().message, "by the peer: no???[31m such?grant");
}

INSTANTIATE_TEST_SUITE_P(Links, HostileLinks, ::testing::Values("shm", "tcp"),
                         [](const auto& info) { return info.param; });

TEST(HostileGrants, ExpiredGrantsAreForgotten) {
  std::vector<std::byte> memory(4096);
  GrantTable table;
  const RegionId region = *table.add_region({memory.data(), memory.size()});
  const Range all{0, 4096};
  const Grant kept = *table.create(region, {&all, 1}, Rights::kWrite, 0);
  for (std::int64_t now = 1; now <= 100'000; ++now) {  // each lives for 100 of these moments
    table.forget_expired(now);
    ASSERT_TRUE(table.create(region, {&all, 1}, Rights::kWrite, now + 100).ok());
    ASSERT_LE(table.num_grants(), 2048U);
  }
  EXPECT_TRUE(table.check(kept.ref, Rights::kWrite, {&all, 1}, 1 << 30, {}).ok());
}

}  // namespace
}  // namespace kvcore::transport
