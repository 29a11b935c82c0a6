// The Transport of everything that has an I/O thread (all schemes but loopback): the public methods
// only look at tables and post commands to IoLoop. Thread rules: as link.h says.
#pragma once

#include <thread>

#include "transport/core/io_loop.h"

namespace kvcore::transport {

using Schemes = std::vector<std::unique_ptr<Scheme>>;

class IoTransport final : public Transport {
 public:
  // Checks the options, starts the thread.
  static Result<std::unique_ptr<Transport>> make(TransportOptions options, Schemes schemes);
  IoTransport(std::shared_ptr<Shared> shared, Schemes schemes, UniqueFd epoll_fd);
  ~IoTransport() override { IoTransport::close(); }

  Result<RegionId> register_region(const RegionSpec& spec) override;
  Status unregister_region(RegionId region) override;
  Result<Grant> create_grant(RegionId region, std::span<const Range> ranges, Rights rights,
                             std::int64_t expires_ns, std::string_view peer) override {
    shared_->grants.forget_expired(shared_->now_ns());
    return shared_->grants.create(region, ranges, rights, expires_ns, peer);
  }
  Fence revoke_grant(GrantRef grant) override { return shared_->grants.revoke(grant); }
  Result<std::string> listen(std::string_view address) override;
  Result<std::shared_ptr<Link>> connect(std::string_view address) override;
  std::shared_ptr<Link> link(LinkId id) const override;
  std::size_t poll(std::vector<Event>* events, std::size_t max_events) override {
    return shared_->events.poll(events, max_events);
  }
  int event_fd() const noexcept override { return shared_->events.fd(); }
  void close() override;

 private:
  Result<Scheme*> scheme_of(std::string_view address) const;

  std::shared_ptr<Shared> shared_;
  Schemes schemes_;
  std::unique_ptr<IoLoop> loop_;
  std::jthread thread_;
};

}  // namespace kvcore::transport
