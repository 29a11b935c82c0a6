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

constexpr std::int64_t kFlushNs = 100'000'000;  // of close()
constexpr std::size_t kMaxQueuedPieces = 65536;
constexpr std::int64_t kLeastKeepaliveNs = 20'000'000;  // a shorter one would only be pings

constexpr std::string_view kLabel = "kvcore-link-2";

// How operations end that a link's end leaves behind.
Status end_of_pending(const Status& why) {
  if (why.ok()) return Error{ErrorCode::kPeerDead, "the peer closed the link"};
  switch (why.error().code) {
    case ErrorCode::kCancelled:
    case ErrorCode::kPeerDead:
    case ErrorCode::kPeerHung:
      return why;
    default:
      return Error{ErrorCode::kTransport, why.error().message};
  }
}

std::optional<AuthSession> make_auth(const TransportOptions& options, bool initiator) {
  auto auth =
      AuthSession::make(initiator ? AuthSession::Side::kInitiator : AuthSession::Side::kResponder,
                        std::as_bytes(std::span(options.key)), kLabel, make_link_hello(options));
  if (!auth) return std::nullopt;
  return std::move(*auth);
}

}  // namespace

Connection::Connection(Io* io, std::shared_ptr<LinkState> state, UniqueFd fd, bool shm,
                       bool initiator, std::int64_t now)
    : io_(io),
      shm_(shm),
      link_(std::move(state)),
      fd_(std::move(fd)),
      auth_(make_auth(io->shared.options, initiator)),
      initiator_(initiator),
      state_(initiator ? State::kConnecting : State::kHandshake),
      last_rx_ns_(now),
      last_tx_ns_(now),
      setup_deadline_ns_(now + io->shared.options.handshake_ns) {
  if (!auth_) fail(Error{ErrorCode::kIo, "no random bytes for a handshake"});
  if (dead() || !fd_) return;  // no socket: the caller says why
  pacer_.set_rate(io->shared.options.pacing_bytes_per_s, now);
  epoll_event event{};
  event.data.u64 = epoll_key(link_->id);
  event.events = interest_ = EPOLLIN | EPOLLRDHUP | (initiator ? EPOLLOUT : 0U);
  if (::epoll_ctl(io_->epoll_fd, EPOLL_CTL_ADD, fd_.get(), &event) != 0)
    fail(Error{ErrorCode::kIo, text("epoll_ctl: errno ", errno)});
}

Connection::~Connection() = default;

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
  if (op->started) control(FrameType::kAbort, make_body(OpHead{id}));
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
  outbox_.detach(id);
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

void Connection::deliver(std::uint64_t op, std::vector<std::byte> message) {
  link_->messages_in += 1;
  io_->shared.events.push(Message{link_->id, std::move(message), now_ns()});
  if (op != 0) control(FrameType::kResult, make_result(op, {}));
}

// Who the peer is, as soon as it has proved the key.
Status Connection::greet() {
  KVCORE_ASSIGN_OR_RETURN(peer_, parse_link_hello(auth_->peer_hello()));
  KVCORE_RETURN_IF_ERROR(check_models(io_->shared.options.model_digest, peer_.model));
  if (peer_.keepalive_ns != 0) peer_.keepalive_ns = std::max(peer_.keepalive_ns, kLeastKeepaliveNs);
  const std::lock_guard lock(io_->shared.mu);
  link_->peer = peer_;
  return {};
}

void Connection::on_established(std::int64_t now) {
  if (const Status status = greet(); !status) return fail(status);
  last_rx_ns_ = now;
  state_ = State::kUp;
  link_->up = was_up_ = true;
  io_->shared.events.push(Up{link_->id, !initiator_});
  if (!shm()) return;
  for (const auto& [id, view] : io_->shared.grants.regions()) announce_region(id, view);
}

