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

namespace {
std::uint64_t message_bytes(const Event& event) {
  const auto* m = std::get_if<Message>(&event);
  return m ? m->bytes.size() : 0;
}
}  // namespace

EventQueue::EventQueue(std::uint64_t max_unread_bytes)
    : max_unread_bytes_(max_unread_bytes), fd_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {}

EventQueue::~EventQueue() {
  if (fd_ >= 0) ::close(fd_);
}

void EventQueue::push(Event event) {
  const std::lock_guard lock(mu_);
  unread_bytes_ += message_bytes(event);
  events_.push_back(std::move(event));
  if (events_.size() == 1) {
    const std::uint64_t one = 1;
    [[maybe_unused]] const auto n = ::write(fd_, &one, sizeof one);
  }
}

std::size_t EventQueue::poll(std::vector<Event>* events, std::size_t max_events) {
  std::size_t n = 0;
  bool drained = false;
  {
    const std::lock_guard lock(mu_);
    const bool was_full = unread_bytes_ > max_unread_bytes_;
    for (; n < max_events && !events_.empty(); ++n) {
      unread_bytes_ -= message_bytes(events_.front());
      events->push_back(std::move(events_.front()));
      events_.pop_front();
    }
    if (n > 0 && events_.empty()) {
      std::uint64_t count = 0;
      [[maybe_unused]] const auto r = ::read(fd_, &count, sizeof count);
    }
    drained = was_full && unread_bytes_ <= max_unread_bytes_;
  }
  if (drained && on_drained_) on_drained_();
  return n;
}

bool EventQueue::full() const {
  const std::lock_guard lock(mu_);
  return unread_bytes_ > max_unread_bytes_;
}

}  // namespace kvcore::transport
