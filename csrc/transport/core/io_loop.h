// The I/O thread's side of a Transport: listeners and channels over one epoll.
// Thread rules: run() on its own thread; everything else reaches it through Shared::post.
#pragma once

#include <unordered_map>

#include "transport/core/channel.h"

namespace kvcore::transport {

class IoLoop {
 public:
  IoLoop(std::shared_ptr<Shared> shared, UniqueFd epoll_fd);
  ~IoLoop();
  void run();  // until a StopCommand has been carried out

 private:
  struct Listener {
    Scheme* scheme;
    Listening listening;
  };
  int wait_ms(std::int64_t now) const;
  void take_commands(std::int64_t now);
  void execute(Command command, std::int64_t now);
  void command_link(Command command, std::int64_t now);
  void listen(ListenCommand command);
  void accept_all(const Listener& listener, std::int64_t now);
  Status admit(UniqueFd fd, Scheme* scheme, std::int64_t now);
  void add(Scheme* scheme, std::shared_ptr<LinkState> state, UniqueFd fd, bool initiator,
           std::int64_t now);
  void reap();
  void stop(std::int64_t now);

  std::shared_ptr<Shared> shared_;
  UniqueFd epoll_fd_;
  Io io_;
  std::unordered_map<std::uint64_t, std::unique_ptr<Channel>> channels_;  // by LinkId
  std::unordered_map<std::uint64_t, Listener> listeners_;  // by kListenerBit | number
  std::uint64_t next_listener_ = 1;
  bool stopping_ = false;
};

}  // namespace kvcore::transport
