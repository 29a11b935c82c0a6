// Two ends of a link for tests over every scheme, with memory, and waits that fail loudly.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <deque>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/text.h"
#include "rdma/fake_machine.h"
#include "transport/link.h"
#include "transport/loopback.h"
#include "transport/rdma/rdma_scheme.h"

namespace kvcore::transport {

inline constexpr std::int64_t kMs = 1'000'000;

// A memfd mapped into this process.
class SharedMemory {
 public:
  explicit SharedMemory(std::size_t bytes) : bytes_(bytes) {
    fd_ = ::memfd_create("kvcore-test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    EXPECT_EQ(::ftruncate(fd_, static_cast<off_t>(bytes)), 0);
    data_ =
        static_cast<std::byte*>(::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0));
  }
  ~SharedMemory() {
    ::munmap(data_, bytes_);
    ::close(fd_);
  }
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;
  std::byte* data() { return data_; }
  std::size_t bytes() const { return bytes_; }
  int fd() const { return fd_; }
  void fill(std::uint64_t seed) {
    for (std::size_t i = 0; i < bytes_; ++i)
      data_[i] = static_cast<std::byte>((i * 2654435761U + seed * 40503U) >> 7);
  }
  std::vector<std::byte> copy() const { return {data_, data_ + bytes_}; }

 private:
  std::size_t bytes_;
  int fd_;
  std::byte* data_;
};

template <class T>
T take(Result<T> result) {
  EXPECT_TRUE(result.ok());
  return std::move(result).value();
}

inline std::vector<std::byte> bytes_of(const std::string& s) {
  const auto* p = reinterpret_cast<const std::byte*>(s.data());
  return {p, p + s.size()};
}
inline std::string string_of(const std::vector<std::byte>& b) {
  return {reinterpret_cast<const char*>(b.data()), b.size()};
}

// One Transport with its events sorted by kind.
class Node {
 public:
  explicit Node(std::unique_ptr<Transport> t) : transport(std::move(t)) {}

  // The next event of this kind; others wait for their turn. Empty after the timeout.
  template <class T>
  std::optional<T> next(std::int64_t timeout_ms = 20'000) {  // a guest on a busy machine is slow
    const std::int64_t end = now_ns() + timeout_ms * kMs;
    for (;;) {
      for (auto it = seen.begin(); it != seen.end(); ++it) {
        if (auto* e = std::get_if<T>(&*it)) {
          T out = std::move(*e);
          seen.erase(it);
          return out;
        }
      }
      const std::int64_t left = end - now_ns();
      std::vector<Event> fresh;
      if (transport->poll(&fresh) == 0) {
        if (left <= 0) return std::nullopt;
        pollfd p{transport->event_fd(), POLLIN, 0};
        // Short, since the deadlines of loopback are looked at by polling.
        ::poll(&p, 1, static_cast<int>(std::min<std::int64_t>(left / kMs + 1, 20)));
        continue;
      }
      for (Event& e : fresh) seen.push_back(std::move(e));
    }
  }
  template <class T>
  std::size_t count() const {
    std::size_t n = 0;
    for (const Event& e : seen) n += std::holds_alternative<T>(e);
    return n;
  }

  std::unique_ptr<Transport> transport;
  std::deque<Event> seen;
};

inline Digest digest_of(int fill) {
  Digest digest;
  digest.fill(static_cast<std::byte>(fill));
  return digest;
}

inline std::string scratch_socket() {
  static int number = 0;
  const std::string folder = text("/tmp/kvcore-test-", ::getpid());
  std::filesystem::create_directories(folder);
  return text("shm:", folder, "/", number++, ".sock");
}

inline std::string listen_address(const std::string& scheme) {
  if (scheme == "loopback") return "loopback:owner";
  if (scheme == "shm") return scratch_socket();
  if (scheme.starts_with("rdma")) return "rdma:127.0.0.1:0";
  return scheme == "tcp6" ? "tcp:[::1]:0" : "tcp:127.0.0.1:0";
}

// The scheme that a link of this name says it has.
inline std::string scheme_of(const std::string& link) {
  return link == "tcp6" ? "tcp" : link.starts_with("rdma") ? "rdma" : link;
}

// These, and rdma where the machine has a device: in a guest, `make test-rdma`. ("rdma_fake" is
// rdma over fake NICs, in one process.)
inline std::vector<std::string> with_rdma(std::vector<std::string> links) {
  if (rdma::available().ok()) links.emplace_back("rdma");
  return links;
}

// Runs `child` in a new process, which gets the address to connect to.
inline pid_t fork_peer(const std::function<void(int from_parent)>& child, int* to_child) {
  int pipe_fds[2];
  EXPECT_EQ(::pipe(pipe_fds), 0);
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::close(pipe_fds[1]);
    child(pipe_fds[0]);
    ::_exit(0);
  }
  ::close(pipe_fds[0]);
  *to_child = pipe_fds[1];
  return pid;
}

