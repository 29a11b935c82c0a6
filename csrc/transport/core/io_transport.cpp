#include "transport/core/io_transport.h"

#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <cerrno>

#include "base/text.h"
#include "transport/core/hello.h"

namespace kvcore::transport {
namespace {

// The caller's handle of a link: checks, counts, and a command for the I/O thread.
class IoLink final : public Link {
 public:
  IoLink(std::shared_ptr<Shared> shared, std::shared_ptr<LinkState> state)
      : shared_(std::move(shared)), state_(std::move(state)) {}

  LinkId id() const noexcept override { return state_->id; }

  Result<OpId> send(std::span<const std::byte> message, const SendOptions& options) override {
    if (message.size() > kMaxMessageBytes)
      return invalid_argument(
          text("message of ", message.size(), " bytes, at most ", kMaxMessageBytes));
    const bool tracked = options.completion || options.deadline_ns != 0;
    if (tracked) KVCORE_RETURN_IF_ERROR(take_slot());
    const std::uint64_t id = state_->next_op++;
    if (Status status =
            queue(SendCommand{tracked ? id : 0, options, {message.begin(), message.end()}});
        !status) {
      if (tracked) state_->outstanding -= 1;
      return status.error();
    }
    state_->messages_out += 1;
    return OpId{id};
  }

  Result<OpId> write(RegionId local, std::span<const Segment> segments, GrantRef grant,
                     std::uint64_t tag, const OpOptions& options) override {
    return post_op(false, local, segments, grant, tag, options);
  }
  Result<OpId> read(RegionId local, std::span<const Segment> segments, GrantRef grant,
                    const OpOptions& options) override {
    return post_op(true, local, segments, grant, 0, options);
  }
  Result<OpId> borrow(GrantRef grant, std::span<const Range> ranges,
                      std::int64_t deadline_ns) override {
    if (!state_->lends)
      return Error{ErrorCode::kUnsupported,
                   text(state_->scheme, " links cannot lend: only shm and loopback can")};
    KVCORE_ASSIGN_OR_RETURN(auto segments, segments_to_borrow(ranges));
    KVCORE_RETURN_IF_ERROR(take_slot());
    auto op = std::make_unique<Op>();
    op->id = state_->next_op++;
    op->is_read = op->borrows = true;
    op->segments = std::move(segments);
    op->grant = grant;
    op->options.deadline_ns = deadline_ns;
    const OpId id{op->id};
    if (Status status = post(std::move(op)); !status.ok()) {
      state_->outstanding -= 1;
      return status.error();
    }
    return id;
  }
  void give_back(LeaseId lease) override {
    (void)post(GiveBackCommand{static_cast<std::uint64_t>(lease)}).ok();
  }
  void cancel(OpId op) override { (void)post(CancelCommand{static_cast<std::uint64_t>(op)}).ok(); }
  void set_pacing(std::uint64_t bytes_per_second) override {
    (void)post(PaceCommand{bytes_per_second}).ok();
  }
  void close() override { (void)post(CloseCommand{}).ok(); }

  LinkInfo info() const override {
    LinkInfo info{};
    info.id = state_->id;
    info.scheme = state_->scheme;
    info.peer_address = state_->peer_address;
    info.up = state_->up;
    info.bytes_out = state_->bytes_out;
    info.bytes_in = state_->bytes_in;
    info.messages_out = state_->messages_out;
    info.messages_in = state_->messages_in;
    info.outstanding_ops = state_->outstanding;
    info.queued_bytes = state_->queued_bytes;
    info.credit_bytes = state_->credit_bytes;
    info.credit_stall_ns = state_->credit_stall_ns;
    if (const std::int64_t since = state_->stalled_since_ns; since != 0)
      info.credit_stall_ns += static_cast<std::uint64_t>(shared_->now_ns() - since);
    const std::lock_guard lock(shared_->mu);
    info.peer_identity = state_->peer.identity;
    info.peer_role = state_->peer.role;
    info.peer_model = state_->peer.model;
    info.peer_layout = state_->peer.layout;
    info.peer_pid = state_->peer_pid;
    info.rails = state_->rails;
    return info;
  }

