#include "transport/socket/socket_transport.h"

#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <cerrno>

#include "base/text.h"

namespace kvcore::transport {
namespace {

class SocketLink final : public Link {
 public:
  SocketLink(std::shared_ptr<Shared> shared, std::shared_ptr<LinkState> state)
      : shared_(std::move(shared)), state_(std::move(state)) {}

  LinkId id() const noexcept override { return state_->id; }

  Status send(std::span<const std::byte> message, Priority priority) override {
    if (message.size() > kMaxMessageBytes)
      return invalid_argument(
          text("message of ", message.size(), " bytes, at most ", kMaxMessageBytes));
    const std::uint64_t n = message.size();
    if (state_->queued_message_bytes.fetch_add(n) + n > shared_->options.max_queued_bytes) {
      state_->queued_message_bytes -= n;
      return Error{ErrorCode::kTransport, text("the peer does not keep up: max_queued_bytes=",
                                               shared_->options.max_queued_bytes, " reached")};
    }
    const Status status =
        post(SendCommand{priority, std::vector<std::byte>(message.begin(), message.end())});
    if (status.ok())
      state_->messages_out += 1;
    else
      state_->queued_message_bytes -= n;
    return status;
  }

  Result<OpId> write(RegionId local, std::span<const Segment> segments, GrantRef grant,
                     std::uint64_t tag, const OpOptions& options) override {
    return post_op(false, local, segments, grant, tag, options);
  }
  Result<OpId> read(RegionId local, std::span<const Segment> segments, GrantRef grant,
                    const OpOptions& options) override {
    return post_op(true, local, segments, grant, 0, options);
  }
  void cancel(OpId op) override { (void)post(CancelCommand{static_cast<std::uint64_t>(op)}).ok(); }
  void set_pacing(std::uint64_t bytes_per_second) override {
    (void)post(PaceCommand{bytes_per_second}).ok();
  }
  void close() override { (void)post(CloseCommand{}).ok(); }

  LinkInfo info() const override {
    LinkInfo info{};
    info.id = state_->id;
    info.scheme = state_->shm ? "shm" : "tcp";
    info.peer_address = state_->peer_address;
    info.up = state_->up;
    info.bytes_out = state_->bytes_out;
    info.bytes_in = state_->bytes_in;
    info.messages_out = state_->messages_out;
    info.messages_in = state_->messages_in;
    info.outstanding_ops = state_->outstanding;
    info.queued_bytes = state_->queued_bytes;
    const std::lock_guard lock(shared_->mu);
    info.peer_identity = state_->peer_identity;
    info.peer_pid = state_->peer_pid;
    return info;
  }

 private:
  template <class What>
  Status post(What what) {
    return shared_->post(state_.get(), Command{state_->id, std::move(what)});
  }

  Result<OpId> post_op(bool is_read, RegionId local, std::span<const Segment> segments,
                       GrantRef grant, std::uint64_t tag, const OpOptions& options) {
    const std::uint32_t limit = shared_->options.max_outstanding_ops;
    KVCORE_ASSIGN_OR_RETURN(const RegionView view, shared_->grants.pin(local, segments));
    if (state_->outstanding.fetch_add(1) >= limit) {
      state_->outstanding -= 1;
      shared_->grants.unpin(local);
      return Error{ErrorCode::kTransport, text("max_outstanding_ops=", limit, " reached")};
    }
    auto op = std::make_unique<Op>();
    op->id = state_->next_op++;
    op->is_read = is_read;
    op->region = local;
    op->base = view.base;
    op->has_memfd = view.fd >= 0;
    op->segments.assign(segments.begin(), segments.end());
    op->grant = grant;
    op->tag = tag;
    op->options = options;
    for (const Segment& s : segments) op->bytes += s.bytes;
    const OpId id{op->id};
    const std::uint64_t queued = is_read ? 0 : op->bytes;
    state_->queued_bytes += queued;
    if (Status status = post(std::move(op)); !status.ok()) {
      state_->queued_bytes -= queued;
      state_->outstanding -= 1;
      shared_->grants.unpin(local);
      return status.error();
    }
    return id;
  }

