#include "transport/core/event_queue.h"

#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

namespace kvcore::transport {

std::int64_t now_ns() noexcept {
  timespec ts{};
  clock_gettime(CLOCK_MONOTONIC, &ts);
  return static_cast<std::int64_t>(ts.tv_sec) * 1'000'000'000 + ts.tv_nsec;
}

EventQueue::EventQueue() : fd_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {}

EventQueue::~EventQueue() {
  if (fd_ >= 0) ::close(fd_);
}

void EventQueue::push(Event event, std::shared_ptr<PollCredit> owner, std::uint64_t cost) {
  const std::lock_guard lock(mu_);
  entries_.push_back({std::move(event), std::move(owner), cost});
  if (entries_.size() == 1) {
    const std::uint64_t one = 1;
    [[maybe_unused]] const auto n = ::write(fd_, &one, sizeof one);
  }
}

std::size_t EventQueue::poll(std::vector<Event>* events, std::size_t max_events) {
  std::size_t n = 0;
  bool wanted = false;
  {
    const std::lock_guard lock(mu_);
    for (; n < max_events && !entries_.empty(); ++n) {
      Entry& entry = entries_.front();
      events->push_back(std::move(entry.event));
      if (entry.owner) {
        const std::uint64_t polled = entry.owner->polled += entry.cost;
        if (polled >= entry.owner->wake_at.load()) {
          entry.owner->wake_at = PollCredit::kNever;
          wanted = true;
        }
      }
      entries_.pop_front();
    }
    if (n > 0 && entries_.empty()) {
      std::uint64_t count = 0;
      [[maybe_unused]] const auto r = ::read(fd_, &count, sizeof count);
    }
  }
  if (wanted && on_credit_) on_credit_();
  return n;
}

}  // namespace kvcore::transport