inline std::string message_of(const Status& status) {
  return status.ok() ? "ok" : text(to_string(status.error().code), ": ", status.error().message);
}

// `owner` listens and grants, `peer` connects and writes.
class LinkTest : public ::testing::TestWithParam<std::string> {
 protected:
  static constexpr std::size_t kBytes = 8UL * 1024 * 1024;

  Result<std::unique_ptr<Transport>> try_make(TransportOptions options) {
    // An emulated guest takes seconds to open a device: that is not silence.
    if (GetParam() == "rdma" && options.keepalive_ns == TransportOptions{}.keepalive_ns)
      options.keepalive_ns = options.handshake_ns = 20'000 * kMs;
    if (GetParam() == "rdma_fake") {
      if (!machine) machine = std::make_unique<rdma::FakeMachine>();
      return machine->make_transport(std::move(options));
    }
    if (!is_loopback()) return make_transport(std::move(options));
    if (!hub) hub = make_loopback_hub();
    return hub->make_transport(std::move(options));
  }
  std::unique_ptr<Transport> make(TransportOptions options) {
    return take(try_make(std::move(options)));
  }
  bool is_loopback() const { return GetParam() == "loopback"; }
  bool is_rdma() const { return GetParam().starts_with("rdma"); }

  void connect(TransportOptions owner_options = {}, TransportOptions peer_options = {}) {
    owner.emplace(make(std::move(owner_options)));
    peer.emplace(make(std::move(peer_options)));
    const auto address = owner->transport->listen(listen_address(GetParam()));
    ASSERT_TRUE(address.ok()) << address.error().message;
    auto connected = peer->transport->connect(*address);
    ASSERT_TRUE(connected.ok()) << connected.error().message;
    to_owner = *connected;
    ASSERT_TRUE(peer->next<Up>().has_value());
    const auto up = owner->next<Up>();
    ASSERT_TRUE(up.has_value());
    EXPECT_TRUE(up->accepted);
    to_peer = owner->transport->link(up->link);
    ASSERT_NE(to_peer, nullptr);
    owner_memory.fill(1);
    peer_memory.fill(2);
    owner_region =
        *owner->transport->register_region(owner_memory.data(), kBytes, owner_memory.fd());
    peer_region = *peer->transport->register_region(peer_memory.data(), kBytes, peer_memory.fd());
  }
  Grant grant_all(Rights rights = Rights::kReadWrite) {
    const Range all{0, kBytes};
    return *owner->transport->create_grant(owner_region, {&all, 1}, rights);
  }
  // Until the ranges are the owner's again: at once, but on rdma, where the fence may be an event.
  void revoke(GrantRef grant) {
    if (owner->transport->revoke_grant(grant) == Fence::kDone) return;
    ASSERT_TRUE(is_rdma());
    const auto fenced = owner->next<Fenced>();
    ASSERT_TRUE(fenced.has_value());
    EXPECT_EQ(fenced->grant, grant);
  }
  Status write_and_wait(GrantRef grant, std::vector<Segment> segments, OpOptions options = {}) {
    const auto op = to_owner->write(peer_region, segments, grant, 7, options);
    if (!op) return op.error();
    const auto done = peer->next<Completion>();
    if (!done) return Error{ErrorCode::kInternal, "no completion came"};
    EXPECT_EQ(done->op, *op);
    return done->status;
  }

  std::shared_ptr<LoopbackHub> hub;
  std::unique_ptr<rdma::FakeMachine> machine;
  SharedMemory owner_memory{kBytes}, peer_memory{kBytes};  // outlive the transports
  std::optional<Node> owner, peer;
  std::shared_ptr<Link> to_owner, to_peer;
  RegionId owner_region{}, peer_region{};
};

}  // namespace kvcore::transport
