// The one queue of events of a Transport, with an eventfd that is readable while events wait.
// Thread rules: all methods from any thread. Unread message bytes are counted, so that the I/O side
// can stop receiving past a limit; `on_drained` is called (outside the lock) when poll falls below
// it.
#pragma once

#include <deque>
#include <functional>
#include <mutex>
#include <vector>

#include "transport/link.h"

namespace kvcore::transport {

class EventQueue {
 public:
  explicit EventQueue(std::uint64_t max_unread_bytes);
  ~EventQueue();
  EventQueue(const EventQueue&) = delete;
  EventQueue& operator=(const EventQueue&) = delete;

  void push(Event event);
  std::size_t poll(std::vector<Event>* events, std::size_t max_events);
  bool full() const;  // unread message bytes are past the limit
  int fd() const noexcept { return fd_; }
  void set_on_drained(std::function<void()> f) { on_drained_ = std::move(f); }

 private:
  const std::uint64_t max_unread_bytes_;
  int fd_;
  mutable std::mutex mu_;
  std::deque<Event> events_;
  std::uint64_t unread_bytes_ = 0;
  std::function<void()> on_drained_;
};

}  // namespace kvcore::transport
