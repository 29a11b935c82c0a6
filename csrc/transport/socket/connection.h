// One socket link (tcp or shm) as a state machine of the I/O thread.
//
// Who copies: tcp: the owner receives payload straight into the granted ranges. shm: the owner of
// the destination pulls out of the peer's memfd; chunks of a write carry offsets instead of
// payload. Files: connection_lanes.cpp the sockets; connection.cpp commands and timers;
// connection_send.cpp chunks and the order of what leaves; connection_receive.cpp bytes in and
// frames; connection_pull.cpp the copies of shm; connection_lend.cpp
// what shm lends instead.
//
// Late writes: the peer's bytes land only inside GrantTable::with_ranges. shm: a sender may reuse
// its memory once the owner has answered an abort, or once the socket is shut down; the owner
// announces a write only after it has seen the socket open after the last copy. Thread rules: the
// I/O thread only, but for LinkState.
#pragma once

#include <array>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <unordered_map>

#include "transport/core/channel.h"
#include "transport/core/link_credits.h"
#include "transport/core/remote_region.h"
#include "transport/core/shared.h"
#include "transport/socket/lane.h"
#include "transport/socket/pacer.h"

namespace kvcore::transport {

class Connection;

// The accepted links by their session: further connections find theirs here. Thread rules: the I/O
// thread.
class Sessions {
 public:
  void add(std::uint64_t session, Connection* link);
  void forget(std::uint64_t session, const Connection* link);
  Connection* find(std::uint64_t session) const;

 private:
  std::unordered_map<std::uint64_t, Connection*> links_;
};

class Connection final : public Channel {
 public:
  // The initiator speaks first. The socket is registered with epoll under the link's id.
  Connection(Io* io, Sessions* sessions, std::shared_ptr<LinkState> state, UniqueFd fd, bool shm,
             bool initiator, std::int64_t now);
  ~Connection() override;
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  void send(SendCommand command) override;
  void start(std::unique_ptr<Op> op) override;
  void give_up(std::uint64_t op, const Status& why) override;
  void give_back(std::uint64_t lease) override;
  void set_rate(std::uint64_t bytes_per_s, std::int64_t now) override {
    pacer_.set_rate(bytes_per_s, now);
  }
  void begin_close(std::int64_t now) override;
  void region_changed(RegionId region, bool gone) override;
  void fail(Status why) override;

  void on_event(std::uint32_t source, std::uint32_t events, std::int64_t now) override;
  void work(std::int64_t now) override;
  void work_bulk(std::int64_t now) override;
  bool busy() const noexcept override;
  std::int64_t next_timer_ns() const noexcept override;
  bool dead() const noexcept override { return state_ == State::kDead; }
  bool awaits_lanes() const noexcept override { return lanes_deadline_ns_ != 0 && !initiator_; }
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
    bool charged = true;  // kFrameCost is held for its arrival
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
    std::uint64_t cost = 0;
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
    std::uint64_t cost = 0;
    std::vector<std::byte> message{};  // op: the peer's send that wants an answer, or 0
  };
  using Fill = std::function<ssize_t(std::vector<iovec>*)>;  // bytes placed; 0 = none now

  // connection_lanes.cpp
  std::uint32_t own_lanes() const noexcept;
  Lane& lane_of(Priority priority) noexcept;
  void open_lane(Lane& lane, UniqueFd fd, std::vector<std::byte> hello);
  void watch(const Lane& lane, int how);
  Status greet();
  void on_established(std::int64_t now);
  void dial_lanes();
  bool dial_again(Lane& lane, std::int64_t now);
  void on_accepted(std::int64_t now);
  bool awaits(const JoinHello& join) const;
  void adopt(std::uint32_t number, Lane lane, std::int64_t now);
  void on_lane_up(Lane& lane, std::int64_t now);
  void update_interest(Lane& lane);
  void say_bye();
  void on_bye(Lane& lane, Bytes body);
  void end_lane(Lane& lane);
  void watch_process();
  void on_process_ended(std::int64_t now);

  // connection.cpp
  void complete(std::uint64_t op, Status status);
  void run_timers(std::int64_t now);
  void run_closing(std::int64_t now);
  bool higher_waits(std::size_t lane) const;
  void announce_region(RegionId id, const RegionView& view);
  Op* find_op(std::uint64_t id);
  void deliver(Lane& lane, std::uint64_t op, std::vector<std::byte> message, std::uint64_t cost);
  void give_up_send(std::uint64_t id, const Sent& sent, const Status& why);
  void complete_send(std::uint64_t id, Status status);

  // connection_credit.cpp
  void on_credit(Bytes body);
  bool announce_credits(Lane& lane);
  std::uint64_t credit_for_chunk(const Op& op, Priority priority, std::int64_t now);
  void push_charged(Lane& lane, OutFrame frame);

