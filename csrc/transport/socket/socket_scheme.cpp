#include "transport/socket/socket_scheme.h"

#include "base/text.h"
#include "transport/core/peer_process.h"
#include "transport/socket/address.h"
#include "transport/socket/connection.h"

namespace kvcore::transport {
namespace {

class SocketScheme final : public Scheme {
 public:
  SocketScheme(bool shm, bool keyed) : shm_(shm), keyed_(keyed) {}

  std::string_view name() const noexcept override { return shm_ ? "shm" : "tcp"; }
  bool lends() const noexcept override { return shm_; }

  LookUp look_up(std::string_view address) const override {
    const auto parsed = allowed(address);  // what is refused is refused by dial
    if (!parsed || !needs_look_up(*parsed)) return nullptr;
    return [](std::string named) -> Result<std::string> {
      KVCORE_ASSIGN_OR_RETURN(const Address name, parse_address(named));
      KVCORE_ASSIGN_OR_RETURN(const Address number, numeric_address(name));
      return number.str();
    };
  }

  Result<Listening> listen(std::string_view address) override {
    KVCORE_ASSIGN_OR_RETURN(Address parsed, allowed(address));
    KVCORE_ASSIGN_OR_RETURN(UniqueFd fd, open_listener(&parsed));
    return Listening{std::move(fd), parsed.str(), parsed.path};
  }

  Result<Dialled> dial(std::string_view address) override {
    KVCORE_ASSIGN_OR_RETURN(const Address parsed, allowed(address));
    Dialled out;
    out.peer_address = parsed.str();
    auto fd = open_connection(parsed);
    if (!fd) {
      out.failed = fd.error();
      return out;
    }
    if (shm_) out.failed = look_at_process(fd->get(), &out);
    if (out.failed.ok()) out.fd = std::move(*fd);
    return out;
  }

  Result<Dialled> accepted(UniqueFd fd) override {
    Dialled out;
    if (shm_) {
      KVCORE_RETURN_IF_ERROR(look_at_process(fd.get(), &out));
      out.peer_address = text("shm: pid ", out.peer_pid);
    } else {
      out.peer_address = peer_name(fd.get());
    }
    out.fd = std::move(fd);
    return out;
  }

  std::unique_ptr<Channel> channel(Io* io, std::shared_ptr<LinkState> state, UniqueFd fd,
                                   bool initiator, std::int64_t now) override {
    return std::make_unique<Connection>(io, &sessions_, std::move(state), std::move(fd), shm_,
                                        initiator, now);
  }

 private:
  // A process of another pid namespace is no error: its death is seen by the socket alone then, and
  // nothing is lent to it.
  static Status look_at_process(int fd, Dialled* out) {
    KVCORE_ASSIGN_OR_RETURN(out->peer_pid, peer_of_same_user(fd));
    auto process = PeerProcess::of(fd, static_cast<pid_t>(out->peer_pid));
    if (process)
      out->process = std::move(*process);
    else if (process.error().code != ErrorCode::kUnsupported)
      return process.error();
    return {};
  }

  Result<Address> allowed(std::string_view address) const {
    KVCORE_ASSIGN_OR_RETURN(Address parsed, parse_address(address));
    if (!keyed_ && !is_loopback(parsed))
      return invalid_argument(
          text("address=", address, " is not a loopback address: a 32-byte key is needed there"));
    return parsed;
  }

  const bool shm_, keyed_;
  Sessions sessions_;  // outlives the channels: the schemes of a Transport outlive its I/O thread
};

}  // namespace

std::unique_ptr<Scheme> make_tcp_scheme(bool keyed) {
  return std::make_unique<SocketScheme>(false, keyed);
}
std::unique_ptr<Scheme> make_shm_scheme() { return std::make_unique<SocketScheme>(true, true); }

}  // namespace kvcore::transport
