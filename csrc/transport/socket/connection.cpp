#include "transport/socket/connection.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>
#include <limits>

#include "base/text.h"

namespace kvcore::transport {
namespace {

constexpr std::uint64_t kBulkPullBytes = 256UL * 1024;  // of the lower classes, in a round
constexpr std::int64_t kFlushNs = 100'000'000;          // of close()

}  // namespace

Connection::Connection(Io* io, Sessions* sessions, std::shared_ptr<LinkState> state, UniqueFd fd,
                       bool shm, bool initiator, std::int64_t now)
    : io_(io),
      sessions_(sessions),
      shm_(shm),
      link_(std::move(state)),
      initiator_(initiator),
      state_(initiator ? State::kConnecting : State::kHandshake),
      credits_(&io->shared, link_),
      last_rx_ns_(now),
      last_tx_ns_(now),
      setup_deadline_ns_(now + io->shared.options.handshake_ns) {
  for (std::uint32_t n = 0; n < kNumPriorities; ++n) lanes_[n].number = n;
  pacer_.set_rate(io->shared.options.pacing_bytes_per_s, now);
  if (fd)
    open_lane(lanes_[0], std::move(fd),
              make_link_hello(io->shared.options, own_lanes(), credits_.first_window()));
}

Connection::~Connection() {
  if (lanes_[0].auth) sessions_->forget(lanes_[0].auth->session_id(), this);
}

Op* Connection::find_op(std::uint64_t id) {
  const auto it = ops_.find(id);
  return it == ops_.end() ? nullptr : it->second.get();
}

void Connection::send(SendCommand command) {
  const Priority priority = command.options.priority;
  if (command.op != 0) {
    const std::int64_t deadline = command.options.deadline_ns;
    sends_.emplace(command.op, Sent{deadline, priority, command.bytes.size()});
    if (deadline != 0) deadlines_.emplace(deadline, command.op);
    if (state_ == State::kClosing) {
      link_->queued_message_bytes -= command.bytes.size();
      return complete_send(command.op, Error{ErrorCode::kCancelled, "the link is being closed"});
    }
  }
  tx_[static_cast<std::size_t>(priority)].push_back(
      {TxItem::Kind::kMessage, command.op, std::move(command.bytes)});
}

void Connection::start(std::unique_ptr<Op> op) {
  const std::uint64_t id = op->id;
  const auto priority = static_cast<std::size_t>(op->options.priority);
  const std::int64_t deadline = op->options.deadline_ns;
  if (deadline != 0) deadlines_.emplace(deadline, id);
  const bool refused = shm() && !op->is_read && !op->has_memfd;
  ops_.emplace(id, std::move(op));
  if (refused)
    return complete(
        id, Error{ErrorCode::kUnsupported,
                  "shm: the local region of a write needs a memfd, the peer pulls from it"});
  if (state_ == State::kClosing)
    return complete(id, Error{ErrorCode::kCancelled, "the link is being closed"});
  tx_[priority].push_back({TxItem::Kind::kOp, id, {}});
}

void Connection::give_up(std::uint64_t id, const Status& why) {
  if (const auto sent = sends_.find(id); sent != sends_.end())
    return give_up_send(id, sent->second, why);
  Op* op = find_op(id);
  if (op == nullptr || op->giving_up) return;
  if (op->started)
    control(lane_of(op->options.priority), op->borrows ? FrameType::kGiveBack : FrameType::kAbort,
            make_body(OpHead{id}));
  if (shm() && op->started && !op->is_read) {  // the peer may be copying: its answer ends it
    op->giving_up = true;
    op->give_up_status = why;
    return;
  }
  complete(id, why);
}

void Connection::complete(std::uint64_t id, Status status) {
  const auto it = ops_.find(id);
  if (it == ops_.end()) return;
  Op& op = *it->second;
  if (op.borrows)
    return end_borrow(Borrowed{link_->id, OpId{id}, {}, {}, {}, 0, std::move(status)});
  lane_of(op.options.priority).outbox.detach(id);
  io_->shared.grants.unpin(op.region);
  if (op.options.deadline_ns != 0) deadlines_.erase({op.options.deadline_ns, id});
  if (!op.is_read) link_->queued_bytes -= op.bytes - op.done;
  link_->outstanding -= 1;
  const std::uint64_t bytes = status.ok() ? op.bytes : 0;
  (op.is_read ? link_->bytes_in : link_->bytes_out) += bytes;
  ops_.erase(it);
  io_->shared.events.push(Completion{link_->id, OpId{id}, std::move(status), bytes});
}

// What has not left is taken back; what has may still reach the peer.
void Connection::give_up_send(std::uint64_t id, const Sent& sent, const Status& why) {
  auto& queue = tx_[static_cast<std::size_t>(sent.priority)];
  const auto item = std::ranges::find_if(
      queue, [&](const TxItem& i) { return i.kind == TxItem::Kind::kMessage && i.op == id; });
  const bool left = item == queue.end();
  if (!left) {
    link_->queued_message_bytes -= item->message.size();
    queue.erase(item);
  }
  complete_send(id,
                Error{why.error().code,
                      text(why.error().message, left ? "; the message had left, the peer may get it"
                                                     : "; the message was taken back")});
}

void Connection::complete_send(std::uint64_t id, Status status) {
  const auto it = sends_.find(id);
  if (it == sends_.end()) return;
  const Sent sent = it->second;
  sends_.erase(it);
  if (sent.deadline_ns != 0) deadlines_.erase({sent.deadline_ns, id});
  link_->outstanding -= 1;
  const std::uint64_t bytes = status.ok() ? sent.bytes : 0;
  io_->shared.events.push(Completion{link_->id, OpId{id}, std::move(status), bytes});
}

void Connection::deliver(Lane& lane, std::uint64_t op, std::vector<std::byte> message,
                         std::uint64_t cost) {
  link_->messages_in += 1;
  io_->shared.events.push(Message{link_->id, std::move(message), now_ns()}, link_->poll_credit,
                          cost);
  if (op != 0) control(lane, FrameType::kResult, make_result(op, {}));
}

void Connection::region_changed(RegionId region, bool gone) {
  if (!shm() || state_ != State::kUp) return;
  if (gone) {
    if (announced_.erase(static_cast<std::uint32_t>(region)) > 0)
      control(lanes_[0], FrameType::kRegionGone,
              make_body(RegionHead{static_cast<std::uint32_t>(region), 0}));
    return;
  }
  const auto view = io_->shared.grants.region(region);
  if (view) announce_region(region, *view);
}

void Connection::announce_region(RegionId id, const RegionView& view) {
  if (view.fd < 0 || !announced_.insert(static_cast<std::uint32_t>(id)).second) return;
  OutFrame frame{FrameType::kRegion};
  frame.fd = UniqueFd(::fcntl(view.fd, F_DUPFD_CLOEXEC, 0));
  if (!frame.fd) return fail(Error{ErrorCode::kIo, text("dup of a region's memfd: errno ", errno)});
  frame.body = make_body(RegionHead{static_cast<std::uint32_t>(id), view.bytes});
  lanes_[0].control.push_back(std::move(frame));
}

void Connection::begin_close(std::int64_t now) {
  if (state_ == State::kDead || state_ == State::kClosing) return;
  const Error closed{ErrorCode::kCancelled, "closed by this side"};
  if (state_ != State::kUp) return fail(closed);
  std::vector<std::uint64_t> ids;
  for (const auto& [id, op] : ops_) ids.push_back(id);
  for (const std::uint64_t id : ids) give_up(id, closed);
  state_ = State::kClosing;
  close_deadline_ns_ = now + kFlushNs;
}

void Connection::fail(Status why) {
  if (state_ == State::kDead) return;
  state_ = State::kDead;
  why_ = std::move(why);
  link_->up = false;
}

void Connection::finish(std::vector<Command> orphans) {
  // The shutdown tells a peer that is copying from our memory not to announce it (see the top).
  for (Lane& lane : lanes_) {
    if (lane.fd) ::shutdown(lane.fd.get(), SHUT_RDWR);
    lane.fd.reset();
  }
  for (Command& command : orphans) {
    if (auto* op = std::get_if<std::unique_ptr<Op>>(&command.what)) {
      const std::uint64_t id = (*op)->id;
      ops_.emplace(id, std::move(*op));
    } else if (const auto* s = std::get_if<SendCommand>(&command.what);
               s != nullptr && s->op != 0) {
      sends_.emplace(s->op, Sent{0, s->options.priority, s->bytes.size()});
    }
  }
  const Status pending = end_of_pending(why_);
  while (!ops_.empty()) complete(ops_.begin()->first, pending);
  while (!sends_.empty()) complete_send(sends_.begin()->first, pending);
  link_->queued_message_bytes = 0;
  credits_.close();
  if (link_->process) ::epoll_ctl(io_->epoll_fd, EPOLL_CTL_DEL, link_->process->fd(), nullptr);
  io_->shared.leases.link_ended(link_->id, lanes_[0].bye_received);
  const bool never_was_a_link = !initiator_ && !was_up_;
  if (!never_was_a_link) io_->shared.events.push(Down{link_->id, why_});
}

void Connection::run_timers(std::int64_t now) {
  while (!deadlines_.empty() && deadlines_.begin()->first <= now) {
    const std::uint64_t id = deadlines_.begin()->second;
    deadlines_.erase(deadlines_.begin());
    give_up(id, Error{ErrorCode::kTimeout, "the operation's deadline passed"});
  }
  if (state_ == State::kConnecting || state_ == State::kHandshake) {
    if (now >= setup_deadline_ns_)
      fail(Error{ErrorCode::kPeerDead,
                 text("no connection and handshake with ", link_->peer_address, " in time")});
    return;
  }
  const std::int64_t keepalive = io_->shared.options.keepalive_ns;
  if (keepalive != 0 && now - last_rx_ns_ > keepalive)
    fail(Error{ErrorCode::kPeerHung,
               text("the peer was silent for ", (now - last_rx_ns_) / 1'000'000, " ms (keep-alive ",
                    keepalive / 1'000'000, " ms)")});
  if (peer_.keepalive_ns != 0 && now - last_tx_ns_ >= peer_.keepalive_ns / 4 && lanes_[0].flushed())
    control(lanes_[0], FrameType::kPing);
  if (dial_at_ns_ != 0 && now >= dial_at_ns_) dial_lanes();
  if (lanes_deadline_ns_ != 0 && now >= lanes_deadline_ns_)
    fail(Error{ErrorCode::kTransport, text("no connection for each priority class with ",
                                           link_->peer_address, " in time")});
  if (bye_deadline_ns_ != 0 && now >= bye_deadline_ns_) fail({});  // the rest of it never came
  if (state_ == State::kClosing) run_closing(now);
}

// Everything out, then a bye on each lane, then the end.
void Connection::run_closing(std::int64_t now) {
  const bool flushed = ops_.empty() && sends_.empty() &&
                       std::ranges::all_of(lanes_, &Lane::flushed) &&
                       std::ranges::all_of(tx_, [](const auto& q) { return q.empty(); });
  if (flushed && !lanes_[0].bye_sent) {
    say_bye();
  } else if (flushed || now >= close_deadline_ns_) {
    fail(Error{ErrorCode::kCancelled, "closed by this side"});
  }
}

void Connection::work(std::int64_t now) {
  if (dead()) return;
  run_timers(now);
  credits_.collect_polled();
  if (!dead()) pull(0, 0, kLandingBytes, now);
  if (!dead()) pump(lanes_[0], now);
  if (!dead()) update_interest(lanes_[0]);
}

void Connection::work_bulk(std::int64_t now) {
  if (!dead() && shm() && pulls_[0].empty()) {
    pull(1, kNumPriorities - 1, kBulkPullBytes, now);
    if (!dead()) pump(lanes_[0], now);  // its results and credits: nothing else may come to wake us
    if (!dead()) update_interest(lanes_[0]);
  }
  for (std::size_t n = 1; n < num_lanes_ && !dead(); ++n) {
    lanes_[n].more = false;
    if (lanes_[n].state != Lane::State::kUp || !higher_waits(n)) pump(lanes_[n], now);
    if (!dead()) update_interest(lanes_[n]);
  }
  if (dead() || state_ != State::kClosing) return;
  run_timers(now);
  for (std::size_t n = 0; n < num_lanes_ && !dead(); ++n) {
    pump(lanes_[n], now);
    if (!dead()) update_interest(lanes_[n]);
  }
}

bool Connection::higher_waits(std::size_t n) const {
  for (std::size_t m = 0; m < n; ++m)
    if (!lanes_[m].outbox.empty() || !tx_[m].empty()) return true;
  return false;
}

bool Connection::busy() const noexcept {
  return std::ranges::any_of(pulls_, [](const auto& q) { return !q.empty(); }) ||
         std::ranges::any_of(lanes_, &Lane::more);
}

std::int64_t Connection::next_timer_ns() const noexcept {
  std::int64_t next = std::numeric_limits<std::int64_t>::max();
  if (!deadlines_.empty()) next = deadlines_.begin()->first;
  if (state_ == State::kConnecting || state_ == State::kHandshake)
    return std::min(next, setup_deadline_ns_);
  const std::int64_t keepalive = io_->shared.options.keepalive_ns;
  if (keepalive != 0) next = std::min(next, last_rx_ns_ + keepalive + 1);
  if (peer_.keepalive_ns != 0 && lanes_[0].outbox.empty())
    next = std::min(next, last_tx_ns_ + peer_.keepalive_ns / 4);
  if (pace_until_ != 0) next = std::min(next, pace_until_);
  for (const std::int64_t t :
       {close_deadline_ns_, lanes_deadline_ns_, dial_at_ns_, bye_deadline_ns_})
    if (t != 0) next = std::min(next, t);
  return next;
}

}  // namespace kvcore::transport
