#include "stream/inbox.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <utility>

namespace kvcore::stream {

Inbox::Inbox() : fd_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {}
Inbox::~Inbox() { ::close(fd_); }

void Inbox::wake() {
  const std::uint64_t one = 1;
  // A full counter is as readable as a fresh one, so a failed write loses nothing.
  [[maybe_unused]] const auto n = ::write(fd_, &one, sizeof(one));
}

bool Inbox::push(Command command) {
  {
    const std::lock_guard lock(mu_);
    if (closed_) return false;
    commands_.push_back(std::move(command));
    if (commands_.size() > 1) return true;  // whoever pushed the first has woken the thread
  }
  wake();
  return true;
}

std::vector<Inbox::Command> Inbox::drain() {
  const std::lock_guard lock(mu_);
  std::uint64_t count = 0;
  [[maybe_unused]] const auto n = ::read(fd_, &count, sizeof(count));
  return std::exchange(commands_, {});
}

void Inbox::close() {
  const std::lock_guard lock(mu_);
  closed_ = true;
}

}  // namespace kvcore::stream
