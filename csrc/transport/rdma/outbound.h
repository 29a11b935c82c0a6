// The side of an rdma link that writes and reads: operations become work on the rails.
//
// A write takes a slot and its place in the order (kBegin), waits until the windows of its grant
// are known on every usable rail (kMap), is cut (chunks.h), posted as the rails have room, and ends
// when the owner's verdict is there AND none of its work is left in a queue: only then does its
// local memory belong to the caller again. A read ends with its own completions.
//
// Trouble      Any failed work ends its rail's queue pair: it is destroyed with all its work, and a
//              new one is offered unless the rail must rest. What was lost may have been executed,
//              so a write is replayed only after the owner has answered for its grant again: to
//              the same place, still fenced, under the next attempt number. An owner that had it
//              all answers with its verdict first, and then nothing is replayed.
// Giving up    Nothing more is posted; what is in a queue gets kDrainGraceNs, then the queue pair
//              is destroyed, which ends it.
//
// Sans-I/O but for the Nic interfaces: no clock, no thread, no socket. Thread rules: one thread.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "transport/rdma/control.h"
#include "transport/rdma/rail_health.h"
#include "transport/rdma/send_queue.h"

namespace kvcore::transport::rdma {

inline constexpr std::int64_t kDrainGraceNs = 50'000'000;

struct Job {
  std::uint64_t op = 0;
  bool is_read = false;
  Priority priority = Priority::kStream;
  GrantRef grant;
  std::uint64_t tag = 0;
  std::uint64_t bytes = 0;
  bool notify = true;
  const std::byte* base = nullptr;
  std::vector<Segment> segments{};
  std::vector<std::uint32_t> keys{};  // of the local region, by rail
};

struct OutboundOptions {
  PathSettings path;
  std::uint64_t in_flight_bytes = 16UL * 1024 * 1024;  // of one rail
  // May more be posted to this rail now (pacing, congestion)? Called before each chunk, told what
  // was posted after.
  std::function<bool(std::uint32_t rail, std::int64_t now)> may_post =
      [](std::uint32_t, std::int64_t) { return true; };
  std::function<void(std::uint32_t rail, std::uint64_t bytes)> on_posted = [](std::uint32_t,
                                                                              std::uint64_t) {};
  // Credits (control.h): asked before a text or the announcement of a write leaves, and
  // told when it does.
  std::function<bool(std::uint64_t cost, Priority)> may_send = [](std::uint64_t, Priority) {
    return true;
  };
  // A message left its queue: it was sent, or taken back.
  std::function<void(std::uint64_t bytes)> on_unqueued = [](std::uint64_t) {};
  std::function<void(std::uint64_t cost)> on_sent = [](std::uint64_t) {};
  // 24 bits, unguessable. Without them the link fails.
  std::function<Result<std::uint32_t>()> random_packet;
};

class Outbound {
 public:
  struct Done {
    std::uint64_t op;
    Status status;
  };
  enum class RailState : std::uint8_t { kDown, kOffered, kReady };

  Outbound(std::vector<Nic*> nics, OutboundOptions options);

  void start(Job job);
  // op: not 0 when its completion is waited for.
  void send(Priority priority, std::vector<std::byte> message, std::uint64_t op = 0);
  void give_up(std::uint64_t op, Status why, std::int64_t now);

  // The peer's answers. An error means that it broke the protocol: close the link.
  Status on(const Accept& m, std::int64_t now);
  void on(const Refuse& m, std::int64_t now);
  void on(const Broken& m, std::int64_t now);
  Status on(const Mapped& m, std::int64_t now);
  void on(const Unmapped& m, std::int64_t now);  // kDrained follows
  void on(const Verdict& m, std::int64_t now);

  bool owns(std::uint32_t rail, QueuePairNumber number) const;
  void on_work(std::uint32_t rail, const WorkDone& done, std::int64_t now);
  void port_down(std::uint32_t rail, std::int64_t now);

  // Offers rails, posts what fits, ends what is over. Call after everything above.
  void step(std::int64_t now);
  std::int64_t next_timer_ns() const;  // INT64_MAX = none

