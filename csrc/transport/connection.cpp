#include "transport/connection.h"

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

struct LinkHello {  // before the identity, inside the handshake
  std::int64_t keepalive_ns;
};

}  // namespace

std::vector<std::byte> make_link_hello(const TransportOptions& options) {
  return make_body(LinkHello{options.keepalive_ns}, std::span<const char>(options.identity));
}

Connection::Connection(Io* io, std::shared_ptr<LinkState> state, UniqueFd fd, AuthSession auth,
                       bool initiator, std::int64_t now)
    : io_(io),
      link_(std::move(state)),
      fd_(std::move(fd)),
      auth_(std::move(auth)),
      initiator_(initiator),
      state_(initiator ? State::kConnecting : State::kHandshake),
      last_rx_ns_(now),
      last_tx_ns_(now),
      setup_deadline_ns_(now + io->shared.options.handshake_ns) {
  pacer_.set_rate(io->shared.options.pacing_bytes_per_s, now);
  epoll_event event{};
  event.data.u64 = static_cast<std::uint64_t>(link_->id);
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
  const auto priority = static_cast<std::size_t>(command.priority);
  tx_[priority].push_back({TxItem::Kind::kMessage, 0, std::move(command.bytes)});
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

void Connection::deliver(std::vector<std::byte> message) {
  link_->messages_in += 1;
  io_->shared.events.push(Message{link_->id, std::move(message), now_ns()});
}

void Connection::on_established(std::int64_t now) {
  const auto& hello = auth_.peer_hello();
  if (hello.size() < sizeof(LinkHello))
    return fail(Error{ErrorCode::kCorrupt, "the peer's hello is too short"});
  LinkHello head{};
  std::memcpy(&head, hello.data(), sizeof head);
  if (head.keepalive_ns < 0)
    return fail(Error{ErrorCode::kCorrupt,
                      text("the peer's keep-alive of ", head.keepalive_ns, " ns is negative")});
  peer_keepalive_ns_ = head.keepalive_ns == 0 ? 0 : std::max(head.keepalive_ns, kLeastKeepaliveNs);
  last_rx_ns_ = now;
  {
    const std::lock_guard lock(io_->shared.mu);
    link_->peer_identity.assign(reinterpret_cast<const char*>(hello.data()) + sizeof head,
                                hello.size() - sizeof head);
  }
  state_ = State::kUp;
  link_->up = announced_up_ = true;
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
  const bool silent = !initiator_ && !announced_up_;  // it never was a link
  for (Command& command : orphans) {
    if (auto* op = std::get_if<std::unique_ptr<Op>>(&command.what)) {
      const std::uint64_t id = (*op)->id;
      ops_.emplace(id, std::move(*op));
    }
  }
  const bool by_us = !why_.ok() && why_.error().code == ErrorCode::kCancelled;
  const Status pending = why_.ok() ? Status(Error{ErrorCode::kPeerDead, "the peer closed the link"})
                         : by_us || why_.error().code == ErrorCode::kPeerDead
                             ? why_
                             : Status(Error{ErrorCode::kTransport, why_.error().message});
  while (!ops_.empty()) complete(ops_.begin()->first, pending);
  link_->queued_message_bytes = 0;
  if (!silent) io_->shared.events.push(Down{link_->id, why_});
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
    fail(Error{ErrorCode::kPeerDead,
               text("the peer was silent for ", (now - last_rx_ns_) / 1'000'000, " ms (keep-alive ",
                    keepalive / 1'000'000, " ms)")});
  if (peer_keepalive_ns_ != 0 && now - last_tx_ns_ >= peer_keepalive_ns_ / 4 && outbox_.empty() &&
      control_.empty())
    control(FrameType::kPing);
  if (state_ != State::kClosing) return;
  const bool flushed = ops_.empty() && outbox_.empty() && control_.empty() &&
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
  if (peer_keepalive_ns_ != 0 && outbox_.empty())
    next = std::min(next, last_tx_ns_ + peer_keepalive_ns_ / 4);
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
  event.data.u64 = static_cast<std::uint64_t>(link_->id);
  event.events = wanted;
  ::epoll_ctl(io_->epoll_fd, EPOLL_CTL_MOD, fd_.get(), &event);
}

void Connection::on_event(std::uint32_t events, std::int64_t now) {
  if (dead()) return;
  if (state_ == State::kConnecting && (events & (EPOLLOUT | EPOLLERR | EPOLLHUP)) != 0) {
    int error = 0;
    socklen_t size = sizeof error;
    ::getsockopt(fd_.get(), SOL_SOCKET, SO_ERROR, &error, &size);
    if (error != 0)
      return fail(Error{ErrorCode::kPeerDead,
                        text("connect ", link_->peer_address, ": ", std::strerror(error))});
    state_ = State::kHandshake;
    outbox_.push_raw(auth_.start());
  }
  if ((events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0) hung_up_ = true;
  if ((events & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0) receive(now);
}

}  // namespace kvcore::transport
