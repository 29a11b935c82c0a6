#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <limits>

#include "base/text.h"
#include "transport/socket/socket_transport.h"

namespace kvcore::transport {
namespace {

constexpr std::uint64_t kListenerBit = std::uint64_t{1} << 63;
constexpr std::size_t kScratchBytes = 256UL * 1024;
constexpr std::size_t kMaxUnproven = 64;  // accepted connections without a finished handshake
constexpr std::string_view kLabel = "kvcore-link-1";

}  // namespace

IoLoop::IoLoop(std::shared_ptr<Shared> shared, UniqueFd epoll_fd)
    : shared_(std::move(shared)),
      epoll_fd_(std::move(epoll_fd)),
      io_{*shared_, epoll_fd_.get(), std::vector<std::byte>(kScratchBytes)} {}

IoLoop::~IoLoop() = default;

int IoLoop::wait_ms(std::int64_t now) const {
  std::int64_t next = std::numeric_limits<std::int64_t>::max();
  for (const auto& [id, connection] : connections_) {
    if (connection->busy()) return 0;
    next = std::min(next, connection->next_timer_ns());
  }
  if (next == std::numeric_limits<std::int64_t>::max()) return -1;
  return static_cast<int>(std::clamp<std::int64_t>((next - now + 999'999) / 1'000'000, 0, 60'000));
}

void IoLoop::run() {
  std::vector<epoll_event> ready(64);
  while (!stopping_ || !connections_.empty()) {
    const int n = ::epoll_wait(epoll_fd_.get(), ready.data(), static_cast<int>(ready.size()),
                               wait_ms(now_ns()));
    const std::int64_t now = now_ns();
    for (int i = 0; i < n; ++i) {
      const std::uint64_t key = ready[static_cast<std::size_t>(i)].data.u64;
      if (key == 0) {
        std::uint64_t count = 0;
        [[maybe_unused]] const auto r = ::read(shared_->wake_fd.get(), &count, sizeof count);
      } else if (const auto l = listeners_.find(key); l != listeners_.end()) {
        accept_all(l->second, now);
      } else if (const auto c = connections_.find(key); c != connections_.end()) {
        c->second->on_event(ready[static_cast<std::size_t>(i)].events, now);
      }
    }
    take_commands(now);
    for (auto& [id, connection] : connections_) connection->work(now);
    reap();
  }
}

void IoLoop::take_commands(std::int64_t now) {
  std::vector<Command> commands;
  {
    const std::lock_guard lock(shared_->mu);
    commands.swap(shared_->commands);
  }
  for (Command& command : commands) execute(std::move(command), now);
}

void IoLoop::execute(Command command, std::int64_t now) {
  if (auto* c = std::get_if<ConnectCommand>(&command.what)) {
    if (c->failed.ok()) return add(std::move(c->state), std::move(c->fd), true, now);
    // No socket: the link is announced down like any other.
    add(c->state, UniqueFd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)), true, now);
    const auto it = connections_.find(static_cast<std::uint64_t>(c->state->id));
    if (it != connections_.end()) it->second->fail(c->failed);
    return;
  }
  if (auto* c = std::get_if<ListenCommand>(&command.what)) {
    const std::uint64_t key = kListenerBit | next_listener_++;
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.u64 = key;
    ::epoll_ctl(epoll_fd_.get(), EPOLL_CTL_ADD, c->fd.get(), &event);
    listeners_.emplace(key, Listener{std::move(c->fd), c->shm, std::move(c->path)});
    return;
  }
  if (const auto* c = std::get_if<RegionCommand>(&command.what)) {
    for (auto& [id, connection] : connections_) connection->region_changed(c->region, c->gone);
    return;
  }
  if (std::holds_alternative<StopCommand>(command.what)) return stop(now);

