// One link as the I/O thread drives it, whatever carries its bytes. The commands come from
// Shared::commands, the rest from the loop: after every round of events each channel's work() runs.
//
// Life: made -> (handshake) Up -> ... -> dead() -> finish() -> destroyed. finish() ends every
// operation and queues Down, so that each posted operation has exactly one Completion. Thread
// rules: the I/O thread only, but for LinkState.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "transport/core/shared.h"

namespace kvcore::transport {

// What the channels of one I/O thread have in common.
struct Io {
  Shared& shared;
  int epoll_fd;
  std::vector<std::byte> scratch;  // payload nobody wants goes here
  int dials = 0;                   // further connections of links that are on their way
};

// One of Io::dials as long as it lives.
class Dial {
 public:
  explicit Dial(Io* io) noexcept : io_(io) { ++io->dials; }
  ~Dial() {
    if (io_ != nullptr) --io_->dials;
  }
  Dial(Dial&& other) noexcept : io_(std::exchange(other.io_, nullptr)) {}
  Dial& operator=(Dial&& other) noexcept {
    std::swap(io_, other.io_);
    return *this;
  }

 private:
  Io* io_;
};

// The epoll key of a channel's descriptor number `source` (a channel may have several).
inline constexpr int kSourceBits = 8;
inline std::uint64_t epoll_key(LinkId link, std::uint32_t source = 0) {
  return (static_cast<std::uint64_t>(link) << kSourceBits) | source;
}

class Channel {
 public:
  virtual ~Channel() = default;

  // Commands.
  virtual void send(SendCommand command) = 0;
  virtual void start(std::unique_ptr<Op> op) = 0;
  virtual void give_up(std::uint64_t op, const Status& why) = 0;  // cancel and deadline
  // The peer lent it to us. Links of schemes that lend have leases.
  virtual void give_back(std::uint64_t lease) = 0;
  virtual void set_rate(std::uint64_t bytes_per_s, std::int64_t now) = 0;
  virtual void begin_close(std::int64_t now) = 0;
  virtual void region_changed(RegionId region, bool gone) = 0;
  virtual void fail(Status why) = 0;  // the link is dead; the loop calls finish() and drops it

  // The loop.
  virtual void on_event(std::uint32_t source, std::uint32_t events, std::int64_t now) = 0;
  virtual void work(std::int64_t now) = 0;  // timers, copies, sending
  // The lower classes, a small share at a time, after every channel had its work().
  virtual void work_bulk(std::int64_t now) = 0;
  virtual bool busy() const noexcept = 0;                   // wants work() again without any event
  virtual std::int64_t next_timer_ns() const noexcept = 0;  // or INT64_MAX
  virtual bool dead() const noexcept = 0;
  // More connections of this accepted link are to come: they look like strangers at first.
  virtual bool awaits_lanes() const noexcept = 0;
  virtual void finish(std::vector<Command> orphans) = 0;
  virtual const LinkState& link() const noexcept = 0;
  virtual bool initiator() const noexcept = 0;
};

// How operations end that a link's end leaves behind.
Status end_of_pending(const Status& why);

// What it means that a link's socket ended. errno, or 0: closed in order. Who refuses a handshake
// has read what it refuses and closes in order; a process that dies, or is killed, before it has
// read what was sent resets the connection.
Error connection_ended(bool up, int error);

}  // namespace kvcore::transport
