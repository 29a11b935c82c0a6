// The one interface through which registered bytes move between processes. It knows no pages.
//
// Transport  one per process (or per endpoint): regions, grants, listeners, links, one event queue.
// Link       one peer: two-sided send of messages, one-sided write and read against its grants.
// Schemes    "tcp:HOST:PORT" ("tcp:127.0.0.1:0" picks a port, "tcp:[::1]:0" is IPv6),
//            "rdma:HOST:PORT" (a session over tcp, the payload by RDMA writes and reads),
//            "shm:/path.sock" (same host, same user), "loopback:NAME" (one process,
//            deterministic; loopback.h). One Transport serves several schemes at a time.
//
// Threads    Every method of Transport and Link may be called from any thread and never waits for a
//            peer. revoke_grant, unregister_region and close wait at most for a copy of <= 1 MiB
//            that is under way. No callbacks: results come as events from Transport::poll, in one
//            queue.
// Errors     A posting call (send, write, read) that returns an error has posted nothing. A posted
//            write or read, and a send that asks for it, ends in exactly one Completion, whatever
//            happens, close() included. Any other send is delivered, or the link reports Down.
// Memory     The local bytes of a write or read belong to the link from the posting call until its
//            Completion has been queued; after that the link never reads or writes them again.
//            Lists and messages are copied by the call.
// Order      Within one link and one priority class things happen in posting order: the Arrival of
//            a write comes before the Arrival or Message of what was posted after it. Nothing is
//            promised between classes or between links. Completions come in any order.
// Meaning    Completion of a write: all bytes lie in the owner's memory, verified, and the owner's
//            Arrival is in its queue; of a send: the peer's Message is in its queue. Arrival: all
//            bytes of that write are readable by the owner's CPU. A write that fails may have
//            changed bytes inside its granted ranges, never outside.
// Fence      When revoke_grant has returned kDone, no byte of any link lands in (or is served as
//            valid from) the ranges of that grant, so they may be reused at once. kPending: that
//            holds from the event Fenced on, until then the ranges must be left alone. Writes under
//            way end with Stale at the sender. Arrivals of this grant that were queued before stay
//            in the queue.
// Time       Nanoseconds of the transport's clock, CLOCK_MONOTONIC unless another was injected
//            (now_ns()); deadlines and expiries are absolute, 0 = none.
// Lending    shm and loopback: a peer may read sealed bytes where they lie (Link::borrow),
// read-only
//            and without a copy. The lender leaves them as they are from Borrowed until Returned;
//            the lease ends when it is given back, with the borrower's close(), when the borrower's
//            process has ended, and with the expiry of the grant. A link that breaks ends none.
//            What was read is good if it was read before give_back and, on now_ns(), before
//            Borrowed::expires_ns. The lender's death changes nothing: its memory lives on with
//            Borrowed::keep.
// Units      bytes, nanoseconds, bytes per second.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "base/clock.h"
#include "base/fault.h"
#include "base/random.h"
#include "base/result.h"

