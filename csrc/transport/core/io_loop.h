// The I/O thread's side of a Transport: listeners and channels over one epoll.
//
// Strangers (accepted, the key not proved yet) are few and replaceable: past kMaxStrangers, or
// kMaxStrangersPerSource from one host, the oldest of the busiest source makes room for the newest,
// so silence and floods delay nobody but each other. They count against no limit of the proven
// links. Without descriptors a stranger is given up for the next one; when there is none, accepting
// pauses for kAcceptPauseNs.
// Thread rules: run() on its own thread; everything else reaches it through Shared::post.
#pragma once

#include <sys/epoll.h>

#include <map>
#include <string>
#include <unordered_map>

#include "transport/core/channel.h"

namespace kvcore::transport {

inline constexpr std::size_t kMaxStrangers = 512;
inline constexpr std::size_t kMaxStrangersPerSource = 256;
inline constexpr std::int64_t kAcceptPauseNs = 100'000'000;

class IoLoop {
 public:
  IoLoop(std::shared_ptr<Shared> shared, UniqueFd epoll_fd);
  ~IoLoop();
  void run();  // until a StopCommand has been carried out

 private:
  struct Listener {
    Scheme* scheme;
    Listening listening;
    std::int64_t resume_ns = 0;  // accepting pauses until then; 0 = it does not
  };
  struct LookUp {
    std::shared_ptr<LinkState> state;
    Scheme* scheme;
    std::int64_t deadline_ns;
    std::vector<Command> waiting;
  };
  int wait_ms(std::int64_t now) const;
  void on_event(const epoll_event& event, std::int64_t now);
  void take_commands(std::int64_t now);
  void execute(Command command, std::int64_t now);
  void command_link(Command command, std::int64_t now);
  void looked_up(std::uint64_t id, const Result<std::string>& address, std::int64_t now);
  void end_late_look_ups(std::int64_t now);
  void connect(ConnectCommand command, std::int64_t now);
  void listen(ListenCommand command);
  void accept_some(std::uint64_t key, Listener* listener, std::int64_t now);
  void out_of_descriptors(std::uint64_t key, Listener* listener, std::int64_t now);
  void resume_listeners(std::int64_t now);
  Status admit(UniqueFd fd, Scheme* scheme, std::int64_t now);
  void forget_former_strangers();
  void make_room(const std::string& source);
  bool drop_stranger(const std::string* source);  // the oldest, of this source
  void add(Scheme* scheme, std::shared_ptr<LinkState> state, UniqueFd fd, bool initiator,
           std::int64_t now);
  void reap();
  void stop(std::int64_t now);

  std::shared_ptr<Shared> shared_;
  UniqueFd epoll_fd_;
  Io io_;
  std::unordered_map<std::uint64_t, std::unique_ptr<Channel>> channels_;  // by LinkId
  std::unordered_map<std::uint64_t, Listener> listeners_;                 // by their epoll key
  std::map<std::uint64_t, LookUp> look_ups_;                              // by LinkId
  std::uint64_t next_listener_ = 1;
  std::map<std::uint64_t, std::string> strangers_;  // LinkId, so oldest first -> source
  bool stopping_ = false;
};

}  // namespace kvcore::transport