 private:
  template <class What>
  Status post(What what) {
    return shared_->post(state_.get(), Command{state_->id, std::move(what)});
  }

  Status queue(SendCommand command) {
    const std::uint64_t n = command.bytes.size();
    Status status;
    if (state_->queued_message_bytes.fetch_add(n) + n > shared_->options.max_queued_bytes)
      status = Error{ErrorCode::kTransport, text("the peer does not keep up: max_queued_bytes=",
                                                 shared_->options.max_queued_bytes, " reached")};
    else
      status = post(std::move(command));
    if (!status) state_->queued_message_bytes -= n;
    return status;
  }

  Status take_slot() {
    const std::uint32_t limit = shared_->options.max_outstanding_ops;
    if (state_->outstanding.fetch_add(1) < limit) return {};
    state_->outstanding -= 1;
    return Error{ErrorCode::kTransport, text("max_outstanding_ops=", limit, " reached")};
  }

  Result<OpId> post_op(bool is_read, RegionId local, std::span<const Segment> segments,
                       GrantRef grant, std::uint64_t tag, const OpOptions& options) {
    KVCORE_ASSIGN_OR_RETURN(const RegionView view, shared_->grants.pin(local, segments));
    if (Status slot = take_slot(); !slot) {
      shared_->grants.unpin(local);
      return slot.error();
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

// On a thread of its own, which nobody waits for: a resolver may take as long as it likes.
void look_up_elsewhere(std::shared_ptr<Shared> shared, LinkId link, Scheme::LookUp look_up,
                       std::string address) {
  struct Job {
    std::shared_ptr<Shared> shared;
    LinkId link;
    Scheme::LookUp look_up;
    std::string address;
  };
  auto job = std::make_unique<Job>(Job{std::move(shared), link, look_up, std::move(address)});
  const auto run = [](void* raw) -> void* {
    const std::unique_ptr<Job> mine(static_cast<Job*>(raw));
    auto found = mine->look_up(std::move(mine->address));
    // Closed meanwhile: nobody wants to know any more.
    (void)mine->shared->post(nullptr, Command{mine->link, LookedUpCommand{std::move(found)}}).ok();
    return nullptr;
  };
  pthread_t thread{};
  if (const int error = ::pthread_create(&thread, nullptr, run, job.get()); error == 0) {
    ::pthread_detach(thread);
    (void)job.release();
  } else {
    const Error failed{ErrorCode::kIo, text("a thread to look up a host: errno ", error)};
    (void)job->shared->post(nullptr, Command{link, LookedUpCommand{failed}}).ok();
  }
}

}  // namespace

IoTransport::IoTransport(std::shared_ptr<Shared> shared, Schemes schemes, UniqueFd epoll_fd)
    : shared_(std::move(shared)),
      schemes_(std::move(schemes)),
      loop_(std::make_unique<IoLoop>(shared_, std::move(epoll_fd))),
      thread_([this] {
        ::pthread_setname_np(::pthread_self(), "kvcore-link");
        loop_->run();
      }) {}

Result<RegionId> IoTransport::register_region(const RegionSpec& spec) {
  KVCORE_ASSIGN_OR_RETURN(const RegionId id, shared_->grants.add_region(spec));
  (void)shared_->post(nullptr, Command{LinkId{}, RegionCommand{id, false}}).ok();
  return id;
}

Status IoTransport::unregister_region(RegionId region) {
  KVCORE_RETURN_IF_ERROR(shared_->grants.remove_region(region));
  (void)shared_->post(nullptr, Command{LinkId{}, RegionCommand{region, true}}).ok();
  return {};
}

Result<Scheme*> IoTransport::scheme_of(std::string_view address) const {
  std::string known;
  for (const auto& scheme : schemes_) {
    if (address.starts_with(scheme->name()) &&
        address.substr(scheme->name().size()).starts_with(':'))
      return scheme.get();
    known += text(known.empty() ? "" : ", ", scheme->name());
  }
  return invalid_argument(text("address=", address, " must be SCHEME:..., SCHEME one of ", known));
}

Result<std::string> IoTransport::listen(std::string_view address) {
  KVCORE_ASSIGN_OR_RETURN(Scheme* const scheme, scheme_of(address));
  KVCORE_ASSIGN_OR_RETURN(Listening listening, scheme->listen(address));
  std::string bound = listening.address;
  KVCORE_RETURN_IF_ERROR(
      shared_->post(nullptr, Command{LinkId{}, ListenCommand{scheme, std::move(listening)}}));
  return bound;
}

Result<std::shared_ptr<Link>> IoTransport::connect(std::string_view address) {
  KVCORE_ASSIGN_OR_RETURN(Scheme* const scheme, scheme_of(address));
  const Scheme::LookUp look_up = scheme->look_up(address);
  Dialled dialled;
  dialled.peer_address = std::string(address);
  if (look_up == nullptr) {
    KVCORE_ASSIGN_OR_RETURN(dialled, scheme->dial(address));
  }
  auto state = std::make_shared<LinkState>();
  state->scheme = scheme->name();
  state->peer_address = dialled.peer_address;
  state->peer_pid = dialled.peer_pid;
  state->process = dialled.process;
  state->lends = scheme->lends();
  {
    const std::lock_guard lock(shared_->mu);
    if (shared_->stopped) return Error{ErrorCode::kPeerDead, "the transport is closed"};
    const auto proven =
        std::ranges::count_if(shared_->links, [](const auto& l) { return l.second->proven; });
    if (static_cast<std::size_t>(proven) >= shared_->options.max_links)
      return Error{ErrorCode::kTransport,
                   text("max_links=", shared_->options.max_links, " reached")};
    state->id = LinkId{shared_->next_link++};
    shared_->links.emplace(static_cast<std::uint64_t>(state->id), state);
  }
  if (look_up != nullptr) {
    KVCORE_RETURN_IF_ERROR(shared_->post(nullptr, Command{LinkId{}, LookUpCommand{state, scheme}}));
    look_up_elsewhere(shared_, state->id, look_up, std::string(address));
  } else {
    KVCORE_RETURN_IF_ERROR(shared_->post(
        nullptr, Command{LinkId{}, ConnectCommand{state, scheme, std::move(dialled)}}));
  }
  return std::shared_ptr<Link>(std::make_shared<IoLink>(shared_, std::move(state)));
}

std::shared_ptr<Link> IoTransport::link(LinkId id) const {
  const std::lock_guard lock(shared_->mu);
  const auto it = shared_->links.find(static_cast<std::uint64_t>(id));
  if (it == shared_->links.end()) return nullptr;
  return std::make_shared<IoLink>(shared_, it->second);
}

void IoTransport::close() {
  (void)shared_->post(nullptr, Command{LinkId{}, StopCommand{}}).ok();
  if (thread_.joinable()) thread_.join();
}

Result<std::unique_ptr<Transport>> IoTransport::make(TransportOptions options, Schemes schemes) {
  KVCORE_RETURN_IF_ERROR(check_options(options));
  auto shared = std::make_shared<Shared>(std::move(options));
  shared->wake_fd = UniqueFd(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  UniqueFd epoll_fd(::epoll_create1(EPOLL_CLOEXEC));
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = 0;
  if (!shared->wake_fd || !epoll_fd || shared->events.fd() < 0 ||
      ::epoll_ctl(epoll_fd.get(), EPOLL_CTL_ADD, shared->wake_fd.get(), &event) != 0)
    return Error{ErrorCode::kIo, text("epoll or eventfd: errno ", errno)};
  for (const auto& scheme : schemes) scheme->attach(shared.get());
  shared->events.set_on_credit([raw = shared.get()] { raw->wake(); });
  return std::unique_ptr<Transport>(
      std::make_unique<IoTransport>(std::move(shared), std::move(schemes), std::move(epoll_fd)));
}

}  // namespace kvcore::transport