namespace kvcore::transport {

enum class RegionId : std::uint32_t {};  // of one Transport, never reused
enum class LinkId : std::uint64_t {};    // of one Transport, never reused
enum class OpId : std::uint64_t {};      // of one Link, never reused, counts from 1
enum class LeaseId : std::uint64_t {};   // of one Link and the side that borrows, never reused

// CLOCK_MONOTONIC in nanoseconds: the clock of every deadline, expiry and timestamp here.
std::int64_t now_ns() noexcept;

// Served in this order; a lower class moves only when no higher one can.
enum class Priority : std::uint8_t { kStream = 0, kPrefetch = 1, kBackground = 2 };
inline constexpr int kNumPriorities = 3;

enum class Rights : std::uint8_t { kRead = 1, kWrite = 2, kReadWrite = 3 };

// A range inside a region.
struct Range {
  std::uint64_t offset;
  std::uint64_t bytes;
};

// What a peer must present: unguessable id, and the generation that dies with the grant.
struct GrantRef {
  std::uint64_t id = 0;
  std::uint64_t generation = 0;
  friend bool operator==(const GrantRef&, const GrantRef&) = default;
};

struct Grant {
  GrantRef ref;
  RegionId region;
  Rights rights;
  std::int64_t expires_ns;    // 0 = never
  std::vector<Range> ranges;  // sorted by offset, no overlap, adjacent ranges merged
  std::string peer;           // identity that alone may use it; empty = whoever holds the ref
};

// One piece of a write or read: `bytes` between local_offset (in the local region of the operation)
// and remote_offset (in the region of the grant; must lie inside one granted range). The places
// that one operation fills must not overlap: what lands there is not defined, and on tcp it is
// Corrupt.
struct Segment {
  std::uint64_t local_offset;
  std::uint64_t remote_offset;
  std::uint64_t bytes;
};
inline constexpr std::size_t kMaxSegments = 65536;  // of one operation
inline constexpr std::uint64_t kMaxOpBytes = std::uint64_t{1} << 40;
inline constexpr std::size_t kMaxMessageBytes = 1024UL * 1024;  // of one send
inline constexpr std::size_t kMaxIdentityBytes = 256;
inline constexpr std::size_t kMaxRoleBytes = 32;

struct OpOptions {
  std::int64_t deadline_ns = 0;  // past it the operation ends with Timeout
  Priority priority = Priority::kStream;
  bool checksum = true;  // tcp: xxh3-64 per segment, verified on arrival;
                         // loopback and shm copy memory to memory and ignore it
  bool notify = true;    // false: no Arrival, a later write of the same class carries it
};

// A send with a completion or a deadline is an operation: it counts as outstanding, can be
// cancelled and ends in one Completion. Timeout or Cancelled: its message says whether the peer can
// still get it (it had left) or not (it was taken back).
struct SendOptions {
  Priority priority = Priority::kStream;
  std::int64_t deadline_ns = 0;
  bool completion = false;
};

enum class Memory : std::uint8_t { kHost, kCuda };

// What is registered. `base` must stay valid until unregister_region.
struct RegionSpec {
  std::byte* base = nullptr;
  std::uint64_t bytes = 0;
  // The file that backs it from file offset 0, or -1; duplicated. Sources of writes and targets of
  // reads-by-peers on shm need one, since the peer maps it read-only. It gets the seals
  // FUTURE_WRITE and SHRINK here, so that nobody maps it writable from now on and no access to it
  // can fault; a memfd that cannot be sealed so is refused.
  int memfd = -1;
  Memory memory = Memory::kHost;  // loopback, shm and tcp move host memory only: else Unsupported
};

enum class [[nodiscard]] Fence : std::uint8_t{kDone, kPending};

struct Up {  // the link is authenticated (both sides get it); posting was allowed before
  LinkId link;
  bool accepted;  // true: the peer connected to one of our listeners; fetch it by Transport::link
};
struct Completion {  // exactly one per posted write, read and send that asked for it
  LinkId link;
  OpId op;
  Status status;        // Timeout, Cancelled, Stale (grant), InvalidArgument (bounds, rights),
                        // Corrupt, PeerDead, PeerHung, TransportError
  std::uint64_t bytes;  // of the whole operation when ok, else 0
};
struct Arrival {  // a peer's write into our grant ended here
  LinkId link;
  GrantRef grant;
  std::uint64_t tag;
  std::uint64_t bytes;
  std::int64_t at_ns;  // our clock, after the last byte was in place and verified
  Status status;       // Corrupt: a checksum failed, the bytes must not be used; else ok
};
struct Message {  // a peer's send
  LinkId link;
  std::vector<std::byte> bytes;
  std::int64_t at_ns;
};
struct Fenced {  // follows a revoke_grant that returned kPending, at the latest within close()
  GrantRef grant;
};
struct Borrowed {  // exactly one per posted borrow
  LinkId link;
  OpId op;
  LeaseId lease;                                  // for give_back
  std::vector<std::span<const std::byte>> spans;  // one per range, when ok
  std::shared_ptr<const void> keep;               // the mapping; outlives link, transport, lender
  std::int64_t expires_ns;                        // 0 = never
  Status status;  // as a Completion's; Unsupported: memory that cannot be lent
};
struct Returned {  // to the lender: a lease has ended
  LinkId link;     // which may be down by now
  GrantRef grant;
  LeaseId lease;
  Status status;  // ok; Timeout: it expired, what the borrower still reads is not good any more;
                  // Cancelled: this transport was closed, the borrower may be reading
};
struct Down {  // last event of a link but for Returned; every pending operation has ended before it
  LinkId link;
  Status status;  // ok: closed in order by the peer; Cancelled: closed by this side; PeerDead:
                  // process or connection gone; PeerHung: silent for keepalive_ns; Unsupported: it
                  // serves another model; Unauthenticated; TransportError
};
using Event = std::variant<Up, Completion, Arrival, Message, Fenced, Borrowed, Returned, Down>;

using Digest = std::array<std::byte, 32>;  // all zero = none

// One NIC of an rdma link.
struct RailInfo {
  std::string device;
  bool ready = false;                  // false: being made, or resting after errors
  std::uint64_t bytes_posted = 0;      // by this link
  std::uint64_t errors = 0;            // of this link's queue pairs there
  std::uint64_t rate_bytes_per_s = 0;  // what congestion leaves of it; 0 = the line rate
  std::uint64_t rate_cuts = 0;
  std::uint64_t congestion = 0, marked = 0, lost = 0;  // the device's counters (nic_counters.h)
};

struct LinkInfo {
  LinkId id;
  std::string scheme;  // "loopback", "shm", "tcp", "rdma"
  std::string peer_address;
  // What the peer told inside the handshake (TransportOptions), once Up.
  std::string peer_identity;
  std::string peer_role;
  Digest peer_model{};
  Digest peer_layout{};
  std::int64_t peer_pid;  // shm; else 0
  bool up;
  std::uint64_t bytes_out, bytes_in;  // payload of writes and reads, both directions
  std::uint64_t messages_out, messages_in;
  std::uint64_t outstanding_ops;
  std::uint64_t queued_bytes;     // posted, not yet sent: what pacing or credits hold back
  std::uint64_t credit_bytes;     // what the peer lets us send right now
  std::uint64_t credit_stall_ns;  // how long something waited for that
  std::vector<RailInfo> rails;    // rdma: as of some 10 ms ago
};

class Link {
 public:
  virtual ~Link() = default;
  virtual LinkId id() const noexcept = 0;
  // Two-sided: the peer gets a Message. Fails when the queue holds
  // TransportOptions::max_queued_bytes: the peer, or the network, does not keep up.
  virtual Result<OpId> send(std::span<const std::byte> message,
                            const SendOptions& options = {}) = 0;
  // One-sided: the peer gets one Arrival{tag} when all segments have landed.
  virtual Result<OpId> write(RegionId local, std::span<const Segment> segments, GrantRef grant,
                             std::uint64_t tag, const OpOptions& options = {}) = 0;
  // One-sided: bytes of the peer's grant (rights kRead) into our region; the peer gets no event.
  virtual Result<OpId> read(RegionId local, std::span<const Segment> segments, GrantRef grant,
                            const OpOptions& options = {}) = 0;
  // Ranges of the peer's grant (rights kRead, a region with a memfd), to be read where they lie:
  // Borrowed follows. Not ordered with what else was posted. Unsupported: tcp and rdma links.
  virtual Result<OpId> borrow(GrantRef grant, std::span<const Range> ranges,
                              std::int64_t deadline_ns = 0) = 0;
  // Ends a lease: nothing of it is read any more. Unknown and ended leases are ignored.
  virtual void give_back(LeaseId lease) = 0;
  // Its Completion (Borrowed) follows: Cancelled, or the result that was already on its way.
  // Unknown ids are ignored. On shm a peer that is just copying is waited for (its stop, or its
  // death).
  virtual void cancel(OpId op) = 0;
  // Token bucket for payload this side sends or, on shm, lets the peer pull; 0 = unlimited.
  virtual void set_pacing(std::uint64_t bytes_per_second) = 0;
  virtual LinkInfo info() const = 0;
  // Ends the link: pending operations complete with Cancelled, then Down. Messages already queued
  // are flushed first for at most 100 ms. Idempotent.
  virtual void close() = 0;
};

// What a receiver lets its peers have under way towards it: payload that has not landed, messages
// and arrivals (64 bytes each) that were not polled, reads that were not served. Past it the peer
// waits; its keep-alive and the results of operations do not. rdma: messages and arrivals only,
// since payload lands in granted memory and reads ask the owner for nothing. loopback: steps are
// the pace.
struct Credits {
  std::uint64_t per_link_bytes = 8UL * 1024 * 1024;
  // Over all links, in equal shares: one that comes later gets its own as others give theirs back,
  // and has 64 KiB at least.
  std::uint64_t total_bytes = 64UL * 1024 * 1024;
};

// Of links with "rdma:" addresses.
struct RdmaOptions {
  std::vector<std::string> devices;  // empty = every active port that reaches the peer
  int gid_index = -1;                // -1 = chosen for the peer's address
  std::uint8_t traffic_class = 106;  // DSCP 26, ECN capable
  std::uint8_t service_level = 0;    // [0, 15]
};

struct TransportOptions {
  std::string key;  // pre-shared, 0 or 32 bytes; empty only with loopback addresses and shm
  // Told to peers inside the handshake, under its proof.
  std::string identity;  // <= kMaxIdentityBytes (a worker id); grants can be bound to it
  std::string role;      // <= kMaxRoleBytes ("prefill")
  Digest
      model_digest{};  // of what is served: links between two different ones go down, Unsupported
  Digest layout_digest{};  // of how pages lie in memory; not compared here

