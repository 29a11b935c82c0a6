// What the two ends of an rdma link tell each other beside the payload: queue pairs, windows, and
// the life of each write. They travel, in order, in authenticated frames of the link's tcp session.
//
//   rail life      kOffer / kAccept / kRefuse / kBroken: a sender offers a queue pair for its own
//                  writes and reads, the owner answers with the other end. An epoch counts them.
//   grants         kMap asks for the windows of a grant on one rail, kMapped brings their keys,
//                  kUnmapped says that they are dead, kDrained that nothing of the sender's is on
//                  its way to them any more.
//   writes         kBegin takes the write's place in the order, kPosted says where its last pieces
//                  will arrive, kResult is the owner's verdict, kAbort takes it back.
//   messages       kMessage, in order with the writes of its class.
//
// decode is total: what is not exactly a message is Corrupt, nothing is allocated beyond what was
// received. All integers little endian. Thread rules: pure functions.
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "base/auth_session.h"
#include "base/result.h"
#include "transport/core/credit_window.h"
#include "transport/link.h"
#include "transport/rdma/arrivals.h"
#include "transport/rdma/chunks.h"
#include "transport/rdma/verbs.h"

namespace kvcore::transport::rdma {

inline constexpr std::size_t kMaxWindows = 4096;  // ranges of one grant

struct Offer {
  std::uint32_t rail, epoch;
  Endpoint sender;
};
struct Accept {
  std::uint32_t rail, epoch;
  Endpoint owner;
};
struct Refuse {  // the owner cannot serve this rail
  std::uint32_t rail, epoch;
};
struct Broken {  // by_owner: found by the side that receives; else by the side that sends
  std::uint32_t rail, epoch;
  bool by_owner;
};
struct Map {
  GrantRef grant;
  std::uint32_t rail, epoch;
  std::uint32_t question;  // the answer repeats it: an answer of before is none
};
struct Mapped {
  GrantRef grant;
  std::uint32_t rail;
  std::uint32_t question;
  Status status;  // Stale, Unsupported, Io
  Rights rights = Rights::kRead;
  std::vector<RemoteRange> ranges;
};
struct Unmapped {
  GrantRef grant;
};
struct Drained {
  GrantRef grant;
};
struct Begin {
  std::uint64_t op;
  std::uint32_t slot;
  Priority priority;
  GrantRef grant;
  std::uint64_t tag, bytes;
  bool notify = true;
};
struct Posted {
  std::uint64_t op;
  std::uint32_t attempt, rails;
};
struct Verdict {
  std::uint64_t op;
  Status status;
};
struct Abort {
  std::uint64_t op;
};
struct Text {
  Priority priority;
  std::vector<std::byte> bytes;
  std::uint64_t op = 0;  // not 0: the sender waits for a verdict
};

using Control = std::variant<Offer, Accept, Refuse, Broken, Map, Mapped, Unmapped, Begin, Posted,
                             Verdict, Abort, Text, Drained>;

// What a message costs of the receiver's credits, the same for both sides: a text its bytes, a
// write its arrival. The payload of writes lands in granted memory, reads ask the owner for
// nothing.
inline constexpr std::size_t kTextHeadBytes = 10;  // kind, priority, op
inline constexpr std::uint64_t kBeginCredit = kFrameCost;
inline constexpr std::uint64_t text_credit(std::size_t bytes) { return kFrameCost + bytes; }

std::vector<std::byte> encode(const Control& control);
Result<Control> decode(Bytes bytes);

}  // namespace kvcore::transport::rdma
