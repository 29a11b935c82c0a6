// One socket of a link with its session, what waits to leave by it and what has come in.
//
// A tcp link has one lane per priority class, so that no byte of a lower class stands before a
// higher one in a socket's buffer; lane 0 also carries what concerns the whole link. shm links have
// lane 0 alone: there the payload never enters the socket. Thread rules: the I/O thread.
#pragma once

#include <deque>
#include <optional>

#include "base/xxh3.h"
#include "transport/core/channel.h"
#include "transport/socket/outbox.h"

namespace kvcore::transport {

struct Sink {  // where the payload of the current frame goes (tcp)
  enum class Kind : std::uint8_t { kNone, kDiscard, kWrite, kRead } kind = Kind::kNone;
  std::uint64_t op = 0;
  GrantRef grant{};
  std::vector<Piece> pieces{};  // kWrite: place and checksum; kRead: size and checksum
  std::size_t piece = 0;
  std::uint64_t piece_done = 0;
  std::uint64_t left = 0;  // of the payload
  bool checked = true;
  bool last = false;
  std::uint64_t cost = 0;  // of the frame, given back when its payload is gone
  Xxh3 hash{};
};

struct Lane {
  // kJoining: the initiator's lane n > 0 whose owner has not said that it has taken it.
  enum class State : std::uint8_t { kNone, kConnecting, kHandshake, kJoining, kUp };

  std::uint32_t number = 0;  // = the class it carries
  State state = State::kNone;
  UniqueFd fd{};
  std::optional<AuthSession> auth{};
  std::optional<Dial> dial{};  // while it has not joined yet
  std::uint32_t interest = 0;
  bool hung_up = false;  // the peer closed its side: read on to the end, whatever the limits
  bool bye_sent = false, bye_received = false;
  bool drained = false;  // the last read took less than it had room for
  bool more = false;     // its share of a round is used up, but it can send more

  std::deque<OutFrame> control{};
  Outbox outbox{};

  std::vector<std::byte> rx{};  // received, not yet parsed: [rx_begin, rx_end)
  std::size_t rx_begin = 0, rx_end = 0;
  std::size_t tail_bytes = 256;  // read behind payload: as much as the last head had
  std::uint64_t received = 0;    // bytes in all
  std::deque<UniqueFd> rx_fds{};
  Sink sink{};

  bool flushed() const noexcept { return outbox.empty() && control.empty(); }
};

}  // namespace kvcore::transport
