#include "transport/rdma/rdma_scheme.h"

#include "base/text.h"
#include "transport/rdma/channel.h"
#include "transport/socket/address.h"
#include "transport/socket/socket_scheme.h"

namespace kvcore::transport::rdma {
namespace {

constexpr std::string_view kName = "rdma";
constexpr std::string_view kSession = "tcp";  // what carries its session

std::string renamed(std::string_view address, std::string_view from, std::string_view to) {
  return text(to, address.substr(from.size()));
}

class RdmaScheme final : public Scheme {
 public:
  RdmaScheme(const RdmaOptions& options, bool keyed, HostSystem system)
      : tcp_(make_tcp_scheme(keyed)),
        available_(system.available),
        host_(std::make_shared<Host>(options, std::move(system))) {}

  std::string_view name() const noexcept override { return kName; }
  void attach(Shared* shared) override { host_->attach(shared); }

  LookUp look_up(std::string_view address) const override {
    if (tcp_->look_up(renamed(address, kName, kSession)) == nullptr) return nullptr;
    return [](std::string named) -> Result<std::string> {
      KVCORE_ASSIGN_OR_RETURN(const Address name, parse_address(renamed(named, kName, kSession)));
      KVCORE_ASSIGN_OR_RETURN(const Address number, numeric_address(name));
      return renamed(number.str(), kSession, kName);
    };
  }

  Result<Listening> listen(std::string_view address) override {
    KVCORE_RETURN_IF_ERROR(available_());
    KVCORE_ASSIGN_OR_RETURN(Listening out, tcp_->listen(renamed(address, kName, kSession)));
    out.address = renamed(out.address, kSession, kName);
    return out;
  }
  Result<Dialled> dial(std::string_view address) override {
    KVCORE_RETURN_IF_ERROR(available_());
    KVCORE_ASSIGN_OR_RETURN(Dialled out, tcp_->dial(renamed(address, kName, kSession)));
    out.peer_address = renamed(out.peer_address, kSession, kName);
    return out;
  }
  Result<Dialled> accepted(UniqueFd fd) override {
    KVCORE_ASSIGN_OR_RETURN(Dialled out, tcp_->accepted(std::move(fd)));
    out.peer_address = renamed(out.peer_address, kSession, kName);
    return out;
  }
  std::unique_ptr<Channel> channel(Io* io, std::shared_ptr<LinkState> state, UniqueFd fd,
                                   bool initiator, std::int64_t now) override {
    return std::make_unique<RdmaChannel>(io, host_, std::move(state), std::move(fd), initiator,
                                         now);
  }

 private:
  std::unique_ptr<Scheme> tcp_;
  std::function<Status()> available_;
  std::shared_ptr<Host> host_;
};

}  // namespace

std::unique_ptr<Scheme> make_rdma_scheme(const RdmaOptions& options, bool keyed,
                                         HostSystem system) {
  return std::make_unique<RdmaScheme>(options, keyed, std::move(system));
}

}  // namespace kvcore::transport::rdma
