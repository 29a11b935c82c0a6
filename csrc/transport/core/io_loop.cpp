#include "transport/core/io_loop.h"

#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <limits>
#include <span>

#include "base/text.h"

namespace kvcore::transport {
namespace {

constexpr std::uint64_t kListenerBit = std::uint64_t{1} << 63;
constexpr std::size_t kScratchBytes = 256UL * 1024;
constexpr int kAcceptsPerRound = 16;  // then those accepted have their turn

// Where a connection comes from, without its port.
std::string source_of(const std::string& peer_address) {
  return peer_address.substr(0, peer_address.rfind(':'));
}

}  // namespace

IoLoop::IoLoop(std::shared_ptr<Shared> shared, UniqueFd epoll_fd)
    : shared_(std::move(shared)),
      epoll_fd_(std::move(epoll_fd)),
      io_{*shared_, epoll_fd_.get(), std::vector<std::byte>(kScratchBytes)} {}

IoLoop::~IoLoop() = default;

int IoLoop::wait_ms(std::int64_t now) const {
  std::int64_t next = std::numeric_limits<std::int64_t>::max();
  for (const auto& [id, channel] : channels_) {
    if (channel->busy()) return 0;
    next = std::min(next, channel->next_timer_ns());
  }
  for (const auto& [key, listener] : listeners_)
    if (listener.resume_ns != 0) next = std::min(next, listener.resume_ns);
  for (const auto& [id, look_up] : look_ups_) next = std::min(next, look_up.deadline_ns);
  next = std::min(next, shared_->leases.next_timer_ns(now));
  if (next == std::numeric_limits<std::int64_t>::max()) return -1;
  return static_cast<int>(std::clamp<std::int64_t>((next - now + 999'999) / 1'000'000, 0, 60'000));
}

void IoLoop::run() {
  std::vector<epoll_event> ready(64);
  while (!stopping_ || !channels_.empty()) {
    const int n = ::epoll_wait(epoll_fd_.get(), ready.data(), static_cast<int>(ready.size()),
                               wait_ms(shared_->now_ns()));
    const std::int64_t now = shared_->now_ns();
    const std::span<const epoll_event> fresh(ready.data(),
                                             static_cast<std::size_t>(std::max(n, 0)));
    // What comes in by a channel's first descriptor goes before everything of lower classes.
    for (const epoll_event& e : fresh)
      if (e.data.u64 % (1U << kSourceBits) == 0) on_event(e, now);
    for (const epoll_event& e : fresh)
      if (e.data.u64 % (1U << kSourceBits) != 0) on_event(e, now);
    resume_listeners(now);
    take_commands(now);
    end_late_look_ups(now);
    for (auto& [id, channel] : channels_) channel->work(now);
    for (auto& [id, channel] : channels_) channel->work_bulk(now);
    reap();
    shared_->leases.work(now);
  }
  shared_->leases.close();
}

void IoLoop::on_event(const epoll_event& event, std::int64_t now) {
  const std::uint64_t key = event.data.u64;
  if (key == 0) {
    std::uint64_t count = 0;
    [[maybe_unused]] const auto r = ::read(shared_->wake_fd.get(), &count, sizeof count);
  } else if (const auto l = listeners_.find(key); l != listeners_.end()) {
    accept_some(key, &l->second, now);
  } else if (const auto c = channels_.find(key >> kSourceBits); c != channels_.end()) {
    c->second->on_event(static_cast<std::uint32_t>(key % (1U << kSourceBits)), event.events, now);
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
    connect(std::move(*c), now);
  } else if (auto* look_up = std::get_if<LookUpCommand>(&command.what)) {
    const auto id = static_cast<std::uint64_t>(look_up->state->id);
    look_ups_.emplace(
        id,
        LookUp{
            std::move(look_up->state), look_up->scheme, now + shared_->options.handshake_ns, {}});
  } else if (const auto* found = std::get_if<LookedUpCommand>(&command.what)) {
    looked_up(static_cast<std::uint64_t>(command.link), found->address, now);
  } else if (auto* l = std::get_if<ListenCommand>(&command.what)) {
    listen(std::move(*l));
  } else if (const auto* r = std::get_if<RegionCommand>(&command.what)) {
    for (auto& [id, channel] : channels_) channel->region_changed(r->region, r->gone);
  } else if (std::holds_alternative<StopCommand>(command.what)) {
    stop(now);
  } else {
    command_link(std::move(command), now);
  }
}

void IoLoop::connect(ConnectCommand command, std::int64_t now) {
  const auto id = static_cast<std::uint64_t>(command.state->id);
  add(command.scheme, std::move(command.state), std::move(command.dialled.fd), true, now);
  // No socket: the link is announced down like any other.
  if (!command.dialled.failed.ok()) channels_.at(id)->fail(command.dialled.failed);
}

// The number behind a host name, or why there is none: the link begins, and what waited for it.
void IoLoop::looked_up(std::uint64_t id, const Result<std::string>& address, std::int64_t now) {
  auto node = look_ups_.extract(id);
  if (!node) return;  // too late
  LookUp& look_up = node.mapped();
  Dialled dialled;
  if (!address) {
    dialled.failed = address.error();
  } else if (auto made = look_up.scheme->dial(*address)) {
    dialled = std::move(*made);
  } else {
    dialled.failed = made.error();
  }
  connect({look_up.state, look_up.scheme, std::move(dialled)}, now);
  for (Command& command : look_up.waiting) command_link(std::move(command), now);
}

void IoLoop::end_late_look_ups(std::int64_t now) {
  while (true) {
    const auto late = std::ranges::find_if(
        look_ups_, [&](const auto& l) { return stopping_ || l.second.deadline_ns <= now; });
    if (late == look_ups_.end()) return;
    const std::string peer = late->second.state->peer_address;
    looked_up(late->first,
              stopping_ ? Error{ErrorCode::kCancelled, "closed by this side"}
                        : Error{ErrorCode::kPeerDead,
                                text("the host of ", peer, " was not looked up in time")},
              now);
  }
}

void IoLoop::command_link(Command command, std::int64_t now) {
  if (const auto waiting = look_ups_.find(static_cast<std::uint64_t>(command.link));
      waiting != look_ups_.end())
    return waiting->second.waiting.push_back(std::move(command));
  const auto it = channels_.find(static_cast<std::uint64_t>(command.link));
  if (it == channels_.end()) return;  // cannot be: a link that is gone takes no commands
  Channel& channel = *it->second;
  if (auto* send = std::get_if<SendCommand>(&command.what)) {
    channel.send(std::move(*send));
  } else if (auto* op = std::get_if<std::unique_ptr<Op>>(&command.what)) {
    channel.start(std::move(*op));
  } else if (const auto* cancel = std::get_if<CancelCommand>(&command.what)) {
    channel.give_up(cancel->op, Error{ErrorCode::kCancelled, "cancelled by this side"});
  } else if (const auto* back = std::get_if<GiveBackCommand>(&command.what)) {
    channel.give_back(back->lease);
  } else if (const auto* pace = std::get_if<PaceCommand>(&command.what)) {
    channel.set_rate(pace->bytes_per_s, now);
  } else if (std::holds_alternative<CloseCommand>(command.what)) {
    channel.begin_close(now);
  }
}

void IoLoop::listen(ListenCommand command) {
  const std::uint64_t key = kListenerBit | (next_listener_++ << kSourceBits);
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = key;
  ::epoll_ctl(epoll_fd_.get(), EPOLL_CTL_ADD, command.listening.fd.get(), &event);
  listeners_.emplace(key, Listener{command.scheme, std::move(command.listening)});
}

void IoLoop::add(Scheme* scheme, std::shared_ptr<LinkState> state, UniqueFd fd, bool initiator,
                 std::int64_t now) {
  const auto id = static_cast<std::uint64_t>(state->id);
  channels_.emplace(id, scheme->channel(&io_, std::move(state), std::move(fd), initiator, now));
}

void IoLoop::accept_some(std::uint64_t key, Listener* listener, std::int64_t now) {
  for (int i = 0; i < kAcceptsPerRound; ++i) {
    UniqueFd fd(
        ::accept4(listener->listening.fd.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (fd) {
      if (auto status = admit(std::move(fd), listener->scheme, now); !status)
        continue;  // closed, no state
    } else if (errno == EAGAIN) {
      return;
    } else if (errno != EINTR && errno != ECONNABORTED) {
      return out_of_descriptors(key, listener, now);
    }
  }
}

// EMFILE, ENFILE, ENOBUFS, ENOMEM: the connection stays in the queue and keeps the listener ready.
void IoLoop::out_of_descriptors(std::uint64_t key, Listener* listener, std::int64_t now) {
  forget_former_strangers();
  if (drop_stranger(nullptr)) return;  // its descriptor is for the next round
  epoll_event event{};
  event.data.u64 = key;
  ::epoll_ctl(epoll_fd_.get(), EPOLL_CTL_MOD, listener->listening.fd.get(), &event);
  listener->resume_ns = now + kAcceptPauseNs;
}

void IoLoop::resume_listeners(std::int64_t now) {
  for (auto& [key, listener] : listeners_) {
    if (listener.resume_ns == 0 || listener.resume_ns > now) continue;
    listener.resume_ns = 0;
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.u64 = key;
    ::epoll_ctl(epoll_fd_.get(), EPOLL_CTL_MOD, listener.listening.fd.get(), &event);
  }
}

Status IoLoop::admit(UniqueFd fd, Scheme* scheme, std::int64_t now) {
  forget_former_strangers();
  const auto alive = static_cast<std::size_t>(
      std::ranges::count_if(channels_, [](const auto& c) { return !c.second->dead(); }));
  const bool lanes_due = std::ranges::any_of(
      channels_, [](const auto& c) { return !c.second->dead() && c.second->awaits_lanes(); });
  if (alive - strangers_.size() >= shared_->options.max_links && !lanes_due)
    return Error{ErrorCode::kTransport, text("max_links=", shared_->options.max_links, " reached")};
  KVCORE_ASSIGN_OR_RETURN(Dialled peer, scheme->accepted(std::move(fd)));
  const std::string source = source_of(peer.peer_address);
  make_room(source);
  auto state = std::make_shared<LinkState>();
  state->scheme = scheme->name();
  state->peer_pid = peer.peer_pid;
  state->process = std::move(peer.process);
  state->lends = scheme->lends();
  state->peer_address = peer.peer_address;
  state->proven = false;
  {
    const std::lock_guard lock(shared_->mu);
    state->id = LinkId{shared_->next_link++};
    shared_->links.emplace(static_cast<std::uint64_t>(state->id), state);
  }
  strangers_.emplace(static_cast<std::uint64_t>(state->id), source);
  add(scheme, std::move(state), std::move(peer.fd), false, now);
  return {};
}

void IoLoop::forget_former_strangers() {
  std::erase_if(strangers_, [&](const auto& s) {
    const auto it = channels_.find(s.first);
    return it == channels_.end() || it->second->dead() || it->second->link().up;
  });
}

void IoLoop::make_room(const std::string& source) {
  std::map<std::string, std::size_t> counts;
  for (const auto& [id, from] : strangers_) ++counts[from];
  if (counts[source] >= kMaxStrangersPerSource) {
    drop_stranger(&source);
  } else if (strangers_.size() >= kMaxStrangers) {
    drop_stranger(
        &std::ranges::max_element(counts, {}, [](const auto& c) { return c.second; })->first);
  }
}

bool IoLoop::drop_stranger(const std::string* source) {
  const auto it = std::ranges::find_if(
      strangers_, [&](const auto& s) { return source == nullptr || s.second == *source; });
  if (it == strangers_.end()) return false;
  channels_.at(it->first)->fail(
      Error{ErrorCode::kTransport, "newer connections took the place of one without a handshake"});
  strangers_.erase(it);
  return true;
}

// Takes the dead out: no command is accepted any more, those still queued are ended, then Down.
void IoLoop::reap() {
  for (auto it = channels_.begin(); it != channels_.end();) {
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
    it = channels_.erase(it);
  }
}

void IoLoop::stop(std::int64_t now) {
  stopping_ = true;
  for (auto& [key, listener] : listeners_)
    if (!listener.listening.path.empty()) ::unlink(listener.listening.path.c_str());
  listeners_.clear();
  for (auto& [id, channel] : channels_) channel->begin_close(now);
}

}  // namespace kvcore::transport
