#include "transport/socket/address.h"

#include <arpa/inet.h>
#include <linux/pkt_sched.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <cerrno>
#include <charconv>
#include <cstring>
#include <memory>

#include "base/text.h"

namespace kvcore::transport {
namespace {

constexpr int kBacklog =
    4096;  // a lost SYN costs its client a second; the kernel cuts it to somaxconn

Error os_error(std::string_view what) {
  const int e = errno;
  return {ErrorCode::kIo, text(what, ": ", std::strerror(e), " (errno ", e, ")")};
}

struct FreeAddrinfo {
  void operator()(addrinfo* p) const { ::freeaddrinfo(p); }
};

Result<std::unique_ptr<addrinfo, FreeAddrinfo>> resolve(const Address& address, bool passive) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV | (passive ? AI_PASSIVE : 0);
  addrinfo* list = nullptr;
  const int rc = ::getaddrinfo(address.host.c_str(), text(address.port).c_str(), &hints, &list);
  if (rc != 0)
    return Error{ErrorCode::kNotFound, text("address=", address.str(), ": ", ::gai_strerror(rc))};
  return std::unique_ptr<addrinfo, FreeAddrinfo>(list);
}

sockaddr_un unix_address(const std::string& path) {
  sockaddr_un sun{};
  sun.sun_family = AF_UNIX;
  std::memcpy(sun.sun_path, path.data(), path.size());
  return sun;
}

UniqueFd new_socket(int family) {
  return UniqueFd(::socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
}

template <class T>
int connect_to(int fd, const T& sockaddr_value) {
  return ::connect(fd, reinterpret_cast<const sockaddr*>(&sockaddr_value), sizeof sockaddr_value);
}

// Nothing there: fine. A dead socket: removed. A live one or another kind of file: refused.
Status clear_path(const std::string& path) {
  struct stat st {};
  if (::lstat(path.c_str(), &st) != 0) {
    const std::size_t slash = path.rfind('/');
    for (std::size_t i = 1; slash != std::string::npos && i <= slash; ++i)
      if (path[i] == '/') (void)::mkdir(path.substr(0, i).c_str(), 0700);
    return {};
  }
  if (!S_ISSOCK(st.st_mode))
    return invalid_argument(text("address=shm:", path, ": exists and is not a socket"));
  const UniqueFd probe = new_socket(AF_UNIX);
  if (connect_to(probe.get(), unix_address(path)) == 0 || errno == EAGAIN)
    return invalid_argument(text("address=shm:", path, ": in use"));
  if (::unlink(path.c_str()) != 0) return os_error(text("unlink ", path));
  return {};
}

Result<UniqueFd> listen_unix(const Address& address) {
  KVCORE_RETURN_IF_ERROR(clear_path(address.path));
  UniqueFd fd = new_socket(AF_UNIX);
  if (!fd) return os_error("socket");
  // On Linux the socket file takes its mode from the descriptor, so it is never visible with
  // another.
  if (::fchmod(fd.get(), 0600) != 0) return os_error("fchmod");
  const sockaddr_un sun = unix_address(address.path);
  if (::bind(fd.get(), reinterpret_cast<const sockaddr*>(&sun), sizeof sun) != 0)
    return os_error(text("bind ", address.str()));
  if (::chmod(address.path.c_str(), 0600) != 0 || ::listen(fd.get(), kBacklog) != 0)
    return os_error(text("listen ", address.str()));
  return fd;
}

Result<UniqueFd> listen_tcp(Address* address) {
  KVCORE_ASSIGN_OR_RETURN(const auto list, resolve(*address, true));
  UniqueFd fd = new_socket(list->ai_family);
  if (!fd) return os_error("socket");
  const int one = 1;
  ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
  if (list->ai_family == AF_INET6)
    ::setsockopt(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, &one, sizeof one);
  if (::bind(fd.get(), list->ai_addr, list->ai_addrlen) != 0 || ::listen(fd.get(), kBacklog) != 0)
    return os_error(text("listen ", address->str()));
  sockaddr_storage bound{};
  socklen_t size = sizeof bound;
  if (::getsockname(fd.get(), reinterpret_cast<sockaddr*>(&bound), &size) != 0)
    return os_error("getsockname");
  address->port =
      ntohs(bound.ss_family == AF_INET6 ? reinterpret_cast<const sockaddr_in6*>(&bound)->sin6_port
                                        : reinterpret_cast<const sockaddr_in*>(&bound)->sin_port);
  return fd;
}

}  // namespace

std::string Address::str() const {
  if (shm) return text("shm:", path);
  return host.find(':') != std::string::npos ? text("tcp:[", host, "]:", port)
                                             : text("tcp:", host, ":", port);
}

Result<Address> parse_address(std::string_view s) {
  Address out;
  if (s.starts_with("shm:/")) {
    out.shm = true;
    out.path = s.substr(4);
    if (out.path.size() > sizeof(sockaddr_un::sun_path) - 1)
      return invalid_argument(text("address=", s, ": a socket path has at most 107 bytes"));
    return out;
  }
  if (s.starts_with("tcp:")) {
    const std::string_view rest = s.substr(4);
    const std::size_t colon = rest.rfind(':');
    if (colon != std::string_view::npos && colon > 0) {
      std::string_view host = rest.substr(0, colon);
      const std::string_view port = rest.substr(colon + 1);
      if (host.starts_with('[') && host.ends_with(']')) host = host.substr(1, host.size() - 2);
      const auto parsed = std::from_chars(port.data(), port.data() + port.size(), out.port);
      if (!host.empty() && parsed.ec == std::errc() && parsed.ptr == port.data() + port.size()) {
        out.host = host;
        return out;
      }
    }
  }
  return invalid_argument(
      text("address=", s, " must be tcp:HOST:PORT (port 0..65535), tcp:[IPV6]:PORT or shm:/PATH"));
}

bool is_loopback(const Address& address) {
  if (address.shm || address.host == "localhost") return true;
  in_addr v4{};
  if (::inet_pton(AF_INET, address.host.c_str(), &v4) == 1) return (ntohl(v4.s_addr) >> 24) == 127;
  in6_addr v6{};
  return ::inet_pton(AF_INET6, address.host.c_str(), &v6) == 1 && IN6_IS_ADDR_LOOPBACK(&v6);
}

bool needs_look_up(const Address& address) {
  if (address.shm) return false;
  in6_addr any{};
  // A scope ("fe80::1%eth0") stands behind a literal, too.
  const std::string host = address.host.substr(0, address.host.find('%'));
  return ::inet_pton(AF_INET, host.c_str(), &any) != 1 &&
         ::inet_pton(AF_INET6, host.c_str(), &any) != 1;
}

Result<Address> numeric_address(const Address& address) {
  KVCORE_ASSIGN_OR_RETURN(const auto list, resolve(address, false));
  char host[INET6_ADDRSTRLEN + 16];
  if (::getnameinfo(list->ai_addr, list->ai_addrlen, host, sizeof host, nullptr, 0,
                    NI_NUMERICHOST) != 0)
    return Error{ErrorCode::kNotFound, text("address=", address.str(), ": no numeric address")};
  Address out = address;
  out.host = host;
  return out;
}

Result<UniqueFd> open_listener(Address* address) {
  return address->shm ? listen_unix(*address) : listen_tcp(address);
}

// Connected, or about to be, to an address of this host.
static bool same_host(int fd) {
  sockaddr_storage own{}, peer{};
  socklen_t own_size = sizeof own, peer_size = sizeof peer;
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&own), &own_size) != 0 ||
      ::getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &peer_size) != 0 ||
      own.ss_family != peer.ss_family)
    return false;
  if (own.ss_family == AF_INET6)
    return IN6_ARE_ADDR_EQUAL(&reinterpret_cast<const sockaddr_in6*>(&own)->sin6_addr,
                              &reinterpret_cast<const sockaddr_in6*>(&peer)->sin6_addr);
  return reinterpret_cast<const sockaddr_in*>(&own)->sin_addr.s_addr ==
         reinterpret_cast<const sockaddr_in*>(&peer)->sin_addr.s_addr;
}

