#include "stream/endpoint.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <future>
#include <utility>

namespace kvcore::stream {
namespace {

constexpr std::int64_t kNsPerMs = 1'000'000;
constexpr std::int64_t kMaxSleepMs = 1000;
constexpr std::size_t kEventsPerStep = 16;  // calls that wait for an answer get their turn

Error closed() { return {ErrorCode::kCancelled, "the endpoint is closed"}; }

}  // namespace

Endpoint::Endpoint(std::shared_ptr<pages::Pool> pool,
                   std::unique_ptr<transport::Transport> transport,
                   std::unique_ptr<FaultPlan> faults)
    : pool_(std::move(pool)),
      faults_(std::move(faults)),
      transport_(std::move(transport)),
      inbox_(std::make_shared<Inbox>()),
      event_fd_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {}

Result<std::unique_ptr<Endpoint>> Endpoint::make(std::shared_ptr<pages::Pool> pool,
                                                 std::unique_ptr<transport::Transport> transport,
                                                 const std::vector<std::string>& listen,
                                                 StreamOptions options,
                                                 std::unique_ptr<FaultPlan> faults) {
  auto out = std::unique_ptr<Endpoint>(
      new Endpoint(std::move(pool), std::move(transport), std::move(faults)));
  options.faults = out->faults_.get();
  KVCORE_ASSIGN_OR_RETURN(out->core_,
                          Core::make(out->pool_, out->transport_.get(), out->inbox_, options));
  for (const std::string& address : listen) {
    KVCORE_ASSIGN_OR_RETURN(std::string bound, out->transport_->listen(address));
    out->addresses_.push_back(std::move(bound));
  }
  out->core_->set_addresses(out->addresses_);
  Endpoint* self = out.get();
  out->thread_ = std::jthread([self] { self->loop(); });
  return out;
}

Endpoint::~Endpoint() {
  close();
  ::close(event_fd_);
}

template <class T>
Result<T> Endpoint::call(std::function<Result<T>(Core&)> f) {
  auto answer = std::make_shared<std::promise<Result<T>>>();
  auto future = answer->get_future();
  const bool taken =
      inbox_->push([answer, f = std::move(f)](Core& core) { answer->set_value(f(core)); });
  if (!taken) return closed();
  return future.get();
}

Result<std::vector<std::byte>> Endpoint::grant(const RequestId& id, std::vector<std::int32_t> pages,
                                               std::int64_t first_token, std::int64_t num_tokens,
                                               std::int64_t deadline_ns, std::vector<Share> shares,
                                               bool tell_layers) {
  return call<std::vector<std::byte>>([&](Core& core) {
    return core.grant(id, pages, first_token, num_tokens, transport::now_ns(), deadline_ns, shares,
                      tell_layers);
  });
}

Result<std::shared_ptr<SendPort>> Endpoint::open(std::vector<std::byte> grant,
                                                 std::vector<std::int32_t> pages,
                                                 std::size_t share) {
  return call<std::shared_ptr<SendPort>>(
      [&](Core& core) { return core.open(grant, pages, transport::now_ns(), share); });
}

Result<bool> Endpoint::release(const RequestId& id) {
  return call<bool>([&](Core& core) { return core.release(id, transport::now_ns()); });
}

Result<CoreStats> Endpoint::stats() {
  return call<CoreStats>([](Core& core) { return core.stats(); });
}

void Endpoint::loop() {
  bool more = false;
  while (true) {
    for (auto& command : inbox_->drain()) command(*core_);
    if (stop_) break;
    more = core_->step(transport::now_ns(), kEventsPerStep);
    queue_events();
    if (more) continue;
    std::int64_t wait_ms = kMaxSleepMs;
    if (const std::int64_t next = core_->next_deadline_ns(); next != 0) {
      wait_ms = std::clamp<std::int64_t>((next - transport::now_ns()) / kNsPerMs + 1, 0, wait_ms);
    }
    pollfd fds[2] = {{inbox_->fd(), POLLIN, 0}, {transport_->event_fd(), POLLIN, 0}};
    ::poll(fds, 2, static_cast<int>(wait_ms));
  }
  core_->close(transport::now_ns());
  queue_events();
  inbox_->close();
  for (auto& command : inbox_->drain()) command(*core_);  // answers calls that were under way
}

void Endpoint::queue_events() {
  auto fresh = core_->take_events();
  if (fresh.empty()) return;
  const std::lock_guard lock(events_mu_);
  std::move(fresh.begin(), fresh.end(), std::back_inserter(events_));
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto n = ::write(event_fd_, &one, sizeof(one));
}

std::vector<StreamEvent> Endpoint::poll() {
  const std::lock_guard lock(events_mu_);
  std::uint64_t count = 0;
  [[maybe_unused]] const auto n = ::read(event_fd_, &count, sizeof(count));
  return std::exchange(events_, {});
}

void Endpoint::close() {
  const std::lock_guard lock(close_mu_);
  if (!thread_.joinable()) return;
  stop_ = true;
  inbox_->wake();
  thread_.join();
}

}  // namespace kvcore::stream