  // connection_send.cpp
  void control(Lane& lane, FrameType type, std::vector<std::byte> body = {},
               Priority priority = Priority::kStream);
  void pump(Lane& lane, std::int64_t now);
  bool build_next(Lane& lane, std::int64_t now);
  bool build_from(Lane& lane, std::deque<TxItem>* queue, Priority priority, std::int64_t now,
                  bool* built);
  void push_chunk(Lane& lane, Op* op, Priority priority, std::uint64_t credit);
  void push_read_request(Lane& lane, Op* op, Priority priority);
  bool push_serve_chunk(Lane& lane, std::uint64_t id, Priority priority);

  // connection_receive.cpp
  void receive(Lane& lane, std::int64_t now);
  bool receive_some(Lane& lane, std::int64_t now);
  ssize_t read_socket(Lane& lane, std::vector<iovec>* iov);
  void parse(Lane& lane);
  void parse_handshake(Lane& lane, std::int64_t now);
  bool parse_frame(Lane& lane);
  void take_buffered_payload(Lane& lane);
  void dispatch(Lane& lane, const FramePrefix& prefix, Bytes body);
  void on_message(Lane& lane, const FramePrefix& prefix, Bytes body);
  void on_write(Lane& lane, const FramePrefix& prefix, Bytes body);
  void on_result(Bytes body);
  void on_abort(Lane& lane, Bytes body);
  void on_read_request(Lane& lane, const FramePrefix& prefix, Bytes body);
  void serve(std::uint64_t op, Serve serve);
  void end_serve(std::uint64_t op);
  void on_read_data(Lane& lane, const FramePrefix& prefix, Bytes body);
  void on_read_go(const FramePrefix& prefix, Bytes body);
  void on_read_done(Lane& lane, Bytes body);
  void on_region(Lane& lane, Bytes body);
  void on_region_gone(Bytes body);
  ssize_t land(Lane& lane, const Fill& fill);
  ssize_t land_write(Lane& lane, const Fill& fill);
  ssize_t land_read(Lane& lane, const Fill& fill);
  bool settle(Lane& lane, std::uint64_t landed, std::span<std::byte* const> places);
  void chunk_landed(Lane& lane);
  void finish_write(Lane& lane, std::uint64_t op);
  void fail_write(Lane& lane, std::uint64_t op, const Status& why);

  // connection_lend.cpp
  void on_borrow(Lane& lane, const FramePrefix& prefix, Bytes body);
  void on_lent(Bytes body);
  void on_give_back(Bytes body);
  void end_borrow(Borrowed borrowed);

  // connection_pull.cpp
  void pull(std::size_t first, std::size_t last, std::uint64_t budget, std::int64_t now);
  bool pull_step(Pull* item, std::uint64_t* budget, std::int64_t now);
  Status pull_piece(Pull* item, const Piece& piece, std::uint64_t bytes, std::int64_t now);
  void pull_done(const Pull& item);
  bool peer_hung_up() const;

  Io* io_;
  Sessions* sessions_;
  const bool shm_;
  std::shared_ptr<LinkState> link_;
  bool initiator_;
  State state_;
  Status why_;
  std::array<Lane, kNumPriorities> lanes_;
  std::size_t num_lanes_ = 1;  // that this link has, or waits for

  std::unordered_map<std::uint64_t, std::unique_ptr<Op>> ops_;
  std::unordered_map<std::uint64_t, Sent> sends_;
  std::set<std::pair<std::int64_t, std::uint64_t>> deadlines_;
  std::deque<TxItem> tx_[kNumPriorities];
  Pacer pacer_;
  LinkCredits credits_;
  std::int64_t pace_until_ = 0;  // 0 = not waiting

  std::unordered_map<std::uint64_t, InWrite> inbound_;
  std::unordered_map<std::uint64_t, Serve> serving_;
  std::size_t served_ranges_ = 0;  // of all in serving_
  std::map<std::uint64_t, std::shared_ptr<RemoteRegion>> peer_regions_;
  std::set<std::uint64_t> borrowed_;   // leases of the peer that we hold
  std::set<std::uint32_t> announced_;  // our regions the peer knows
  std::deque<Pull> pulls_[kNumPriorities];

  std::int64_t last_rx_ns_, last_tx_ns_;
  std::int64_t setup_deadline_ns_;      // of connect and handshake
  std::int64_t lanes_deadline_ns_ = 0;  // of the connections of the lower classes; 0 = all there
  std::int64_t dial_at_ns_ = 0;         // when lanes are dialled again; 0 = none is missing
  std::int64_t close_deadline_ns_ = 0, bye_deadline_ns_ = 0;
  std::uint64_t byes_due_ = 0;  // lanes whose bye is awaited, by bit
  PeerHello peer_;
  bool was_up_ = false;
};

}  // namespace kvcore::transport