void set_tcp_options(int fd, std::uint32_t priority) {
  const auto set = [fd](int level, int name, int value) {
    ::setsockopt(fd, level, name, &value, sizeof value);  // an improvement where it is allowed
  };
  constexpr int kQueue[] = {TC_PRIO_INTERACTIVE, TC_PRIO_BESTEFFORT, TC_PRIO_BULK};
  set(IPPROTO_TCP, TCP_NODELAY, 1);
  set(SOL_SOCKET, SO_PRIORITY, kQueue[priority]);
  // What is not sent yet waits in our queues, where a higher class can pass it.
  if (priority > 0) set(IPPROTO_TCP, TCP_NOTSENT_LOWAT, 128 * 1024);
  // Between two processes of one host more only lies in memory and leaves the caches.
  if (priority > 0 || same_host(fd)) set(SOL_SOCKET, SO_SNDBUF, 512 * 1024);
}

Result<std::int64_t> peer_of_same_user(int fd) {
  ucred peer{};
  socklen_t size = sizeof peer;
  if (::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) return os_error("SO_PEERCRED");
  if (peer.uid != ::geteuid())
    return Error{ErrorCode::kUnauthenticated,
                 text("the peer runs as user ", peer.uid, ", this process as ", ::geteuid())};
  return std::int64_t{peer.pid};
}

std::string peer_name(int fd) {
  sockaddr_storage peer{};
  socklen_t size = sizeof peer;
  char host[INET6_ADDRSTRLEN + 16] = "?";
  char port[8] = "0";
  if (::getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &size) != 0 ||
      ::getnameinfo(reinterpret_cast<sockaddr*>(&peer), size, host, sizeof host, port, sizeof port,
                    NI_NUMERICHOST | NI_NUMERICSERV) != 0)
    return "tcp:?";
  return peer.ss_family == AF_INET6 ? text("tcp:[", host, "]:", port)
                                    : text("tcp:", host, ":", port);
}

Result<UniqueFd> open_connection(const Address& address) {
  const auto dead = [&] {
    return Error{ErrorCode::kPeerDead, text("connect ", address.str(), ": ", std::strerror(errno))};
  };
  if (address.shm) {
    UniqueFd fd = new_socket(AF_UNIX);
    if (!fd) return os_error("socket");
    if (connect_to(fd.get(), unix_address(address.path)) != 0) return dead();
    return fd;
  }
  KVCORE_ASSIGN_OR_RETURN(const auto list, resolve(address, false));
  UniqueFd fd = new_socket(list->ai_family);
  if (!fd) return os_error("socket");
  if (::connect(fd.get(), list->ai_addr, list->ai_addrlen) != 0 && errno != EINPROGRESS)
    return dead();
  return fd;
}

Result<UniqueFd> open_connection_like(int fd) {
  sockaddr_storage peer{};
  socklen_t size = sizeof peer;
  if (::getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &size) != 0)
    return os_error("getpeername");
  UniqueFd out = new_socket(peer.ss_family);
  if (!out) return os_error("socket");
  if (::connect(out.get(), reinterpret_cast<const sockaddr*>(&peer), size) != 0 &&
      errno != EINPROGRESS)
    return Error{ErrorCode::kPeerDead, text("connect: ", std::strerror(errno))};
  return out;
}

}  // namespace kvcore::transport
