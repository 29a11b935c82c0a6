// The sockets of a link: opening them, tying those of the lower classes to the first, their end.
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/text.h"
#include "transport/socket/address.h"
#include "transport/socket/connection.h"

namespace kvcore::transport {
namespace {

constexpr std::string_view kLabel = "kvcore-link-4";
constexpr std::int64_t kLeastKeepaliveNs = 20'000'000;  // a shorter one would only be pings
constexpr std::int64_t kDialAgainNs = 10'000'000;
constexpr int kMostDials = 32;  // at a time, well below kMaxStrangersPerSource of the peer
constexpr std::uint32_t kProcessSource = kNumPriorities;  // behind the lanes

}  // namespace

void Sessions::add(std::uint64_t session, Connection* link) { links_[session] = link; }

void Sessions::forget(std::uint64_t session, const Connection* link) {
  const auto it = links_.find(session);
  if (it != links_.end() && it->second == link) links_.erase(it);
}

Connection* Sessions::find(std::uint64_t session) const {
  const auto it = links_.find(session);
  return it == links_.end() ? nullptr : it->second;
}

std::uint32_t Connection::own_lanes() const noexcept {
  return !shm() && io_->shared.options.tcp_connection_per_class ? kNumPriorities : 1;
}

Lane& Connection::lane_of(Priority priority) noexcept {
  return lanes_[num_lanes_ == 1 ? 0 : static_cast<std::size_t>(priority)];
}

// A connected or connecting socket becomes this lane; the handshake follows.
void Connection::open_lane(Lane& lane, UniqueFd fd, std::vector<std::byte> hello) {
  auto auth = make_link_auth(io_->shared.options, initiator_, kLabel, hello);
  if (!auth) return fail(auth.error());
  lane.auth = std::move(*auth);
  lane.fd = std::move(fd);
  lane.state = initiator_ ? Lane::State::kConnecting : Lane::State::kHandshake;
  if (!shm()) set_tcp_options(lane.fd.get(), lane.number);
  lane.interest = EPOLLIN | EPOLLRDHUP | (initiator_ ? EPOLLOUT : 0U);
  watch(lane, EPOLL_CTL_ADD);
}

void Connection::watch(const Lane& lane, int how) {
  epoll_event event{};
  event.data.u64 = epoll_key(link_->id, lane.number);
  event.events = lane.interest;
  if (::epoll_ctl(io_->epoll_fd, how, lane.fd.get(), &event) != 0)
    fail(Error{ErrorCode::kIo, text("epoll_ctl: errno ", errno)});
}

// Who the peer is, as soon as it has proved the key.
Status Connection::greet() {
  KVCORE_ASSIGN_OR_RETURN(peer_, parse_link_hello(lanes_[0].auth->peer_hello()));
  KVCORE_RETURN_IF_ERROR(check_models(io_->shared.options.model_digest, peer_.model));
  if (!initiator_) KVCORE_RETURN_IF_ERROR(io_->shared.room_for_link());
  if (peer_.keepalive_ns != 0) peer_.keepalive_ns = std::max(peer_.keepalive_ns, kLeastKeepaliveNs);
  const std::lock_guard lock(io_->shared.mu);
  link_->peer = peer_;
  link_->proven = true;
  return {};
}

void Connection::on_established(std::int64_t now) {
  if (const Status status = greet(); !status) return fail(status);
  last_rx_ns_ = now;
  state_ = State::kUp;
  num_lanes_ = std::min<std::size_t>(own_lanes(), peer_.lanes);
  if (num_lanes_ > 1) {
    lanes_deadline_ns_ = now + io_->shared.options.handshake_ns;
    if (initiator_)
      dial_lanes();
    else
      sessions_->add(lanes_[0].auth->session_id(), this);
  }
  link_->up = was_up_ = true;
  credits_.open(peer_.window);
  io_->shared.events.push(Up{link_->id, !initiator_});
  if (!shm()) return;
  watch_process();
  for (const auto& [id, view] : io_->shared.grants.regions()) announce_region(id, view);
}

// The initiator's part, once the peer is known: to where the first connection went.
void Connection::dial_lanes() {
  dial_at_ns_ = 0;
  for (std::uint32_t n = 1; n < num_lanes_ && !dead(); ++n) {
    if (lanes_[n].state != Lane::State::kNone) continue;
    if (io_->dials >= kMostDials) {
      dial_at_ns_ = now_ns() + kDialAgainNs;
      return;
    }
    lanes_[n].dial.emplace(io_);
    auto fd = open_connection_like(lanes_[0].fd.get());
    if (!fd) return fail(fd.error());
    open_lane(lanes_[n], std::move(*fd), make_join_hello(*lanes_[0].auth, n));
  }
}

// The owner had not taken this lane yet: among its strangers, newer ones may have had its place.
// Nothing but the handshake went over it, so another may follow until lanes_deadline_ns_.
bool Connection::dial_again(Lane& lane, std::int64_t now) {
  if (!initiator_ || lane.number == 0 || lane.state == Lane::State::kUp || state_ != State::kUp)
    return false;
  const std::uint32_t number = lane.number;
  lane = Lane();  // and with the socket what epoll knows of it
  lane.number = number;
  dial_at_ns_ = now + kDialAgainNs;
  return true;
}

// An accepted connection has proved the key: a new link, or a lane of one that is up.
void Connection::on_accepted(std::int64_t now) {
  const auto join = parse_join_hello(lanes_[0].auth->peer_hello());
  if (!join) return on_established(now);
  Connection* link = sessions_->find(join->session);
  const Error refused{ErrorCode::kUnauthenticated, "a lane of a session that is not here"};
  if (link == nullptr || !link->awaits(*join)) return fail(refused);
  Lane lane = std::exchange(lanes_[0], Lane{});
  fail(Error{ErrorCode::kCancelled, "it became a lane of another link"});
  link->adopt(join->lane, std::move(lane), now);
}

bool Connection::awaits(const JoinHello& join) const {
  return !dead() && join.lane > 0 && join.lane < num_lanes_ &&
         lanes_[join.lane].state == Lane::State::kNone &&
         join.token == lanes_[0].auth->token(join.lane);
}

void Connection::adopt(std::uint32_t number, Lane lane, std::int64_t now) {
  Lane& own = lanes_[number];
  own = std::move(lane);
  own.number = number;
  set_tcp_options(own.fd.get(), number);
  watch(own, EPOLL_CTL_MOD);
  on_lane_up(own, now);
  control(own, FrameType::kPing);  // it has joined: the peer may use it now
  parse(own);
}

void Connection::on_lane_up(Lane& lane, std::int64_t now) {
  lane.state = Lane::State::kUp;
  lane.dial.reset();
  last_rx_ns_ = now;
  const auto last = lanes_.begin() + static_cast<std::ptrdiff_t>(num_lanes_);
  if (std::all_of(lanes_.begin(), last, [](const Lane& l) { return l.state == Lane::State::kUp; }))
    lanes_deadline_ns_ = 0;
}

void Connection::update_interest(Lane& lane) {
  if (!lane.fd) return;
  std::uint32_t wanted = EPOLLIN | (lane.hung_up ? 0U : EPOLLRDHUP);
  if (lane.state == Lane::State::kConnecting || lane.outbox.blocked()) wanted |= EPOLLOUT;
  if (wanted == lane.interest) return;
  lane.interest = wanted;
  watch(lane, EPOLL_CTL_MOD);
}

void Connection::on_event(std::uint32_t source, std::uint32_t events, std::int64_t now) {
  if (dead()) return;
  if (source == kProcessSource) return on_process_ended(now);
  if (source >= lanes_.size() || !lanes_[source].fd) return;
  Lane& lane = lanes_[source];
  if (lane.state == Lane::State::kConnecting && (events & (EPOLLOUT | EPOLLERR | EPOLLHUP)) != 0) {
    int error = 0;
    socklen_t size = sizeof error;
    ::getsockopt(lane.fd.get(), SOL_SOCKET, SO_ERROR, &error, &size);
    if (error != 0 && dial_again(lane, now)) return;
    if (error != 0)
      return fail(Error{ErrorCode::kPeerDead,
                        text("connect ", link_->peer_address, ": ", std::strerror(error))});
    lane.state = Lane::State::kHandshake;
    if (!shm()) set_tcp_options(lane.fd.get(), lane.number);  // now both addresses are known
    if (lane.number == 0) state_ = State::kHandshake;
    lane.outbox.push_raw(lane.auth->start());
  }
  if ((events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0) lane.hung_up = true;
  if ((events & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0) receive(lane, now);
}

// A child that inherited the socket keeps it open; the peer is dead all the same.
void Connection::watch_process() {
  if (!link_->process) return;
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = epoll_key(link_->id, kProcessSource);
  if (::epoll_ctl(io_->epoll_fd, EPOLL_CTL_ADD, link_->process->fd(), &event) != 0)
    fail(Error{ErrorCode::kIo, text("epoll_ctl of the peer's process: errno ", errno)});
}

void Connection::on_process_ended(std::int64_t now) {
  while (!dead() && receive_some(lanes_[0], now)) {  // what it said before, a goodbye perhaps
  }
  fail(Error{ErrorCode::kPeerDead, "the peer's process has ended"});
}

void Connection::say_bye() {
  ByeHead head{0};
  for (std::size_t n = 1; n < num_lanes_; ++n) {
    if (lanes_[n].state != Lane::State::kUp) continue;
    head.lanes |= std::uint64_t{1} << n;
    lanes_[n].bye_sent = true;
    control(lanes_[n], FrameType::kBye);
  }
  lanes_[0].bye_sent = true;
  control(lanes_[0], FrameType::kBye, make_body(head));
}

// The link ends when all lanes that were named have said it: nothing of them is lost.
void Connection::on_bye(Lane& lane, Bytes body) {
  lane.bye_received = true;
  if (lane.number == 0) {
    const auto head = parse_head<ByeHead>(body);
    if (!head) return fail(head.error());
    byes_due_ = head->lanes;
    bye_deadline_ns_ = now_ns() + io_->shared.options.handshake_ns;
  }
  if (!lanes_[0].bye_received) return;
  for (const Lane& l : lanes_)
    if (l.number > 0 && (byes_due_ >> l.number & 1) != 0 && !l.bye_received) return;
  fail({});
}

// The peer has closed this socket after its bye; others still have something to say.
void Connection::end_lane(Lane& lane) {
  lane.fd.reset();  // and with it what epoll knows of it
  lane.state = Lane::State::kNone;
}

}  // namespace kvcore::transport