  std::int64_t handshake_ns = 2'000'000'000;  // connect and handshake, together
  std::int64_t keepalive_ns = 2'000'000'000;  // a peer silent this long is PeerHung; 0 = never
  std::uint64_t pacing_bytes_per_s = 0;       // initial pacing of every link
  std::uint64_t max_queued_bytes = 64UL * 1024 * 1024;  // messages of one link waiting to be sent
  Credits credits;
  std::uint32_t max_outstanding_ops = 65536;  // of one link
  std::uint32_t max_links = 1024;
  // tcp: one connection per priority class, so that no byte of a lower class stands before a higher
  // one in a socket; false on either side: one connection for all classes.
  bool tcp_connection_per_class = true;
  RdmaOptions rdma;

  // Injected; null = the system's. Both must outlive the transport. What waits in the operating
  // system (sockets, handshakes) wakes up in real time and then looks at this clock.
  const Clock* clock = nullptr;
  RandomSource* random = nullptr;  // of grant refs
  // Tests only. Point "transport.flip_payload": one bit of a chunk changes between its checksum and
  // the socket (tcp), or while it is pulled (shm).
  FaultPlan* faults = nullptr;
};

class Transport {
 public:
  virtual ~Transport() = default;  // closes everything; outstanding Link pointers stay safe to call

