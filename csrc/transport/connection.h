// One socket link (tcp or shm) as a state machine of the I/O thread.
//
// Who copies: tcp: the owner receives payload straight into the granted ranges. shm: the owner of
// the destination pulls out of the peer's memfd; chunks of a write carry offsets instead of
// payload. Files: connection.cpp life, commands and timers; connection_send.cpp chunks and the
// order of what leaves; connection_receive.cpp bytes in and frames; connection_pull.cpp the copies
// of shm.
//
// Late writes: the peer's bytes land only inside GrantTable::with_ranges. shm: a sender may reuse
// its memory once the owner has answered an abort, or once the socket is shut down; the owner
// announces a write only after it has seen the socket open after the last copy. Thread rules: the
// I/O thread only, but for LinkState.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <set>
#include <unordered_map>

#include "base/xxh3.h"
#include "transport/outbox.h"
#include "transport/pacer.h"
#include "transport/remote_region.h"
#include "transport/shared.h"

namespace kvcore::transport {

// What the connections of one I/O thread have in common.
struct Io {
  Shared& shared;
  int epoll_fd;
  std::vector<std::byte> scratch;  // payload nobody wants goes here
};

std::vector<std::byte> make_link_hello(const TransportOptions& options);

class Connection {
 public:
  // `auth` decides who speaks first. The socket is registered with epoll under the link's id.
  Connection(Io* io, std::shared_ptr<LinkState> state, UniqueFd fd, AuthSession auth,
             bool initiator, std::int64_t now);
  ~Connection();
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  // Commands.
  void send(SendCommand command);
  void start(std::unique_ptr<Op> op);
  void give_up(std::uint64_t op, const Status& why);  // cancel and deadline
  void set_rate(std::uint64_t bytes_per_s, std::int64_t now) { pacer_.set_rate(bytes_per_s, now); }
  void begin_close(std::int64_t now);
  void region_changed(RegionId region, bool gone);
  void fail(Status why);  // the link is dead; the loop calls finish() and drops it

  // The loop.
  void on_event(std::uint32_t events, std::int64_t now);
  void work(std::int64_t now);                  // timers, pulls, sending
  bool busy() const noexcept;                   // wants work() again without any event
  std::int64_t next_timer_ns() const noexcept;  // or INT64_MAX
  bool dead() const noexcept { return state_ == State::kDead; }
  void finish(std::vector<Command> orphans);  // completions of all that is left, then Down
  const LinkState& link() const noexcept { return *link_; }
  bool shm() const noexcept { return link_->shm; }
  bool initiator() const noexcept { return initiator_; }

 private:
  enum class State : std::uint8_t { kConnecting, kHandshake, kUp, kClosing, kDead };
  struct TxItem {  // a message, an operation of ours, or a read we serve (tcp)
    enum class Kind : std::uint8_t { kMessage, kOp, kServe } kind;
    std::uint64_t op = 0;
    std::vector<std::byte> message;
  };
  struct InWrite {  // a peer's write that has begun
    GrantRef grant;
    std::uint64_t tag = 0;
    std::uint64_t bytes = 0;
    bool failed = false;
  };
  struct Serve {  // a peer's read from our grant
    GrantRef grant;
    std::vector<Range> ranges;
    std::size_t range = 0;
    std::uint64_t range_done = 0;
  };
  struct Sink {  // where the payload of the current frame goes (tcp)
    enum class Kind : std::uint8_t { kNone, kDiscard, kWrite, kRead } kind = Kind::kNone;
    std::uint64_t op = 0;
    GrantRef grant{};
    std::vector<Piece> pieces{};  // kWrite: place and checksum; kRead: size and checksum
    std::size_t piece = 0;
    std::uint64_t piece_done = 0;
    std::uint64_t left = 0;  // of the payload
    bool checked = true;
    bool last = false;
    Xxh3 hash{};
  };
  struct Pull {  // shm: a chunk to copy, or a message that waits behind it
    enum class Kind : std::uint8_t { kMessage, kWrite, kRead } kind;
    std::uint64_t op = 0;
    GrantRef grant{};
    std::shared_ptr<RemoteRegion> source{};
    std::vector<Piece> pieces{};
    std::size_t piece = 0;
    std::uint64_t piece_done = 0;
    bool last = false;
    std::vector<std::byte> message{};
    std::size_t weight() const noexcept { return 1 + pieces.size() + message.size() / 1024; }
  };
  using Fill = std::function<ssize_t(std::vector<iovec>*)>;  // bytes placed; 0 = none now

