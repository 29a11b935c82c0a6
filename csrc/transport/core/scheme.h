// One kind of address ("tcp", "shm", ...): how it listens and connects, and the channels on top.
// Adding a back end = one Scheme and its Channel; the I/O thread, grants and events are shared.
// Thread rules: parse, listen and dial from any thread; accept and channel on the I/O thread.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "base/result.h"
#include "transport/core/unique_fd.h"

namespace kvcore::transport {

class Channel;
class PeerProcess;
struct Io;
struct LinkState;
struct Shared;

struct Listening {
  UniqueFd fd;
  std::string address;  // with what was picked (a port) filled in
  std::string path;     // a file to remove at the end, or empty
};

// A connected or connecting socket, or why there is none: the link then goes down at once.
struct Dialled {
  UniqueFd fd;
  std::string peer_address;
  std::int64_t peer_pid = 0;
  std::shared_ptr<const PeerProcess> process{};  // null: not of this host, or not to be watched
  Status failed;
};

class Scheme {
 public:
  virtual ~Scheme() = default;
  virtual std::string_view name() const noexcept = 0;
  // Once, before anything else and any other thread.
  virtual void attach(Shared*) {}
  // Can its links borrow and lend?
  virtual bool lends() const noexcept { return false; }
  // An address with a host name needs a look-up, which may take seconds: the function that makes it
  // an address with a number, on any thread. Null: nothing to look up.
  using LookUp = Result<std::string> (*)(std::string address);
  virtual LookUp look_up(std::string_view) const { return nullptr; }
  // InvalidArgument: not an address of this scheme.
  virtual Result<Listening> listen(std::string_view address) = 0;
  virtual Result<Dialled> dial(std::string_view address) = 0;
  // Who connected; an error closes the socket without any state.
  virtual Result<Dialled> accepted(UniqueFd fd) = 0;
  // `fd` may be empty: the channel is failed at once.
  virtual std::unique_ptr<Channel> channel(Io* io, std::shared_ptr<LinkState> state, UniqueFd fd,
                                           bool initiator, std::int64_t now) = 0;
};

}  // namespace kvcore::transport