  virtual Result<RegionId> register_region(const RegionSpec& spec) = 0;
  Result<RegionId> register_region(std::byte* base, std::uint64_t bytes, int memfd = -1) {
    return register_region(RegionSpec{base, bytes, memfd});
  }
  // Revokes the grants of the region; InvalidArgument while operations of this side use it or a
  // fence of it is pending.
  virtual Status unregister_region(RegionId region) = 0;

  // peer: the identity that alone may use the grant (to others it is Stale), empty = any peer.
  virtual Result<Grant> create_grant(RegionId region, std::span<const Range> ranges, Rights rights,
                                     std::int64_t expires_ns = 0, std::string_view peer = {}) = 0;
  // The fence (see above); kPending while ranges of it are lent. Unknown or already revoked grants:
  // nothing to do, kDone.
  virtual Fence revoke_grant(GrantRef grant) = 0;

  // Returns the address with the port filled in. InvalidArgument: a tcp address that is not
  // loopback while the key is empty.
  virtual Result<std::string> listen(std::string_view address) = 0;
  // Returns at once with a link to post on; Up or Down follows. A host name is looked up elsewhere.
  virtual Result<std::shared_ptr<Link>> connect(std::string_view address) = 0;
  virtual std::shared_ptr<Link> link(LinkId id) const = 0;  // null once Down was queued

  // Moves up to max_events events to the end of *events; returns how many. Never waits.
  virtual std::size_t poll(std::vector<Event>* events, std::size_t max_events = 256) = 0;
  // Readable while events wait: for epoll, asyncio, poll(2). Owned by the Transport.
  virtual int event_fd() const noexcept = 0;
  virtual void close() = 0;  // every link is closed, then listeners and the I/O thread; idempotent
};

// Handles every scheme but loopback, with one I/O thread.
Result<std::unique_ptr<Transport>> make_transport(TransportOptions options = {});

}  // namespace kvcore::transport
