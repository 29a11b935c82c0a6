// Addresses of links and the sockets behind them. Thread rules: pure functions and system calls.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "base/result.h"
#include "transport/core/unique_fd.h"

namespace kvcore::transport {

struct Address {
  bool shm = false;
  std::string host;  // tcp: name or literal, without brackets
  std::uint16_t port = 0;
  std::string path;  // shm
  std::string str() const;
};

// "tcp:HOST:PORT", "tcp:[V6]:PORT" or "shm:/PATH"; InvalidArgument names what is wrong.
Result<Address> parse_address(std::string_view text);
// localhost and literal loopback addresses; every other name counts as not loopback.
bool is_loopback(const Address& address);

// Has it a name instead of an address? Then numeric_address() asks the resolver, which may take
// seconds. NotFound.
bool needs_look_up(const Address& address);
Result<Address> numeric_address(const Address& address);

// A listening socket. shm: made 0600, missing parent folders 0700, a socket file that nobody serves
// is replaced, anything else at the path is refused. Fills in the port that was picked.
Result<UniqueFd> open_listener(Address* address);
// A connected or connecting non-blocking socket.
Result<UniqueFd> open_connection(const Address& address);
// To where that socket is connected, without looking up a name.
Result<UniqueFd> open_connection_like(int fd);
// For a connection of this priority class.
void set_tcp_options(int fd, std::uint32_t priority);
// The process at the other end of a unix socket; Unauthenticated when it runs as another user.
Result<std::int64_t> peer_of_same_user(int fd);
std::string peer_name(int fd);  // "tcp:HOST:PORT" of the other end

}  // namespace kvcore::transport
