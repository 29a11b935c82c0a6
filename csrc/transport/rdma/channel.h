// One rdma link as a state machine of the I/O thread: a tcp session carries the handshake, the keep
// alive and the control messages (control.h) in authenticated frames, the NICs carry the payload.
//
// The keep-alive is between processes, not NICs: hardware acknowledges for a process that is
// stopped. Thread rules: the I/O thread only, but for LinkState.
#pragma once

#include <deque>
#include <map>
#include <optional>
#include <set>
#include <variant>
#include <vector>

#include "transport/core/channel.h"
#include "transport/core/link_credits.h"
#include "transport/rdma/host.h"
#include "transport/rdma/peer.h"
#include "transport/socket/outbox.h"
#include "transport/socket/pacer.h"

namespace kvcore::transport::rdma {

class RdmaChannel final : public Channel, private Host::User {
 public:
  RdmaChannel(Io* io, std::shared_ptr<Host> host, std::shared_ptr<LinkState> state, UniqueFd fd,
              bool initiator, std::int64_t now);
  ~RdmaChannel() override;

  void send(SendCommand command) override;
  void start(std::unique_ptr<Op> op) override;
  void give_up(std::uint64_t op, const Status& why) override;
  void give_back(std::uint64_t) override {}  // this scheme does not lend
  void set_rate(std::uint64_t bytes_per_s, std::int64_t now) override {
    pacer_.set_rate(bytes_per_s, now);
  }
  void begin_close(std::int64_t now) override;
  void region_changed(RegionId region, bool gone) override { host_->region_changed(region, gone); }
  void fail(Status why) override;

  void on_event(std::uint32_t source, std::uint32_t events, std::int64_t now) override;
  void work(std::int64_t now) override;
  void work_bulk(std::int64_t) override {}  // the NICs carry the payload
  bool busy() const noexcept override { return news_; }
  std::int64_t next_timer_ns() const noexcept override;
  bool dead() const noexcept override { return state_ == State::kDead; }
  bool awaits_lanes() const noexcept override { return false; }
  void finish(std::vector<Command> orphans) override;
  const LinkState& link() const noexcept override { return *link_; }
  bool initiator() const noexcept override { return initiator_; }

 private:
  enum class State : std::uint8_t { kConnecting, kHandshake, kOpening, kUp, kClosing, kDead };
  struct Pending {  // a write, a read, or a send whose completion is waited for
    std::unique_ptr<Op> op{};
    std::int64_t deadline_ns = 0;
    std::uint64_t bytes = 0;
  };

  // Host::User
  Result<bool> on_work(const Nic* nic, const WorkDone& done, std::int64_t now) override;
  void on_nic_event(const Nic* nic, NicEvent event, std::int64_t now) override;
  void on_ready() override { news_ = true; }
  bool revoke(GrantRef grant, std::int64_t now) override;

  Status establish(std::int64_t now);
  void go_up(std::int64_t now);
  Status watch(const std::vector<Nic*>& nics);
  void make_peer(const std::vector<Nic*>& nics);
  void receive(std::int64_t now);
  bool receive_some(std::int64_t now);
  void parse(std::int64_t now);
  std::size_t parse_frame(Bytes rest, std::int64_t now);
  bool pass_on(std::uint64_t id);
  void take_frame(FrameType type, Bytes body, std::int64_t now);
  void publish_rails(std::int64_t now);
  bool may_post(std::uint32_t rail, std::int64_t now);
  void pass_on(SendCommand command);
  void drop_early();
  void on_credit(Bytes body);
  void collect();
  void complete(std::uint64_t id, Status status);
  void frame(FrameType type, std::vector<std::byte> body = {});
  void pump(std::int64_t now);
  void run_timers(std::int64_t now);
  void update_interest();

  Io* io_;
  std::shared_ptr<Host> host_;
  std::shared_ptr<LinkState> link_;
  LinkCredits credits_;
  UniqueFd fd_;
  std::vector<UniqueFd> nic_fds_;  // copies, since a descriptor can be in an epoll once
  std::optional<AuthSession> auth_;
  bool initiator_;
  State state_;
  Status why_;
  bool was_up_ = false;
  bool news_ = false;  // another channel's round brought something for this one
  bool bye_sent_ = false;
  std::uint32_t interest_ = 0;
  PeerHello hello_;
  std::unique_ptr<Peer> peer_;  // from Up on
  std::map<std::uint64_t, Pending> pending_;
  std::shared_ptr<const Host::Opening> opening_;  // of the NICs, from the handshake on
  // Posted before Up, or behind an operation whose region is not registered yet.
  std::deque<std::variant<SendCommand, std::uint64_t>> early_;
  std::deque<std::pair<FrameType, std::vector<std::byte>>> early_frames_;  // came before Up
  std::size_t early_bytes_ = 0;
  std::set<std::pair<std::int64_t, std::uint64_t>> deadlines_;
  Outbox outbox_;
  Pacer pacer_;
  std::int64_t pace_until_ = 0, next_publish_ns_ = 0;
  std::vector<std::byte> rx_;
  std::size_t rx_end_ = 0;
  std::int64_t last_rx_ns_, last_tx_ns_, setup_deadline_ns_, close_deadline_ns_ = 0;
};

}  // namespace kvcore::transport::rdma
