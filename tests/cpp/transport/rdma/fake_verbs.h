// A fabric of fake NICs in one process: queue pairs, windows and immediates with the rules of the
// real ones, executed one piece of work at a time in an order drawn from a seed, and told to fail
// where a test wants it. Thread rules: what goes through the interfaces of verbs.h is locked; knobs
// are set before, or with `mu` held.
#pragma once

#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <set>

#include "base/text.h"
#include "transport/core/unique_fd.h"
#include "transport/rdma/verbs.h"

namespace kvcore::transport::rdma {

class FakeNic;
class FakePair;

class FakeFabric final : public Verbs {
 public:
  explicit FakeFabric(std::uint64_t seed) : random_(seed) {}

  Result<std::unique_ptr<Nic>> open(const NicRequest& request) override;

  // Executes one piece of work of a random queue pair, or waits for one. False: there is none.
  bool step();
  std::uint64_t draw(std::uint64_t below) { return random_() % below; }

  // Faults. The n-th execution from now on fails with this status; `executed`: the bytes land (and
  // an immediate arrives) although the sender is told otherwise: a lost acknowledgement.
  void fail_work(int nth, WorkStatus status, bool executed = false) {
    fail_at_ = executions_ + nth;
    fail_status_ = status;
    fail_executed_ = executed;
  }
  void fail_post(int nth) { fail_post_at_ = posts_ + nth; }
  void fail_connect(int count) { fail_connects_ = count; }
  // Work of these NICs neither ends nor fails until they are heard again.
  std::set<std::string> stalled;
  // Every piece of work of these fails with kRetry.
  std::set<std::string> dead;
  // As Soft-RoCE: a write's window is looked up in one step and its bytes are placed in a later
  // one; an invalidation between the two does not wait. The destruction of the owner's pair does.
  bool places_late = false;
  // Called for each local and remote byte range that is touched.
  std::function<void(const std::byte*, std::size_t, bool written)> on_touch;

  std::uint64_t executions() const { return static_cast<std::uint64_t>(executions_); }
  // For real transports on top: each poll executes some work, and every NIC has a timer as its
  // completion_fd. Opening and registering take this long.
  bool runs_by_itself = false;
  std::int64_t open_ns = 0, register_ns = 0;

  std::recursive_mutex mu;
  std::map<std::uint32_t, FakePair*> pairs;
  std::map<std::uint32_t, std::pair<std::uint64_t, std::uint64_t>> memory;  // local key -> range
  std::uint32_t next_pair = 17, next_key = 1;
  bool posting_fails() { return ++posts_ == fail_post_at_; }
  bool connecting_fails() { return fail_connects_ > 0 && fail_connects_-- > 0; }

 private:
  void execute(FakePair* pair);
  void end(std::uint32_t sender, const struct FakeWork& work, WorkStatus status);
  WorkStatus carry_out(FakePair* pair, const FakeWork& work);
  WorkStatus admit(FakePair* pair, const FakeWork& work, FakePair** owner);
  WorkStatus place(FakePair* owner, const FakeWork& work);

  std::mt19937_64 random_;
  int executions_ = 0, fail_at_ = -1, posts_ = 0, fail_post_at_ = -1, fail_connects_ = 0;
  WorkStatus fail_status_ = WorkStatus::kOk;
  bool fail_executed_ = false;
};

struct FakeWindow final : Window {
  FakeWindow(FakeFabric* f, std::uint32_t k) : fabric(f), last_key(k) {}
  ~FakeWindow() override;
  std::uint32_t key() const noexcept override { return last_key; }
  FakeFabric* fabric;
  std::uint32_t last_key;
  FakePair* bound = nullptr;
  std::uint64_t address = 0, bytes = 0;
  bool read = false, write = false;
};

struct FakeWork {
  Work work;
  std::vector<LocalPiece> pieces;
};

class FakePair final : public QueuePair {
 public:
  FakePair(FakeFabric* fabric, FakeNic* nic, Endpoint local)
      : fabric_(fabric), nic_(nic), local_(local) {}
  ~FakePair() override;
  const Endpoint& local() const noexcept override { return local_; }
  Status connect(const Endpoint& remote, const PathSettings& settings) override;
  Status post(std::span<const Work> work, std::size_t* posted) override;
  void flush();  // into the error state: all that is queued completes

  FakeFabric* fabric_;
  FakeNic* nic_;
  Endpoint local_, remote_{};
  bool ready_ = false, error_ = false;
  std::deque<FakeWork> queue_;
  std::deque<WorkDone> send_done_, receive_done_;
  std::map<std::uint32_t, FakeWindow*> windows_;  // by key
  struct Packet {
    std::uint32_t sender;
    FakeWork work;
  };
  std::optional<Packet> placing_;  // let in, not in memory yet
  bool waits_ = false;             // its own packet is being placed
};

class FakeNic final : public Nic {
 public:
  FakeNic(FakeFabric* fabric, NicInfo info, std::uint32_t depth);
  const NicInfo& info() const noexcept override { return info_; }
  Result<std::unique_ptr<RegisteredMemory>> register_memory(const MemoryRequest& r) override;
  Result<std::unique_ptr<Window>> make_window() override {
    const std::lock_guard lock(fabric_->mu);
    if (windows_left == 0) return Error{ErrorCode::kIo, "no window left"};
    --windows_left;
    fabric_->next_key += 256;
    return std::unique_ptr<Window>(new FakeWindow(fabric_, fabric_->next_key));
  }
  Result<std::unique_ptr<QueuePair>> make_queue_pair(std::uint32_t first_packet) override;
  Status post_receives(std::uint32_t count) override {
    const std::lock_guard lock(fabric_->mu);
    receives += count;
    return {};
  }
  // At most one completion of a random queue pair a call, so that orders mix.
  Result<std::size_t> poll(std::span<WorkDone> done) override;
  int completion_fd() const noexcept override { return timer_.get(); }
  Status arm() override;
  int event_fd() const noexcept override { return no_event_.get(); }
  std::vector<NicEvent> take_events() override { return std::exchange(events, {}); }

  FakeFabric* fabric_;
  NicInfo info_;
  std::uint64_t receives = 0;
  std::uint64_t windows_left = 1'000'000;
  std::vector<NicEvent> events;
  UniqueFd timer_, no_event_;  // where the fabric runs by itself
};

}  // namespace kvcore::transport::rdma