  // The next control message that must leave, class by class; empty = none.
  std::optional<Control> next_control();
  std::vector<Done> take_done() { return std::exchange(done_, {}); }
  // Set when every rail rests, or there are no random bytes: nothing can move any more.
  const Status& failure() const { return failure_; }
  // Ends everything: queue pairs are destroyed, then each operation is done with `why`.
  void close(const Status& why);

  std::size_t operations() const { return ops_.size(); }
  RailState rail_state(std::uint32_t rail) const { return rails_[rail].state; }
  std::uint64_t rail_errors(std::uint32_t rail) const { return rails_[rail].health.errors(); }
  std::uint64_t reconnects() const { return reconnects_; }
  std::uint64_t replays() const { return replays_; }
  std::uint64_t bytes_posted(std::uint32_t rail) const { return rails_[rail].bytes_posted; }

 private:
  struct Sent {
    std::uint64_t id;
    std::uint64_t op;  // 0 = a mark
    std::uint32_t bytes;
  };
  struct Rail {
    Nic* nic;
    RailState state = RailState::kDown;
    std::uint32_t epoch = 0;
    std::unique_ptr<QueuePair> pair{};
    SendQueue queue;
    std::deque<Sent> sent{};
    std::uint64_t in_flight = 0;
    RailHealth health{};
    std::uint64_t bytes_posted = 0;
  };
  struct Op {
    Job job;
    bool announced = false;  // has a slot (writes), may be posted
    std::uint32_t slot = 0;
    ChunkPlan plan{};
    std::size_t next_chunk = 0;
    std::size_t outstanding = 0;  // chunks in a queue
    bool replay = false;          // some of it was flushed
    bool ending = false;          // nothing more is posted; `end` is its status
    Status end{};
    bool settled = false;  // the owner's verdict is in `end`
    std::int64_t drain_until = 0;
  };
  struct Item {  // of a class queue, before it has its place at the owner
    bool is_message;
    std::uint64_t op;
    std::vector<std::byte> message{};
  };
  struct GrantMap {
    std::uint64_t generation = 0;
    Rights rights = Rights::kRead;
    struct OnRail {
      std::uint32_t question = 0;  // 0 = not asked
      std::vector<RemoteRange> ranges{};
    };
    std::vector<OnRail> rails;
  };

  void offer(std::uint32_t rail, std::int64_t now);
  void break_rail(std::uint32_t rail, bool blame, bool tell, std::int64_t now);
  void retire(std::uint32_t rail, std::uint64_t id);
  bool advance(Op* op, std::int64_t now, bool* waiting);
  bool prepare(Op* op, std::int64_t now, bool* waiting);
  bool post_chunk(Op* op, const Chunk& chunk, std::int64_t now);
  void post_all(std::int64_t now);
  void mark(std::uint32_t rail, std::int64_t now);
  void give_up_send(std::uint64_t op, const Status& why);
  void stop(Op* op, Status why, bool tell, std::int64_t now);
  void settle(Op* op);
  void finish(std::uint64_t op, Status status);
  void drop_map(std::uint64_t grant);
  void left_queue(const GrantRef& grant);
  bool afford(std::uint64_t credit, std::size_t priority);
  Op* find(std::uint64_t op);

  std::vector<Rail> rails_;
  OutboundOptions options_;
  std::unordered_map<std::uint64_t, Op> ops_;
  std::deque<Item> waiting_[kNumPriorities];
  std::deque<std::uint64_t> active_[kNumPriorities];  // announced, not yet posted whole
  std::set<std::uint64_t> ending_;
  std::set<std::uint64_t> sends_;                             // whose verdict is waited for
  std::unordered_map<std::uint64_t, GrantMap> maps_;          // by GrantRef::id
  std::unordered_map<std::uint64_t, std::size_t> in_queues_;  // chunks, by GrantRef::id
  std::unordered_map<std::uint64_t, GrantRef> draining_;      // the owner waits, by GrantRef::id
  std::vector<std::uint32_t> free_slots_;
  std::vector<std::uint32_t> attempts_;  // by slot
  std::vector<std::uint64_t> again_;     // to be posted from their beginning
  std::uint32_t questions_ = 0;
  std::deque<Control> urgent_;
  std::vector<Done> done_;
  Status failure_;
  std::uint64_t reconnects_ = 0, replays_ = 0;
};

}  // namespace kvcore::transport::rdma