void Connection::region_changed(RegionId region, bool gone) {
  if (!shm() || state_ != State::kUp) return;
  if (gone) {
    if (announced_.erase(static_cast<std::uint32_t>(region)) > 0)
      control(FrameType::kRegionGone, make_body(RegionHead{static_cast<std::uint32_t>(region), 0}));
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
  control_.push_back(std::move(frame));
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
  ::shutdown(fd_.get(), SHUT_RDWR);
  fd_.reset();
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
  const bool reading = (interest_ & EPOLLIN) != 0;
  if (keepalive != 0 && reading && now - last_rx_ns_ > keepalive)
    fail(Error{ErrorCode::kPeerHung,
               text("the peer was silent for ", (now - last_rx_ns_) / 1'000'000, " ms (keep-alive ",
                    keepalive / 1'000'000, " ms)")});
  if (peer_.keepalive_ns != 0 && now - last_tx_ns_ >= peer_.keepalive_ns / 4 && outbox_.empty() &&
      control_.empty())
    control(FrameType::kPing);
  if (state_ != State::kClosing) return;
  const bool flushed = ops_.empty() && sends_.empty() && outbox_.empty() && control_.empty() &&
                       std::ranges::all_of(tx_, [](const auto& q) { return q.empty(); });
  if (flushed && !bye_sent_) {
    bye_sent_ = true;
    control(FrameType::kBye);
  } else if (flushed || now >= close_deadline_ns_) {
    fail(Error{ErrorCode::kCancelled, "closed by this side"});
  }
}

void Connection::work(std::int64_t now) {
  if (dead()) return;
  run_timers(now);
  if (!dead()) pull(now);
  if (!dead()) pump(now);
  if (!dead() && state_ == State::kClosing) run_timers(now);
  if (!dead()) pump(now);
  if (!dead()) update_interest();
}

bool Connection::busy() const noexcept {
  return std::ranges::any_of(pulls_, [](const auto& q) { return !q.empty(); });
}

std::int64_t Connection::next_timer_ns() const noexcept {
  std::int64_t next = std::numeric_limits<std::int64_t>::max();
  if (!deadlines_.empty()) next = deadlines_.begin()->first;
  if (state_ == State::kConnecting || state_ == State::kHandshake)
    return std::min(next, setup_deadline_ns_);
  const std::int64_t keepalive = io_->shared.options.keepalive_ns;
  if (keepalive != 0) next = std::min(next, last_rx_ns_ + keepalive + 1);
  if (peer_.keepalive_ns != 0 && outbox_.empty())
    next = std::min(next, last_tx_ns_ + peer_.keepalive_ns / 4);
  if (pace_until_ != 0) next = std::min(next, pace_until_);
  if (close_deadline_ns_ != 0) next = std::min(next, close_deadline_ns_);
  return next;
}

void Connection::update_interest() {
  const bool paused = !hung_up_ && (io_->shared.events.full() || pull_pieces_ > kMaxQueuedPieces);
  std::uint32_t wanted = hung_up_ ? EPOLLIN : EPOLLRDHUP | (paused ? 0U : EPOLLIN);
  if (state_ == State::kConnecting || outbox_.blocked()) wanted |= EPOLLOUT;
  if (wanted == interest_) return;
  if ((wanted & EPOLLIN) != 0 && (interest_ & EPOLLIN) == 0) last_rx_ns_ = now_ns();
  interest_ = wanted;
  epoll_event event{};
  event.data.u64 = epoll_key(link_->id);
  event.events = wanted;
  ::epoll_ctl(io_->epoll_fd, EPOLL_CTL_MOD, fd_.get(), &event);
}

void Connection::on_event(std::uint32_t, std::uint32_t events, std::int64_t now) {
  if (dead()) return;
  if (state_ == State::kConnecting && (events & (EPOLLOUT | EPOLLERR | EPOLLHUP)) != 0) {
    int error = 0;
    socklen_t size = sizeof error;
    ::getsockopt(fd_.get(), SOL_SOCKET, SO_ERROR, &error, &size);
    if (error != 0)
      return fail(Error{ErrorCode::kPeerDead,
                        text("connect ", link_->peer_address, ": ", std::strerror(error))});
    state_ = State::kHandshake;
    outbox_.push_raw(auth_->start());
  }
  if ((events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0) hung_up_ = true;
  if ((events & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0) receive(now);
}

}  // namespace kvcore::transport
