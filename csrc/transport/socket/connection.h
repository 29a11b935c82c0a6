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
#include <optional>
#include <set>
#include <unordered_map>

#include "base/xxh3.h"
#include "transport/core/channel.h"
#include "transport/core/shared.h"
#include "transport/socket/outbox.h"
#include "transport/socket/pacer.h"
#include "transport/socket/remote_region.h"

namespace kvcore::transport {

class Connection final : public Channel {
 public:
  // The initiator speaks first. The socket is registered with epoll under the link's id.
  Connection(Io* io, std::shared_ptr<LinkState> state, UniqueFd fd, bool shm, bool initiator,
             std::int64_t now);
  ~Connection() override;
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  void send(SendCommand command) override;
  void start(std::unique_ptr<Op> op) override;
  void give_up(std::uint64_t op, const Status& why) override;
  void set_rate(std::uint64_t bytes_per_s, std::int64_t now) override {
    pacer_.set_rate(bytes_per_s, now);
  }
  void begin_close(std::int64_t now) override;
  void region_changed(RegionId region, bool gone) override;
  void fail(Status why) override;

  void on_event(std::uint32_t source, std::uint32_t events, std::int64_t now) override;
  void work(std::int64_t now) override;
  bool busy() const noexcept override;
  std::int64_t next_timer_ns() const noexcept override;
  bool dead() const noexcept override { return state_ == State::kDead; }
  void finish(std::vector<Command> orphans) override;
  const LinkState& link() const noexcept override { return *link_; }
  bool initiator() const noexcept override { return initiator_; }

 private:
  bool shm() const noexcept { return shm_; }
  std::int64_t now_ns() const noexcept { return io_->shared.now_ns(); }
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
    bool notify = true;
    bool failed = false;
  };
  struct Sent {  // a message whose completion somebody waits for
    std::int64_t deadline_ns;
    Priority priority;
    std::uint64_t bytes;
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
    std::vector<std::byte> message{};  // op: the peer's send that wants an answer, or 0
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
  void deliver(std::uint64_t op, std::vector<std::byte> message);
  void give_up_send(std::uint64_t id, const Sent& sent, const Status& why);
  void complete_send(std::uint64_t id, Status status);
  Status greet();

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
  void on_message(const FramePrefix& prefix, Bytes body);
  void on_write(const FramePrefix& prefix, Bytes body);
  void on_result(Bytes body);
  void on_abort(Bytes body);
  void on_read_request(const FramePrefix& prefix, Bytes body);
  void serve(std::uint64_t op, GrantRef grant, std::vector<Range> ranges);
  void end_serve(std::uint64_t op);
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
  const bool shm_;
  std::shared_ptr<LinkState> link_;
  UniqueFd fd_;
  std::optional<AuthSession> auth_;  // none only on a link that failed at once
  bool initiator_;
  State state_;
  Status why_;
  std::uint32_t interest_ = 0;
  bool hung_up_ = false;  // the peer closed its side: read on to the end, whatever the limits

  std::unordered_map<std::uint64_t, std::unique_ptr<Op>> ops_;
  std::unordered_map<std::uint64_t, Sent> sends_;
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
  std::size_t served_ranges_ = 0;  // of all in serving_
  std::map<std::uint64_t, std::shared_ptr<RemoteRegion>> peer_regions_;
  std::set<std::uint32_t> announced_;  // our regions the peer knows
  std::deque<Pull> pulls_[kNumPriorities];
  std::size_t pull_pieces_ = 0;

  std::int64_t last_rx_ns_, last_tx_ns_;
  std::int64_t setup_deadline_ns_;  // of connect and handshake
  std::int64_t close_deadline_ns_ = 0;
  PeerHello peer_;
  bool was_up_ = false;
  bool bye_sent_ = false;
};

}  // namespace kvcore::transport
