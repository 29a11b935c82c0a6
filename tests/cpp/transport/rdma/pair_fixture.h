// Two peers over a fake fabric with an ordered pipe of control messages each way, memory that
// knows whose it is, and a table of grants.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "fake_verbs.h"
#include "transport/rdma/peer.h"

namespace kvcore::transport::rdma {

inline constexpr std::size_t kBytes = 1UL << 20;

// One end: its NICs, its memory, its grants, and all that it was told.
struct End {
  End(std::vector<std::unique_ptr<Nic>> opened,
      std::function<Result<std::uint32_t>()> random_packet)
      : memory(kBytes), nics(std::move(opened)) {
    for (auto& nic : nics) {
      auto key = nic->register_memory({.base = memory.data(), .bytes = kBytes});
      EXPECT_TRUE(key.ok()) << key.error().message;
      keys.push_back(std::move(key).value());
    }
    OutboundOptions out;
    out.random_packet = std::move(random_packet);
    out.in_flight_bytes = 256UL * 1024;
    out.may_send = [this](std::uint64_t credit, Priority priority) {
      return window.fits(credit, priority == Priority::kStream);
    };
    out.on_sent = [this](std::uint64_t credit) { window.spend(credit); };
    window.open({std::uint64_t{1} << 40, 0});
    InboundOptions in;
    in.charge = [this](std::uint64_t credit) {
      held += credit;
      return Status{};
    };
    in.give_back = [this](std::uint64_t credit) { held -= credit; };
    in.random_packet = out.random_packet;
    in.grant = [this](GrantRef ref, std::int64_t now) -> Result<Grant> {
      const auto it = grants.find(ref.id);
      if (it == grants.end() || it->second.ref != ref ||
          (it->second.expires_ns != 0 && now >= it->second.expires_ns))
        return Error{ErrorCode::kStale, "the grant is gone"};
      return it->second;
    };
    in.memory = [this](RegionId, std::uint32_t rail) -> Result<const RegisteredMemory*> {
      return keys[rail].get();
    };
    in.base = [this](RegionId) { return memory.data(); };
    std::vector<Nic*> bare;
    for (auto& nic : nics) bare.push_back(nic.get());
    peer = std::make_unique<Peer>(bare, out, in);
  }

  Grant grant(std::vector<Range> ranges, Rights rights, std::int64_t expires_ns = 0) {
    const std::uint64_t id = ++next_grant;
    grants[id] = {{id, id * 7919}, RegionId{1}, rights, expires_ns, std::move(ranges), {}};
    return grants[id];
  }
  Job job(std::uint64_t op, GrantRef grant, std::vector<Segment> segments, bool is_read = false) {
    Job job{.op = op, .is_read = is_read, .grant = grant, .tag = op * 10};
    for (const Segment& s : segments) job.bytes += s.bytes;
    job.base = memory.data();
    job.segments = std::move(segments);
    for (const auto& key : keys) job.keys.push_back(key->local_key());
    return job;
  }

  End(const End&) = delete;
  End& operator=(const End&) = delete;

  std::vector<std::byte> memory;
  std::vector<std::unique_ptr<Nic>> nics;
  std::vector<std::unique_ptr<RegisteredMemory>> keys;
  std::map<std::uint64_t, Grant> grants;
  std::uint64_t next_grant = 0;
  std::unique_ptr<Peer> peer;
  std::deque<std::vector<std::byte>> inbox;  // control messages on their way here
  std::map<std::uint64_t, Status> done;
  std::vector<Inbound::Delivery> deliveries;
  std::vector<GrantRef> fenced;
  Status failed;           // of a step
  SendWindow window;       // what it may still send
  std::uint64_t held = 0;  // credit of what it was sent and has not dropped
};

class Turns {
 public:
  Turns(std::unique_ptr<End> first, std::unique_ptr<End> second)
      : a_(std::move(first)), b_(std::move(second)), a(*a_), b(*b_) {
    for (std::size_t i = 0; i < kBytes; ++i) {
      a.memory[i] = static_cast<std::byte>(i * 2654435761U >> 7);
      b.memory[i] = static_cast<std::byte>(i * 40503U >> 3);
    }
  }
  virtual ~Turns() = default;
  virtual void round() = 0;

