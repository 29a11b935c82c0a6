// The Transport of tcp and shm links: one I/O thread (epoll), everything else posts commands to it.
// Thread rules: as link.h says. Made by make_transport.
#pragma once

#include <thread>
#include <unordered_map>

#include "transport/socket/connection.h"

namespace kvcore::transport {

// The I/O thread's side: listeners and connections.
class IoLoop {
 public:
  explicit IoLoop(std::shared_ptr<Shared> shared, UniqueFd epoll_fd);
  ~IoLoop();
  void run();  // until a StopCommand has been carried out

 private:
  struct Listener {
    UniqueFd fd;
    bool shm;
    std::string path;
  };
  int wait_ms(std::int64_t now) const;
  void take_commands(std::int64_t now);
  void execute(Command command, std::int64_t now);
  void accept_all(const Listener& listener, std::int64_t now);
  Status admit(UniqueFd fd, bool shm, std::int64_t now);
  void add(std::shared_ptr<LinkState> state, UniqueFd fd, bool initiator, std::int64_t now);
  void reap();
  void stop(std::int64_t now);

  std::shared_ptr<Shared> shared_;
  UniqueFd epoll_fd_;
  Io io_;
  std::unordered_map<std::uint64_t, std::unique_ptr<Connection>> connections_;  // by LinkId
  std::unordered_map<std::uint64_t, Listener> listeners_;  // by kListenerBit | number
  std::uint64_t next_listener_ = 1;
  bool stopping_ = false;
};

class SocketTransport final : public Transport {
 public:
  SocketTransport(std::shared_ptr<Shared> shared, std::unique_ptr<IoLoop> loop);
  ~SocketTransport() override { SocketTransport::close(); }

  Result<RegionId> register_region(std::byte* base, std::uint64_t bytes, int memfd) override;
  Status unregister_region(RegionId region) override;
  Result<Grant> create_grant(RegionId region, std::span<const Range> ranges, Rights rights,
                             std::int64_t expires_ns) override {
    return shared_->grants.create(region, ranges, rights, expires_ns);
  }
  void revoke_grant(GrantRef grant) override { shared_->grants.revoke(grant); }
  Result<std::string> listen(std::string_view address) override;
  Result<std::shared_ptr<Link>> connect(std::string_view address) override;
  std::shared_ptr<Link> link(LinkId id) const override;
  std::size_t poll(std::vector<Event>* events, std::size_t max_events) override {
    return shared_->events.poll(events, max_events);
  }
  int event_fd() const noexcept override { return shared_->events.fd(); }
  void close() override;

 private:
  std::shared_ptr<Shared> shared_;
  std::unique_ptr<IoLoop> loop_;
  std::jthread thread_;
};

}  // namespace kvcore::transport