  std::shared_ptr<Shared> shared_;
  std::shared_ptr<LinkState> state_;
};

}  // namespace

SocketTransport::SocketTransport(std::shared_ptr<Shared> shared, std::unique_ptr<IoLoop> loop)
    : shared_(std::move(shared)), loop_(std::move(loop)), thread_([this] {
        ::pthread_setname_np(::pthread_self(), "kvcore-link");
        loop_->run();
      }) {}

Result<RegionId> SocketTransport::register_region(std::byte* base, std::uint64_t bytes, int memfd) {
  KVCORE_ASSIGN_OR_RETURN(const RegionId id, shared_->grants.add_region(base, bytes, memfd));
  (void)shared_->post(nullptr, Command{LinkId{}, RegionCommand{id, false}}).ok();
  return id;
}

Status SocketTransport::unregister_region(RegionId region) {
  KVCORE_RETURN_IF_ERROR(shared_->grants.remove_region(region));
  (void)shared_->post(nullptr, Command{LinkId{}, RegionCommand{region, true}}).ok();
  return {};
}

Result<std::string> SocketTransport::listen(std::string_view address) {
  KVCORE_ASSIGN_OR_RETURN(Address parsed, parse_address(address));
  if (shared_->options.key.empty() && !is_loopback(parsed))
    return invalid_argument(text("address=", address, " is not a loopback address: a 32-byte key ",
                                 "is needed to listen there"));
  KVCORE_ASSIGN_OR_RETURN(UniqueFd fd, open_listener(&parsed));
  KVCORE_RETURN_IF_ERROR(shared_->post(
      nullptr, Command{LinkId{}, ListenCommand{std::move(fd), parsed.shm, parsed.path}}));
  return parsed.str();
}

Result<std::shared_ptr<Link>> SocketTransport::connect(std::string_view address) {
  KVCORE_ASSIGN_OR_RETURN(const Address parsed, parse_address(address));
  if (shared_->options.key.empty() && !is_loopback(parsed))
    return invalid_argument(
        text("address=", address, " is not a loopback address: a 32-byte key is needed"));
  auto fd = open_connection(parsed);
  Status failed;
  if (!fd) failed = fd.error();
  auto state = std::make_shared<LinkState>();
  state->shm = parsed.shm;
  state->peer_address = parsed.str();
  if (parsed.shm && failed.ok()) {
    auto pid = peer_of_same_user(fd->get());
    if (pid)
      state->peer_pid = *pid;
    else
      failed = pid.error();
  }
  {
    const std::lock_guard lock(shared_->mu);
    if (shared_->stopped) return Error{ErrorCode::kPeerDead, "the transport is closed"};
    if (shared_->links.size() >= shared_->options.max_links)
      return Error{ErrorCode::kTransport,
                   text("max_links=", shared_->options.max_links, " reached")};
    state->id = LinkId{shared_->next_link++};
    shared_->links.emplace(static_cast<std::uint64_t>(state->id), state);
  }
  ConnectCommand command{state, failed.ok() ? std::move(*fd) : UniqueFd(), failed};
  KVCORE_RETURN_IF_ERROR(shared_->post(nullptr, Command{LinkId{}, std::move(command)}));
  return std::shared_ptr<Link>(std::make_shared<SocketLink>(shared_, std::move(state)));
}

std::shared_ptr<Link> SocketTransport::link(LinkId id) const {
  const std::lock_guard lock(shared_->mu);
  const auto it = shared_->links.find(static_cast<std::uint64_t>(id));
  if (it == shared_->links.end()) return nullptr;
  return std::make_shared<SocketLink>(shared_, it->second);
}

void SocketTransport::close() {
  (void)shared_->post(nullptr, Command{LinkId{}, StopCommand{}}).ok();
  if (thread_.joinable()) thread_.join();
}

Result<std::unique_ptr<Transport>> make_transport(TransportOptions options) {
  if (!options.key.empty() && options.key.size() != AuthSession::kKeyBytes)
    return invalid_argument(text("key has ", options.key.size(), " bytes, must have 0 or 32"));
  if (options.identity.size() > 256)
    return invalid_argument(text("identity has ", options.identity.size(), " bytes, at most 256"));
  if (options.handshake_ns <= 0 || options.keepalive_ns < 0)
    return invalid_argument(text("handshake_ns=", options.handshake_ns,
                                 " must be above 0, keepalive_ns=", options.keepalive_ns,
                                 " must be 0 or more"));
  auto shared = std::make_shared<Shared>(std::move(options));
  shared->wake_fd = UniqueFd(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  UniqueFd epoll_fd(::epoll_create1(EPOLL_CLOEXEC));
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = 0;
  if (!shared->wake_fd || !epoll_fd || shared->events.fd() < 0 ||
      ::epoll_ctl(epoll_fd.get(), EPOLL_CTL_ADD, shared->wake_fd.get(), &event) != 0)
    return Error{ErrorCode::kIo, text("epoll or eventfd: errno ", errno)};
  shared->events.set_on_drained([raw = shared.get()] { raw->wake(); });
  auto loop = std::make_unique<IoLoop>(shared, std::move(epoll_fd));
  return std::unique_ptr<Transport>(
      std::make_unique<SocketTransport>(std::move(shared), std::move(loop)));
}

}  // namespace kvcore::transport
