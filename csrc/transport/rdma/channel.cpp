#include "transport/rdma/channel.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>

#include "base/text.h"
#include "transport/socket/address.h"

namespace kvcore::transport::rdma {
namespace {

constexpr std::string_view kLabel = "kvcore-rdma-3";
constexpr std::int64_t kFlushNs = 100'000'000;       // of close()
constexpr std::size_t kReadBytes = 64UL * 1024;      // of one recv
constexpr std::size_t kOutboxBytes = 1024UL * 1024;  // built ahead of the socket
constexpr std::int64_t kOpenNs = 20'000'000'000;  // for the devices, whose firmware takes its time
constexpr std::int64_t kPublishNs = 10'000'000;   // between two looks at the rails for info()
// Before the devices are open: what credits allow, and room for offers.
constexpr std::size_t kEarlySlack = 2UL * kMaxMessageBytes;

// The peer's address as a GID, for the choice of ours: "tcp:10.0.0.1:5" or "tcp:[fd00::1]:5".
Result<Gid> peer_gid(int fd) {
  const std::string name = peer_name(fd);
  KVCORE_ASSIGN_OR_RETURN(const Address address, parse_address(name));
  return gid_of_address(address.host);
}

}  // namespace

RdmaChannel::RdmaChannel(Io* io, std::shared_ptr<Host> host, std::shared_ptr<LinkState> state,
                         UniqueFd fd, bool initiator, std::int64_t now)
    : io_(io),
      host_(std::move(host)),
      link_(std::move(state)),
      credits_(&io->shared, link_),
      fd_(std::move(fd)),
      initiator_(initiator),
      state_(initiator ? State::kConnecting : State::kHandshake),
      last_rx_ns_(now),
      last_tx_ns_(now),
      setup_deadline_ns_(now + io->shared.options.handshake_ns) {
  const TransportOptions& options = io->shared.options;
  if (auto auth = make_link_auth(options, initiator, kLabel,
                                 make_link_hello(options, 1, credits_.first_window())))
    auth_ = std::move(*auth);
  else
    fail(auth.error());
  if (dead() || !fd_) return;  // no socket: the caller says why
  pacer_.set_rate(options.pacing_bytes_per_s, now);
  epoll_event event{};
  event.data.u64 = epoll_key(link_->id);
  event.events = interest_ = EPOLLIN | EPOLLRDHUP | (initiator ? EPOLLOUT : 0U);
  if (::epoll_ctl(io_->epoll_fd, EPOLL_CTL_ADD, fd_.get(), &event) != 0)
    fail(Error{ErrorCode::kIo, text("epoll_ctl: errno ", errno)});
}

RdmaChannel::~RdmaChannel() { host_->remove(this); }

// ---- commands

void RdmaChannel::send(SendCommand command) {
  if (command.op != 0) {
    const std::int64_t deadline = command.options.deadline_ns;
    pending_[command.op] = {nullptr, deadline, command.bytes.size()};
    if (deadline != 0) deadlines_.emplace(deadline, command.op);
    if (state_ == State::kClosing) {
      link_->queued_message_bytes -= command.bytes.size();
      return complete(command.op, Error{ErrorCode::kCancelled, "the link is being closed"});
    }
  }
  early_.emplace_back(std::move(command));
  drop_early();
}

void RdmaChannel::start(std::unique_ptr<Op> op) {
  const std::uint64_t id = op->id;
  const std::int64_t deadline = op->options.deadline_ns;
  if (deadline != 0) deadlines_.emplace(deadline, id);
  const std::uint64_t bytes = op->bytes;
  pending_[id] = {std::move(op), deadline, bytes};
  if (state_ == State::kClosing)
    return complete(id, Error{ErrorCode::kCancelled, "the link is being closed"});
  early_.emplace_back(id);
  drop_early();
}

void RdmaChannel::pass_on(SendCommand command) {
  peer_->outbound().send(command.options.priority, std::move(command.bytes), command.op);
}

// False: its region is not registered yet.
bool RdmaChannel::pass_on(std::uint64_t id) {
  const auto it = pending_.find(id);
  if (it == pending_.end()) return true;  // given up meanwhile
  Op& op = *it->second.op;
  std::vector<std::uint32_t> keys;
  for (std::uint32_t r = 0; r < host_->nics().size(); ++r) {
    const auto memory = host_->memory(op.region, r);
    if (!memory) return complete(id, memory.error()), true;
    if (*memory == nullptr) return false;
    keys.push_back((*memory)->local_key());
  }
  Job job{.op = id,
          .is_read = op.is_read,
          .priority = op.options.priority,
          .grant = op.grant,
          .tag = op.tag,
          .bytes = op.bytes,
          .notify = op.options.notify,
          .base = op.base,
          .segments = std::move(op.segments),
          .keys = std::move(keys)};
  peer_->outbound().start(std::move(job));
  return true;
}

void RdmaChannel::drop_early() {
  while (peer_ != nullptr && !early_.empty()) {
    if (auto* command = std::get_if<SendCommand>(&early_.front()))
      pass_on(std::move(*command));
    else if (!pass_on(std::get<std::uint64_t>(early_.front())))
      return;
    early_.pop_front();
  }
}

void RdmaChannel::give_up(std::uint64_t id, const Status& why) {
  if (!pending_.contains(id)) return;
  const auto waits = std::ranges::find_if(early_, [&](const auto& item) {
    const auto* command = std::get_if<SendCommand>(&item);
    return (command != nullptr ? command->op : std::get<std::uint64_t>(item)) == id;
  });
  if (waits == early_.end()) return peer_->outbound().give_up(id, why, io_->shared.now_ns());
  if (const auto* command = std::get_if<SendCommand>(&*waits))
    link_->queued_message_bytes -= command->bytes.size();
  early_.erase(waits);
  complete(id, why);
}

void RdmaChannel::complete(std::uint64_t id, Status status) {
  const auto it = pending_.find(id);
  if (it == pending_.end()) return;
  const Pending pending = std::move(it->second);
  pending_.erase(it);
  if (pending.deadline_ns != 0) deadlines_.erase({pending.deadline_ns, id});
  link_->outstanding -= 1;
  const std::uint64_t bytes = status.ok() ? pending.bytes : 0;
  if (pending.op != nullptr) {
    io_->shared.grants.unpin(pending.op->region);
    if (!pending.op->is_read) link_->queued_bytes -= pending.bytes;
    (pending.op->is_read ? link_->bytes_in : link_->bytes_out) += bytes;
  }
  io_->shared.events.push(Completion{link_->id, OpId{id}, std::move(status), bytes});
}

void RdmaChannel::begin_close(std::int64_t now) {
  if (state_ == State::kDead || state_ == State::kClosing) return;
  const Error closed{ErrorCode::kCancelled, "closed by this side"};
  if (state_ != State::kUp) return fail(closed);
  std::vector<std::uint64_t> ids;
  for (const auto& [id, pending] : pending_)
    if (pending.op != nullptr) ids.push_back(id);
  for (const std::uint64_t id : ids) give_up(id, closed);
  state_ = State::kClosing;
  close_deadline_ns_ = now + kFlushNs;
}

void RdmaChannel::fail(Status why) {
  if (state_ == State::kDead) return;
  state_ = State::kDead;
  why_ = std::move(why);
  link_->up = false;
}

void RdmaChannel::finish(std::vector<Command> orphans) {
  const Status ended = end_of_pending(why_);
  if (peer_ != nullptr) {  // first of all the queue pairs and windows: nothing lands after this
    peer_->close(ended);
    collect();
  }
  host_->remove(this);
  ::shutdown(fd_.get(), SHUT_RDWR);
  fd_.reset();
  for (Command& command : orphans) {
    if (auto* op = std::get_if<std::unique_ptr<Op>>(&command.what)) {
      const std::uint64_t id = (*op)->id;
      const std::uint64_t bytes = (*op)->bytes;
      pending_[id] = {std::move(*op), 0, bytes};
    } else if (const auto* s = std::get_if<SendCommand>(&command.what);
               s != nullptr && s->op != 0) {
      pending_[s->op] = {nullptr, 0, s->bytes.size()};
    }
  }
  while (!pending_.empty()) complete(pending_.begin()->first, ended);
  link_->queued_message_bytes = 0;
  credits_.close();
  const bool never_was_a_link = !initiator_ && !was_up_;
  if (!never_was_a_link) io_->shared.events.push(Down{link_->id, why_});
}

// ---- the NICs

Result<bool> RdmaChannel::on_work(const Nic* nic, const WorkDone& done, std::int64_t now) {
  if (peer_ == nullptr || dead()) return false;
  const auto mine = peer_->on_work(nic, done, now);
  news_ = news_ || !mine || *mine;
  return mine;
}

void RdmaChannel::on_nic_event(const Nic* nic, NicEvent event, std::int64_t now) {
  if (peer_ != nullptr) peer_->on_event(nic, event, now);
  news_ = true;
}

bool RdmaChannel::revoke(GrantRef grant, std::int64_t now) {
  if (peer_ == nullptr) return true;
  news_ = true;
  return peer_->inbound().revoke(grant, now);
}

// What the two sides have produced, as events.
void RdmaChannel::collect() {
  for (auto& done : peer_->outbound().take_done()) complete(done.op, std::move(done.status));
  const std::int64_t now = io_->shared.now_ns();
  for (auto& delivery : peer_->inbound().take_deliveries()) {
    if (auto* message = std::get_if<std::vector<std::byte>>(&delivery)) {
      link_->messages_in += 1;
      const std::uint64_t credit = text_credit(message->size());
      io_->shared.events.push(Message{link_->id, std::move(*message), now}, link_->poll_credit,
                              credit);
      continue;
    }
    const auto& arrived = std::get<Inbound::Arrived>(delivery);
    link_->bytes_in += arrived.bytes;
    if (arrived.notify)
      io_->shared.events.push(
          Arrival{link_->id, arrived.grant, arrived.tag, arrived.bytes, now, {}},
          link_->poll_credit, kBeginCredit);
    else
      credits_.give_back(kBeginCredit);
  }
  for (const GrantRef grant : peer_->inbound().take_fenced()) host_->fenced(this, grant);
}

// ---- the session

Status RdmaChannel::establish(std::int64_t now) {
  KVCORE_ASSIGN_OR_RETURN(hello_, parse_link_hello(auth_->peer_hello()));
  KVCORE_RETURN_IF_ERROR(check_models(io_->shared.options.model_digest, hello_.model));
  if (!initiator_) KVCORE_RETURN_IF_ERROR(io_->shared.room_for_link());
  {
    const std::lock_guard lock(io_->shared.mu);
    link_->peer = hello_;
    link_->proven = true;
  }
  KVCORE_ASSIGN_OR_RETURN(const Gid peer, peer_gid(fd_.get()));
  state_ = State::kOpening;
  setup_deadline_ns_ = now + kOpenNs;
  host_->add(this);
  opening_ = host_->open(peer);
  return {};
}

// The devices are open, or cannot be.
void RdmaChannel::go_up(std::int64_t now) {
  if (!opening_->status.ok()) return fail(opening_->status);
  const auto nics = host_->nics();
  if (const Status status = watch(nics); !status) return fail(status);
  make_peer(nics);
  state_ = State::kUp;
  link_->up = was_up_ = true;
  credits_.open(hello_.window);
  publish_rails(now);
  io_->shared.events.push(Up{link_->id, !initiator_});
  for (const auto& [type, body] : std::exchange(early_frames_, {})) take_frame(type, body, now);
  drop_early();
}

Status RdmaChannel::watch(const std::vector<Nic*>& nics) {
  for (const Nic* nic : nics) {
    for (const int fd : {nic->completion_fd(), nic->event_fd()}) {
      UniqueFd copy(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
      epoll_event event{};
      event.data.u64 = epoll_key(link_->id, static_cast<std::uint32_t>(nic_fds_.size()) + 1);
      event.events = EPOLLIN;
      if (!copy || ::epoll_ctl(io_->epoll_fd, EPOLL_CTL_ADD, copy.get(), &event) != 0)
        return Error{ErrorCode::kIo, text("epoll_ctl of a NIC: errno ", errno)};
      nic_fds_.push_back(std::move(copy));
    }
  }
  return {};
}

// For info(): what the rails did on this link, and how their devices are.
void RdmaChannel::publish_rails(std::int64_t now) {
  if (peer_ == nullptr || now < next_publish_ns_) return;
  next_publish_ns_ = now + kPublishNs;
  const Outbound& out = peer_->outbound();
  std::vector<RailInfo> rails;
  for (std::uint32_t r = 0; r < host_->nics().size(); ++r) {
    RailInfo info = host_->info(r);
    info.bytes_posted = out.bytes_posted(r);
    info.errors = out.rail_errors(r);
    info.ready = out.rail_state(r) == Outbound::RailState::kReady;
    rails.push_back(std::move(info));
  }
  const std::lock_guard lock(io_->shared.mu);
  link_->rails = std::move(rails);
}

bool RdmaChannel::may_post(std::uint32_t rail, std::int64_t now) {
  const std::int64_t ready = std::max(pacer_.ready_ns(now), host_->ready_ns(rail, now));
  if (ready > now) pace_until_ = pace_until_ == 0 ? ready : std::min(pace_until_, ready);
  return ready <= now;
}

void RdmaChannel::make_peer(const std::vector<Nic*>& nics) {
  PathSettings path;
  path.traffic_class = host_->options().traffic_class;
  path.service_level = host_->options().service_level;
  const auto packet = [host = host_] { return host->random_packet(); };
  OutboundOptions out;
  out.path = path;
  out.random_packet = packet;
  out.may_post = [this](std::uint32_t rail, std::int64_t now) { return may_post(rail, now); };
  out.on_posted = [this](std::uint32_t rail, std::uint64_t bytes) {
    pacer_.spend(bytes);
    host_->on_posted(rail, bytes);
  };
  out.may_send = [this](std::uint64_t credit, Priority priority) {
    return credits_.may_send(credit, priority, io_->shared.now_ns());
  };
  out.on_unqueued = [this](std::uint64_t bytes) { link_->queued_message_bytes -= bytes; };
  out.on_sent = [this](std::uint64_t credit) { credits_.spend(credit); };
  InboundOptions in;
  in.path = path;
  in.random_packet = packet;
  in.grant = [this](GrantRef ref, std::int64_t now) {
    return io_->shared.grants.find(ref, now, hello_.identity);
  };
  in.exposing = [host = host_](GrantRef ref) { host->exposing(ref); };
  in.concealed = [host = host_](GrantRef ref) { host->concealed(ref); };
  in.memory = [host = host_](RegionId id, std::uint32_t rail) { return host->memory(id, rail); };
  in.base = [host = host_](RegionId id) { return host->base(id); };
  in.charge = [this](std::uint64_t credit) -> Status {
    if (credits_.take(credit, text_credit(kMaxMessageBytes))) return {};
    return Error{ErrorCode::kCorrupt, "the peer sends more than its credits allow"};
  };
  in.give_back = [this](std::uint64_t credit) { credits_.give_back(credit); };
  peer_ = std::make_unique<Peer>(nics, std::move(out), std::move(in));
}

void RdmaChannel::frame(FrameType type, std::vector<std::byte> body) {
  OutFrame frame{type};
  frame.body = std::move(body);
  outbox_.push(&*auth_, std::move(frame));
}

void RdmaChannel::receive(std::int64_t now) {
  for (int rounds = 0; rounds < 16 && !dead() && receive_some(now); ++rounds) {
  }
}

bool RdmaChannel::receive_some(std::int64_t now) {
  rx_.resize(rx_end_ + kReadBytes);
  ssize_t n = 0;
  do {
    n = ::recv(fd_.get(), rx_.data() + rx_end_, kReadBytes, MSG_DONTWAIT);
  } while (n < 0 && errno == EINTR);
  if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return false;
  if (n <= 0) {
    const int error = n == 0 ? 0 : errno;
    if (state_ == State::kClosing)
      fail(Error{ErrorCode::kCancelled, "closed by this side"});
    else
      fail(connection_ended(state_ == State::kUp, error));
    return false;
  }
  last_rx_ns_ = now;
  rx_end_ += static_cast<std::size_t>(n);
  host_->poll(now);  // an arrival must be seen before the peer's next word about its rail
  parse(now);
  return !dead();
}

void RdmaChannel::parse(std::int64_t now) {
  std::size_t used = 0;
  const auto consume = [&](std::size_t n) {
    used += n;
    return n > 0;
  };
  while (!dead() && used < rx_end_) {
    const Bytes rest(rx_.data() + used, rx_end_ - used);
    if (state_ == State::kHandshake) {
      std::vector<std::byte> out;
      const auto n = auth_->feed(rest, &out);
      outbox_.push_raw(std::move(out));
      if (!n) return fail(n.error());
      if (auth_->established()) {
        if (const Status status = establish(now); !status) return fail(status);
        if (opening_->over) go_up(now);
      }
      if (!consume(*n)) break;
    } else if (!consume(parse_frame(rest, now))) {
      break;
    }
  }
  if (used == 0) return;
  std::memmove(rx_.data(), rx_.data() + used, rx_end_ - used);
  rx_end_ -= used;
}

// One whole frame; returns its size, or 0 while it is not there yet (or the link died).
std::size_t RdmaChannel::parse_frame(Bytes rest, std::int64_t now) {
  FramePrefix prefix;
  if (rest.size() < sizeof prefix) return 0;
  std::memcpy(&prefix, rest.data(), sizeof prefix);
  if (const Status status = check_prefix(prefix, true, kTextHeadBytes); !status)
    return fail(status), 0;
  const std::size_t sealed = sizeof prefix + prefix.body_bytes;
  if (rest.size() < sealed + kMacBytes) return 0;
  if (const Status status = auth_->open({rest.first(sealed)}, rest.subspan(sealed, kMacBytes));
      !status)
    return fail(status), 0;
  const Bytes body = rest.subspan(sizeof prefix, prefix.body_bytes);
  const auto type = static_cast<FrameType>(prefix.type);
  if (peer_ != nullptr || type == FrameType::kPing || type == FrameType::kBye) {
    take_frame(type, body, now);
  } else if ((early_bytes_ += sealed) > credits_.first_window() + kEarlySlack) {
    fail(Error{ErrorCode::kCorrupt, "the peer sends more than its credits allow"});
  } else {
    early_frames_.emplace_back(type, std::vector(body.begin(), body.end()));
  }
  return sealed + kMacBytes;
}

void RdmaChannel::take_frame(FrameType type, Bytes body, std::int64_t now) {
  if (dead()) return;
  switch (type) {
    case FrameType::kPing:
      break;
    case FrameType::kBye:
      fail({});
      break;
    case FrameType::kMessage:
      if (const Status status = peer_->on_control(body, now); !status) fail(status);
      break;
    case FrameType::kCredit:
      on_credit(body);
      break;
    default:
      fail(Error{ErrorCode::kCorrupt,
                 text("frame type ", static_cast<int>(type), " on an rdma link")});
  }
}

void RdmaChannel::on_credit(Bytes body) {
  const auto credit = parse_head<Credit>(body);
  if (!credit) return fail(credit.error());
  if (const Status status = credits_.on_announced(*credit); !status) fail(status);
}

void RdmaChannel::on_event(std::uint32_t source, std::uint32_t events, std::int64_t now) {
  if (dead() || source != 0) return;  // a NIC's: work() follows
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
  if ((events & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0) receive(now);
}

void RdmaChannel::run_timers(std::int64_t now) {
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
  if (state_ == State::kOpening && now >= setup_deadline_ns_)
    return fail(Error{ErrorCode::kTimeout, text("the RDMA devices were not open within ",
                                                kOpenNs / 1'000'000'000, " s")});
  const std::int64_t keepalive = io_->shared.options.keepalive_ns;
  const auto silent = [&] { return keepalive != 0 && now - last_rx_ns_ > keepalive; };
  // This thread itself may have been held up: what came meanwhile counts.
  if (silent()) receive(now);
  if (!dead() && silent())
    fail(Error{ErrorCode::kPeerHung,
               text("the peer was silent for ", (now - last_rx_ns_) / 1'000'000, " ms (keep-alive ",
                    keepalive / 1'000'000, " ms)")});
  if (hello_.keepalive_ns != 0 && now - last_tx_ns_ >= hello_.keepalive_ns / 4 && outbox_.empty())
    frame(FrameType::kPing);
}

void RdmaChannel::pump(std::int64_t now) {
  while (!dead()) {
    while (peer_ != nullptr && outbox_.bytes() < kOutboxBytes) {
      if (credits_.due()) frame(FrameType::kCredit, make_body(credits_.announce()));
      auto control = peer_->next_control();
      if (!control) break;
      frame(FrameType::kMessage, std::move(*control));
      news_ = true;  // what was announced now can be posted in another round
    }
    if (state_ == State::kClosing && pending_.empty() && outbox_.empty()) {
      if (bye_sent_) return fail(Error{ErrorCode::kCancelled, "closed by this side"});
      bye_sent_ = true;
      frame(FrameType::kBye);
    }
    if (outbox_.empty() || state_ == State::kConnecting) break;
    const auto n = outbox_.flush(fd_.get(), kOutboxBytes);
    if (!n) {
      receive(now);  // what it said before its end, a goodbye perhaps
      return fail(n.error());
    }
    if (*n > 0) last_tx_ns_ = now;
    if (outbox_.blocked()) break;
  }
  if (state_ == State::kClosing && now >= close_deadline_ns_)
    fail(Error{ErrorCode::kCancelled, "closed by this side"});
}

void RdmaChannel::work(std::int64_t now) {
  if (dead()) return;
  news_ = false;
  run_timers(now);
  credits_.collect_polled();
  if (opening_ != nullptr && !dead()) {
    host_->poll(now);
    news_ = false;
  }
  if (state_ == State::kOpening && opening_->over) go_up(now);
  if (peer_ != nullptr && !dead()) {
    pace_until_ = 0;
    drop_early();
    const Status stepped = peer_->step(now);
    collect();
    publish_rails(now);
    if (!stepped) fail(stepped);
  }
  if (!dead()) pump(now);
  if (!dead()) update_interest();
}

std::int64_t RdmaChannel::next_timer_ns() const noexcept {
  std::int64_t next = std::numeric_limits<std::int64_t>::max();
  if (!deadlines_.empty()) next = deadlines_.begin()->first;
  if (state_ == State::kConnecting || state_ == State::kHandshake)
    return std::min(next, setup_deadline_ns_);
  if (state_ == State::kOpening) next = std::min(next, setup_deadline_ns_);
  const std::int64_t keepalive = io_->shared.options.keepalive_ns;
  if (keepalive != 0) next = std::min(next, last_rx_ns_ + keepalive + 1);
  if (hello_.keepalive_ns != 0) next = std::min(next, last_tx_ns_ + hello_.keepalive_ns / 4);
  if (pace_until_ != 0) next = std::min(next, pace_until_);
  if (close_deadline_ns_ != 0) next = std::min(next, close_deadline_ns_);
  if (peer_ == nullptr) return next;
  if (peer_->outbound().operations() > 0) next = std::min(next, host_->next_look_ns());
  return std::min(next, peer_->next_timer_ns());
}

void RdmaChannel::update_interest() {
  std::uint32_t wanted = EPOLLIN | EPOLLRDHUP;
  if (state_ == State::kConnecting || outbox_.blocked()) wanted |= EPOLLOUT;
  if (wanted == interest_) return;
  interest_ = wanted;
  epoll_event event{};
  event.data.u64 = epoll_key(link_->id);
  event.events = wanted;
  ::epoll_ctl(io_->epoll_fd, EPOLL_CTL_MOD, fd_.get(), &event);
}

}  // namespace kvcore::transport::rdma
