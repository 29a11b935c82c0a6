// The one queue of events of a Transport, with an eventfd that is readable while events wait.
// An event may hold credit of its link (credit_window.h), which comes back when it is polled: the
// I/O side reads PollCredit::polled, and is woken when it passes wake_at. Thread rules: all methods
// from any thread.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <vector>

#include "transport/link.h"

namespace kvcore::transport {

struct PollCredit {
  static constexpr std::uint64_t kNever = std::numeric_limits<std::uint64_t>::max();
  std::atomic<std::uint64_t> polled{0};  // cost of what was polled, in all
  std::atomic<std::uint64_t> wake_at{kNever};
};

class EventQueue {
 public:
  EventQueue();
  ~EventQueue();
  EventQueue(const EventQueue&) = delete;
  EventQueue& operator=(const EventQueue&) = delete;

  void push(Event event, std::shared_ptr<PollCredit> owner = nullptr, std::uint64_t cost = 0);
  std::size_t poll(std::vector<Event>* events, std::size_t max_events);
  int fd() const noexcept { return fd_; }
  // Called outside the lock when a poll gave back what a link waits for.
  void set_on_credit(std::function<void()> f) { on_credit_ = std::move(f); }

 private:
  struct Entry {
    Event event;
    std::shared_ptr<PollCredit> owner;
    std::uint64_t cost;
  };
  int fd_;
  std::mutex mu_;
  std::deque<Entry> entries_;
  std::function<void()> on_credit_;
};

}  // namespace kvcore::transport
