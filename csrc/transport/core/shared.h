// What the posting threads and the I/O thread of a Transport share: tables, the event queue and one
// queue of commands. Everything else belongs to the I/O thread alone (channel.h). Thread rules:
// every member function from any thread. `mu` is held for microseconds.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <variant>
#include <vector>

#include "transport/core/event_queue.h"
#include "transport/core/grants.h"
#include "transport/core/hello.h"
#include "transport/core/leases.h"
#include "transport/core/peer_process.h"
#include "transport/core/scheme.h"
#include "transport/core/unique_fd.h"
#include "transport/link.h"

namespace kvcore::transport {

// A write or read on its way, at the side that posted it. The region stays pinned until the end.
struct Op {
  std::uint64_t id = 0;
  bool is_read = false;
  bool borrows = false;  // shm: a read without a copy, and without a region of ours
  RegionId region{};
  std::byte* base = nullptr;  // of the region
  bool has_memfd = false;
  std::vector<Segment> segments;
  GrantRef grant;
  std::uint64_t tag = 0;
  std::uint64_t bytes = 0;
  OpOptions options;

  // Owned by the I/O thread from here on. The cursor counts what was put into chunks (write) or
  // landed (read).
  std::size_t segment = 0;
  std::uint64_t segment_done = 0;
  std::uint64_t done = 0;
  bool started = false;    // something was sent
  bool corrupt = false;    // read: a checksum differed
  bool giving_up = false;  // shm: abort sent, the peer's answer is awaited
  Status give_up_status;
};

// State of one link that any thread may look at.
struct LinkState {
  LinkId id{};
  std::string scheme;
  std::string peer_address;
  bool lends = false;
  std::shared_ptr<const PeerProcess> process{};  // of the peer; null: cannot be watched
  std::atomic<std::uint64_t> next_op{1};
  std::atomic<std::uint64_t> bytes_out{0}, bytes_in{0}, messages_out{0}, messages_in{0};
  std::atomic<std::uint64_t> outstanding{0}, queued_bytes{0}, queued_message_bytes{0};
  std::atomic<std::uint64_t> credit_bytes{0}, credit_stall_ns{0};
  std::atomic<std::int64_t> stalled_since_ns{0};  // 0 = credits are there
  std::atomic<bool> up{false};
  std::shared_ptr<PollCredit> poll_credit = std::make_shared<PollCredit>();
  // Guarded by Shared::mu:
  bool closed = false;  // no command is taken any more
  bool proven = true;   // false: accepted, the key not proved yet
  std::int64_t peer_pid = 0;
  PeerHello peer;
  std::vector<RailInfo> rails;
};

struct SendCommand {
  std::uint64_t op = 0;  // 0: nobody waits for its completion
  SendOptions options;
  std::vector<std::byte> bytes;
};
struct CancelCommand {
  std::uint64_t op;
};
struct GiveBackCommand {
  std::uint64_t lease;
};
struct PaceCommand {
  std::uint64_t bytes_per_s;
};
struct CloseCommand {};
struct ConnectCommand {
  std::shared_ptr<LinkState> state;
  Scheme* scheme;
  Dialled dialled;
};
// A link whose host name is being looked up; its ConnectCommand comes when that is done. Commands
// for the link wait until then, at most for the handshake's time.
struct LookUpCommand {
  std::shared_ptr<LinkState> state;
  Scheme* scheme;
};
struct LookedUpCommand {
  Result<std::string> address;
};
struct ListenCommand {
  Scheme* scheme;
  Listening listening;
};
struct RegionCommand {
  RegionId region;
  bool gone;
};
struct StopCommand {};

struct Command {
  LinkId link;  // of the first six kinds and of LookedUpCommand
  std::variant<SendCommand, std::unique_ptr<Op>, CancelCommand, GiveBackCommand, PaceCommand,
               CloseCommand, ConnectCommand, LookUpCommand, LookedUpCommand, ListenCommand,
               RegionCommand, StopCommand>
      what;
};

struct Shared {
  explicit Shared(TransportOptions o);
  std::int64_t now_ns() const noexcept { return clock.now_ns(); }

  // Queues a command and wakes the I/O thread. For a link's commands `state` is its link: PeerDead
  // when that is closed. After stop: PeerDead.
  Status post(LinkState* state, Command command);
  void wake();
  // May an accepted link come up? TransportError: max_links are. The I/O thread.
  Status room_for_link() const;
  // The credits of one link when `links` of them share the memory.
  std::uint64_t window_of(std::uint64_t links) const noexcept;

  const TransportOptions options;
  const Clock& clock;
  GrantTable grants;
  EventQueue events;
  Leases leases{&grants, &events};  // the I/O thread's
  UniqueFd wake_fd;                 // eventfd
  std::atomic<std::uint64_t> links_up{0};
  std::uint64_t exposed_bytes = 0;  // I/O thread: what peers have, or may have, under way, in all

  mutable std::mutex mu;
  std::vector<Command> commands;
  std::unordered_map<std::uint64_t, std::shared_ptr<LinkState>> links;
  std::uint64_t next_link = 1;
  bool stopped = false;
};

}  // namespace kvcore::transport
