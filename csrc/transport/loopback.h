// Links inside one process, deterministic: the fake of every test that needs a Link.
//
// A LoopbackHub is one little network. Transports made on it reach each other by "loopback:NAME".
// Each post, and each grant check that follows from it, is one *action*. In automatic mode
// (default) actions run inside the posting call; in manual mode they wait, and step() runs exactly
// one: the oldest one of the highest class that waits. Same calls, same steps: same events in the
// same order. Faults are armed by the number of the action (counted from 1 over the whole hub).
//
// Thread rules: all methods from any thread (one lock for the hub). The hub outlives its transports
// through shared ownership. Deadlines are looked at on every step() and poll, on the hub's clock =
// the clock it was made with + what advance() added; TransportOptions::clock is not used. Given a
// clock and a TransportOptions::random of the test's own, a run is a function of its seed.
#pragma once

#include <memory>

#include "transport/link.h"

namespace kvcore::transport {

enum class LoopbackFault : std::uint8_t {
  kDrop,  // the action is lost: a message never arrives, a write stays pending until its deadline
  kFail,  // a write or read ends with TransportError and moves nothing
  kCorrupt,  // a write lands with its first byte flipped and ends with Corrupt on both sides
  kHalf,     // a write lands its first segment, then ends with TransportError
  kDown,     // the link dies (PeerDead on both sides) before the action
};

class LoopbackHub {
 public:
  virtual ~LoopbackHub() = default;
  virtual void set_manual(bool manual) = 0;
  virtual bool step() = 0;        // false: nothing was waiting
  virtual std::size_t run() = 0;  // steps until nothing waits; how many
  virtual std::size_t pending() const = 0;
  virtual std::uint64_t actions() const = 0;  // run so far: arm() counts on from here
  virtual void arm(std::uint64_t nth_from_now, LoopbackFault fault) = 0;
  virtual void advance(std::int64_t ns) = 0;
  // From now on revoke_grant returns kPending and its Fenced is an action of the lowest class.
  virtual void set_late_fences(bool late) = 0;
  virtual Result<std::unique_ptr<Transport>> make_transport(TransportOptions options = {}) = 0;
};

// clock: null = now_ns(); else it must outlive the hub.
std::shared_ptr<LoopbackHub> make_loopback_hub(const Clock* clock = nullptr);

}  // namespace kvcore::transport