  const auto it = connections_.find(static_cast<std::uint64_t>(command.link));
  if (it == connections_.end()) return;  // cannot be: a link that is gone takes no commands
  Connection& connection = *it->second;
  if (auto* c = std::get_if<SendCommand>(&command.what)) {
    connection.send(std::move(*c));
  } else if (auto* op = std::get_if<std::unique_ptr<Op>>(&command.what)) {
    connection.start(std::move(*op));
  } else if (const auto* cancel = std::get_if<CancelCommand>(&command.what)) {
    connection.give_up(cancel->op, Error{ErrorCode::kCancelled, "cancelled by this side"});
  } else if (const auto* pace = std::get_if<PaceCommand>(&command.what)) {
    connection.set_rate(pace->bytes_per_s, now);
  } else if (std::holds_alternative<CloseCommand>(command.what)) {
    connection.begin_close(now);
  }
}

void IoLoop::add(std::shared_ptr<LinkState> state, UniqueFd fd, bool initiator, std::int64_t now) {
  const TransportOptions& options = shared_->options;
  auto auth =
      AuthSession::make(initiator ? AuthSession::Side::kInitiator : AuthSession::Side::kResponder,
                        std::as_bytes(std::span(options.key)), kLabel, make_link_hello(options));
  if (!auth) return;  // key and identity were checked when the transport was made
  const auto id = static_cast<std::uint64_t>(state->id);
  connections_.emplace(id, std::make_unique<Connection>(&io_, std::move(state), std::move(fd),
                                                        std::move(*auth), initiator, now));
}

void IoLoop::accept_all(const Listener& listener, std::int64_t now) {
  for (;;) {
    sockaddr_storage peer{};
    socklen_t size = sizeof peer;
    UniqueFd fd(::accept4(listener.fd.get(), reinterpret_cast<sockaddr*>(&peer), &size,
                          SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!fd) return;
    if (auto status = admit(std::move(fd), listener.shm, now); !status)
      continue;  // closed, no state
  }
}

Status IoLoop::admit(UniqueFd fd, bool shm, std::int64_t now) {
  const auto unproven = std::ranges::count_if(
      connections_, [](const auto& c) { return !c.second->link().up && !c.second->initiator(); });
  if (connections_.size() >= shared_->options.max_links ||
      static_cast<std::size_t>(unproven) >= kMaxUnproven)
    return Error{ErrorCode::kTransport, "too many connections"};
  auto state = std::make_shared<LinkState>();
  state->shm = shm;
  if (shm) {
    KVCORE_ASSIGN_OR_RETURN(state->peer_pid, peer_of_same_user(fd.get()));
    state->peer_address = text("shm: pid ", state->peer_pid);
  } else {
    set_tcp_options(fd.get());
    state->peer_address = peer_name(fd.get());
  }
  {
    const std::lock_guard lock(shared_->mu);
    state->id = LinkId{shared_->next_link++};
    shared_->links.emplace(static_cast<std::uint64_t>(state->id), state);
  }
  add(std::move(state), std::move(fd), false, now);
  return {};
}

// Takes the dead out: no command is accepted any more, those still queued are ended, then Down.
void IoLoop::reap() {
  for (auto it = connections_.begin(); it != connections_.end();) {
    if (!it->second->dead()) {
      ++it;
      continue;
    }
    std::vector<Command> orphans;
    {
      const std::lock_guard lock(shared_->mu);
      const auto link = shared_->links.find(it->first);
      if (link != shared_->links.end()) {
        link->second->closed = true;
        shared_->links.erase(link);
      }
      for (Command& command : shared_->commands)
        if (static_cast<std::uint64_t>(command.link) == it->first)
          orphans.push_back(std::move(command));
      std::erase_if(shared_->commands, [&](const Command& command) {
        return static_cast<std::uint64_t>(command.link) == it->first;
      });
    }
    it->second->finish(std::move(orphans));
    it = connections_.erase(it);
  }
}

void IoLoop::stop(std::int64_t now) {
  stopping_ = true;
  for (auto& [key, listener] : listeners_)
    if (listener.shm) ::unlink(listener.path.c_str());
  listeners_.clear();
  for (auto& [id, connection] : connections_) connection->begin_close(now);
}

}  // namespace kvcore::transport
