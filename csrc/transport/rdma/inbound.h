// The side of an rdma link that owns the memory: windows, arrivals and the fence.
//
// A grant opens nothing by itself. When the peer asks for it on a rail, each granted range gets a
// type 2B memory window bound to that rail's queue pair, with the grant's rights only. Revocation
// invalidates the windows (LOCAL_INV) and is over when the completions say so AND the peer has said
// that nothing of its own is on its way to them (kDrained): a device may still be placing a packet
// whose key it checked before the invalidation. Soft-RoCE does (rxe_resp.c: check_rkey looks the
// window up without its lock, write_data_in copies later; rxe_invalidate_mw waits for neither).
// When either does not come within kFenceNs, or the queue pair is in error, it is destroyed: that
// waits for the device and needs no peer. Until then the grant's memory is in quarantine: `fenced`
// has not named it.
//
// Order        A write has its place by kBegin; it is announced when its immediates are all there,
//              its grant still lives, and what came before it in its class is over.
// Caller       Polls the Nics to empty before it hands over control messages: an acknowledged
//              arrival must be seen before the peer's next word about that rail.
//
// Sans-I/O but for the Nic interfaces: no clock, no thread, no socket. Thread rules: one thread.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <unordered_map>
#include <variant>
#include <vector>

#include "transport/rdma/control.h"
#include "transport/rdma/send_queue.h"

namespace kvcore::transport::rdma {

// More than a sender's kDrainGraceNs and a round trip.
inline constexpr std::int64_t kFenceNs = 200'000'000;

struct InboundOptions {
  PathSettings path;
  // 24 bits, unguessable. Without them the link fails.
  std::function<Result<std::uint32_t>()> random_packet;
  // The live grant behind a reference: Stale.
  std::function<Result<Grant>(GrantRef, std::int64_t now)> grant;
  // The grant is about to be looked up and opened; then that nothing of it is open any more. Once
  // each in turn, so that whoever revokes knows whether it must wait (from any thread).
  std::function<void(GrantRef)> exposing = [](GrantRef) {};
  std::function<void(GrantRef)> concealed = [](GrantRef) {};
  // The registration of a region on a rail (null: not yet, step() asks again), and where the region
  // begins.
  std::function<Result<const RegisteredMemory*>(RegionId, std::uint32_t rail)> memory;
  std::function<std::byte*(RegionId)> base;
  // Credits (control.h): what the peer's words hold. Corrupt: more than it may.
  std::function<Status(std::uint64_t cost)> charge = [](std::uint64_t) { return Status{}; };
  // What will not be delivered holds nothing any more; the rest is given back by who delivers it.
  std::function<void(std::uint64_t cost)> give_back = [](std::uint64_t) {};
};

class Inbound {
 public:
  struct Arrived {
    GrantRef grant;
    std::uint64_t tag, bytes;
    bool notify;
  };
  using Delivery = std::variant<Arrived, std::vector<std::byte>>;  // or a message

  Inbound(std::vector<Nic*> nics, InboundOptions options);

  // The peer's words. An error means that it broke the protocol: close the link.
  Status on(const Offer& m, std::int64_t now);
  void on(const Broken& m, std::int64_t now);
  Status on(const Map& m, std::int64_t now);
  void on(const Drained& m);
  Status on(const Begin& m, std::int64_t now);
  Status on(const Posted& m, std::int64_t now);
  void on(const Abort& m, std::int64_t now);
  Status on(Text m, std::int64_t now);

  bool owns(std::uint32_t rail, QueuePairNumber number) const;
  // A window's completion, or an immediate (kReceive).
  Status on_work(std::uint32_t rail, const WorkDone& done, std::int64_t now);

  // True: nothing of this link reaches the grant's memory any more. False: take_fenced names it
  // later. The grant must be unknown to options.grant from before this call.
  bool revoke(GrantRef grant, std::int64_t now);

  Status step(std::int64_t now);       // posts, time limits, expiry
  std::int64_t next_timer_ns() const;  // INT64_MAX = none
  std::optional<Control> next_control();
  std::vector<Delivery> take_deliveries() { return std::exchange(deliveries_, {}); }
  std::vector<GrantRef> take_fenced() { return std::exchange(fenced_, {}); }
  void close();  // every queue pair and window is gone: all is fenced

  std::size_t windows() const;  // bound or on their way
  std::uint64_t bytes_arrived() const { return bytes_arrived_; }
  std::uint64_t stale_immediates() const { return counters_.stale(); }

 private:
  struct PendingWork {
    WorkKind kind;
    std::uint64_t grant;
    std::size_t window;
  };
  struct PostedWork {
    std::uint64_t id;
    WorkKind kind;
    std::uint64_t grant;
  };
  struct Rail {
    Nic* nic;
    std::uint32_t epoch = 0;
    std::unique_ptr<QueuePair> pair{};
    SendQueue queue;
    std::deque<PendingWork> pending{};
    std::deque<PostedWork> posted{};
  };
  struct BoundRange {
    std::unique_ptr<Window> window;
    std::uint64_t address, bytes;
    std::uint32_t key;
    const RegisteredMemory* memory;
  };
  struct OnRail {
    std::vector<BoundRange> ranges{};
    std::size_t binding = 0, invalidating = 0;
    std::vector<std::uint32_t> questions{};  // to be answered once bound
  };
  struct Exposed {
    Grant grant{};
    std::vector<OnRail> rails{};
    bool revoked = false;
    bool report = false;          // take_fenced must name it
    std::uint32_t undrained = 0;  // rails on which packets of the peer may still be placed
    std::int64_t fence_until = 0;
  };
  struct Write {
    Begin begin;
    bool complete = false;  // all immediates are there
    bool over = false;      // given up
  };
  struct Item {
    bool is_message;
    std::uint64_t op;  // of a message: who waits for a verdict, or 0
    std::vector<std::byte> message{};
  };

  Result<bool> expose(Exposed* exposed, std::uint32_t rail);
  void answer(Exposed* exposed, std::uint32_t rail);
  void begin_revoke(std::uint64_t id, std::int64_t now);
  void end_revokes();
  Status open_grant(const Map& m, std::int64_t now);
  void kill_rail(std::uint32_t rail, bool tell);
  void post_pending(std::uint32_t rail);
  void work_over(const PostedWork& work);
  void check_complete(std::uint32_t slot);
  void deliver(std::int64_t now);
  void announce(Write* write, std::int64_t now);

  std::vector<Rail> rails_;
  InboundOptions options_;
  std::unordered_map<std::uint64_t, Exposed> exposed_;  // by GrantRef::id
  std::vector<Map> unregistered_;                       // questions that wait for a registration
  ArrivalCounters counters_;
  std::unordered_map<std::uint64_t, Write> writes_;
  std::vector<std::uint64_t> slot_op_;  // 0 = free
  std::deque<Item> order_[kNumPriorities];
  std::deque<Control> control_;
  std::vector<Delivery> deliveries_;
  std::vector<GrantRef> fenced_;
  std::uint64_t bytes_arrived_ = 0;
};

}  // namespace kvcore::transport::rdma