  // One turn of one end: completions, then at most `most` control messages, then what follows.
  void turn(End& self, End& other, std::uint64_t most) {
    for (auto& nic : self.nics) {
      WorkDone done;
      for (;;) {
        const auto n = nic->poll({&done, 1});
        ASSERT_TRUE(n.ok()) << n.error().message;
        if (*n == 0) break;
        if (done.kind == WorkKind::kReceive) (void)nic->post_receives(1);
        const auto known = self.peer->on_work(nic.get(), done, now);
        ASSERT_TRUE(known.ok()) << known.error().message;
      }
      for (const NicEvent event : nic->take_events()) self.peer->on_event(nic.get(), event, now);
    }
    for (; most > 0 && !self.inbox.empty(); --most) {
      const auto status = self.peer->on_control(self.inbox.front(), now);
      ASSERT_TRUE(status.ok()) << status.error().message;
      self.inbox.pop_front();
    }
    if (const Status stepped = self.peer->step(now); !stepped) self.failed = stepped;
    while (auto control = self.peer->next_control()) other.inbox.push_back(std::move(*control));
    collect(self);
  }
  void collect(End& self) {
    for (const auto& d : self.peer->outbound().take_done()) {
      EXPECT_TRUE(self.done.emplace(d.op, d.status).second) << "done twice: " << d.op;
      if (on_done) on_done(self, d.op);
    }
    for (auto& d : self.peer->inbound().take_deliveries()) {
      self.deliveries.push_back(std::move(d));
      if (on_delivery) on_delivery(self);
    }
    for (const GrantRef ref : self.peer->inbound().take_fenced()) self.fenced.push_back(ref);
  }
  // Until `over` says so; false when that many rounds were not enough.
  bool until(const std::function<bool()>& over, int most = 200'000) {
    for (int i = 0; i < most; ++i) {
      if (over()) return true;
      round();
    }
    return over();
  }
  void rounds(int n) {
    for (int i = 0; i < n; ++i) round();
  }
  bool ready() {
    return until([&] {
      for (std::uint32_t r = 0; r < a.nics.size(); ++r)
        if (a.peer->outbound().rail_state(r) != Outbound::RailState::kReady ||
            b.peer->outbound().rail_state(r) != Outbound::RailState::kReady)
          return false;
      return true;
    });
  }
  static std::size_t arrivals(const End& end) {
    return static_cast<std::size_t>(std::ranges::count_if(
        end.deliveries, [](const auto& d) { return std::holds_alternative<Inbound::Arrived>(d); }));
  }

  std::unique_ptr<End> a_, b_;
  End &a, &b;
  std::int64_t now = 1'000'000'000;
  std::function<void(End&, std::uint64_t)> on_done;
  std::function<void(End&)> on_delivery;
};

// The fabric comes first: it outlives the ends.
struct Fabric {
  explicit Fabric(std::uint64_t seed) : fabric(seed) {}
  std::unique_ptr<End> end(const std::string& name, std::uint32_t num_rails, std::uint32_t depth) {
    std::vector<std::unique_ptr<Nic>> nics;
    for (std::uint32_t r = 0; r < num_rails; ++r) {
      NicRequest request{.device = name + std::to_string(r)};
      request.send_depth = depth;
      nics.push_back(std::move(fabric.open(request)).value());
      (void)nics.back()->post_receives(64);
    }
    return std::make_unique<End>(std::move(nics), [this]() -> Result<std::uint32_t> {
      if (no_random) return Error{ErrorCode::kIo, "no random bytes"};
      return static_cast<std::uint32_t>(fabric.draw(1U << 24));
    });
  }
  FakeFabric fabric;
  bool no_random = false;
};

class Wire : public Fabric, public Turns {
 public:
  Wire(std::uint64_t seed, std::uint32_t num_rails, std::uint32_t depth = 64)
      : Fabric(seed), Turns(end("a", num_rails, depth), end("b", num_rails, depth)) {}
  void round() override {
    now += 10'000;
    const std::uint64_t what = fabric.draw(4);
    if (what >= 2)
      fabric.step();
    else if (what == 0)
      turn(a, b, fabric.draw(4));
    else
      turn(b, a, fabric.draw(4));
  }
};

inline std::string message_of(const Status& status) {
  return status.ok() ? "ok" : text(to_string(status.error().code), ": ", status.error().message);
}

}  // namespace kvcore::transport::rdma