  // connection.cpp
  void on_established(std::int64_t now);
  void complete(std::uint64_t op, Status status);
  void run_timers(std::int64_t now);
  void update_interest();
  void announce_region(RegionId id, const RegionView& view);
  Op* find_op(std::uint64_t id);
  void deliver(std::vector<std::byte> message);

  // connection_send.cpp
  void control(FrameType type, std::vector<std::byte> body = {});
  void pump(std::int64_t now);
  bool build_next(std::int64_t now);
  bool build_from(std::deque<TxItem>* queue, Priority priority, std::int64_t now, bool* built);
  void push_chunk(Op* op, Priority priority);
  void push_read_request(Op* op, Priority priority);
  bool push_serve_chunk(std::uint64_t id, Priority priority);

  // connection_receive.cpp
  void receive(std::int64_t now);
  bool receive_some(std::int64_t now);
  ssize_t read_socket(std::vector<iovec>* iov);
  void parse();
  void parse_handshake(std::int64_t now);
  bool parse_frame();
  void take_buffered_payload();
  void dispatch(const FramePrefix& prefix, Bytes body);
  void on_write(const FramePrefix& prefix, Bytes body);
  void on_result(Bytes body);
  void on_abort(Bytes body);
  void on_read_request(const FramePrefix& prefix, Bytes body);
  void on_read_data(const FramePrefix& prefix, Bytes body);
  void on_read_go(const FramePrefix& prefix, Bytes body);
  void on_read_done(Bytes body);
  void on_region(Bytes body);
  void on_region_gone(Bytes body);
  ssize_t land(const Fill& fill);
  ssize_t land_write(const Fill& fill);
  ssize_t land_read(const Fill& fill);
  bool settle(std::uint64_t landed, std::span<std::byte* const> places);
  void chunk_landed();
  void finish_write(std::uint64_t op);
  void fail_write(std::uint64_t op, const Status& why);

  // connection_pull.cpp
  void pull(std::int64_t now);
  bool pull_step(Pull* item, std::uint64_t* budget, std::int64_t now);
  Status pull_piece(Pull* item, const Piece& piece, std::uint64_t bytes, std::int64_t now);
  void pull_done(const Pull& item);
  bool peer_hung_up() const;

  Io* io_;
  std::shared_ptr<LinkState> link_;
  UniqueFd fd_;
  AuthSession auth_;
  bool initiator_;
  State state_;
  Status why_;
  std::uint32_t interest_ = 0;
  bool hung_up_ = false;  // the peer closed its side: read on to the end, whatever the limits

  std::unordered_map<std::uint64_t, std::unique_ptr<Op>> ops_;
  std::set<std::pair<std::int64_t, std::uint64_t>> deadlines_;
  std::deque<TxItem> tx_[kNumPriorities];
  std::deque<OutFrame> control_;
  Outbox outbox_;
  Pacer pacer_;
  std::int64_t pace_until_ = 0;  // 0 = not waiting

  std::vector<std::byte> rx_;  // received, not yet parsed: [rx_begin_, rx_end_)
  std::size_t rx_begin_ = 0, rx_end_ = 0;
  std::deque<UniqueFd> rx_fds_;
  Sink sink_;
  std::unordered_map<std::uint64_t, InWrite> inbound_;
  std::unordered_map<std::uint64_t, Serve> serving_;
  std::map<std::uint64_t, std::shared_ptr<RemoteRegion>> peer_regions_;
  std::set<std::uint32_t> announced_;  // our regions the peer knows
  std::deque<Pull> pulls_[kNumPriorities];
  std::size_t pull_pieces_ = 0;

  std::int64_t last_rx_ns_, last_tx_ns_;
  std::int64_t setup_deadline_ns_;  // of connect and handshake
  std::int64_t close_deadline_ns_ = 0;
  std::int64_t peer_keepalive_ns_ = 0;
  bool bye_sent_ = false;
  bool announced_up_ = false;
};

}  // namespace kvcore::transport
