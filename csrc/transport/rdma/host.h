// What the rdma links of one Transport share: opened NICs, registrations, the rate of each NIC, and
// the fence.
//
// The NICs are opened for the first link, when the peer's address is known, and stay open; regions
// are registered with all of them from then on. Both may take seconds and happen in a thread of
// their own (slow_work.h): until then open() is not over and memory() is null, and the users are
// told when there is news. Completions are taken by whichever channel works first and handed to the
// link that owns the queue pair. A revoke comes from any thread: when no link ever opened the grant
// it is fenced at once, else it waits here for the I/O thread, and the event Fenced follows.
//
// Thread rules: the I/O thread, but for on_revoke.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "transport/core/shared.h"
#include "transport/rdma/host_system.h"
#include "transport/rdma/memory.h"
#include "transport/rdma/peer.h"
#include "transport/rdma/rate_control.h"
#include "transport/rdma/slow_work.h"
#include "transport/socket/pacer.h"

namespace kvcore::transport::rdma {

class Host {
 public:
  // One link, as the host drives it.
  class User {
   public:
    virtual ~User() = default;
    virtual Result<bool> on_work(const Nic* nic, const WorkDone& done, std::int64_t now) = 0;
    virtual void on_nic_event(const Nic* nic, NicEvent event, std::int64_t now) = 0;
    virtual void on_ready() = 0;  // NICs or a registration, or why there are none
    virtual bool revoke(GrantRef grant, std::int64_t now) = 0;  // as Inbound::revoke
    virtual void fail(Status why) = 0;
  };
  struct Opening {
    bool over = false;
    Status status;
  };

  Host(RdmaOptions options, HostSystem system)
      : options_(std::move(options)), system_(std::move(system)) {}

  void attach(Shared* shared);  // once, before any other thread
  // NotFound, InvalidArgument, Unsupported, Io in its status. The next link tries again.
  std::shared_ptr<const Opening> open(const Gid& peer);
  std::vector<Nic*> nics() const;
  const RdmaOptions& options() const { return options_; }
  Result<std::uint32_t> random_packet() const;  // 24 bits

  void add(User* user) { users_.insert(user); }
  void remove(User* user);

  // Takes all completions and events there are, finished slow work, and the revokes that wait.
  void poll(std::int64_t now);

  // Null: not registered yet, on_ready follows. Io, NotFound.
  Result<const RegisteredMemory*> memory(RegionId region, std::uint32_t rail);
  std::byte* base(RegionId region) const;
  void region_changed(RegionId region, bool gone);

  // When the next bytes may be posted to a NIC, by its congestion (rate_control.h).
  std::int64_t ready_ns(std::uint32_t rail, std::int64_t now);
  void on_posted(std::uint32_t rail, std::uint64_t bytes) { rails_[rail]->pacer.spend(bytes); }
  std::int64_t next_look_ns() const;  // INT64_MAX = none is due
  RailInfo info(std::uint32_t rail) const;

  void exposing(GrantRef grant);
  void concealed(GrantRef grant);
  void fenced(User* user, GrantRef grant);

 private:
  struct Rail {
    std::unique_ptr<Nic> nic;
    std::unique_ptr<NicCounters> counters;  // null: this device has none
    RateControl control;
    Pacer pacer{};
    NicCounts counts{};
    std::int64_t next_look = 0;
  };
  using Rails = std::vector<std::unique_ptr<Rail>>;
  struct Registration {
    bool over = false;
    Status status;
    std::vector<RegionMemory> rails{};
  };

  Result<Rails> open_nics(const Gid& peer) const;  // the slow thread
  void opened(Result<Rails> rails);
  Status register_soon(RegionId region);
  void registered(std::uint32_t region, Result<std::vector<RegionMemory>> made);
  void drop(std::vector<RegionMemory> rails);
  void tell_ready();
  void look(std::int64_t now);
  Fence on_revoke(GrantRef grant);
  void run_revokes(std::int64_t now);
  void hand_over(Nic* nic, const WorkDone& done, std::int64_t now);

  const RdmaOptions options_;
  const HostSystem system_;
  Shared* shared_ = nullptr;
  Rails rails_;
  std::shared_ptr<Opening> opening_;  // null: nobody asked, or the last attempt failed
  std::set<User*> users_;
  std::unordered_map<std::uint32_t, Registration> regions_;  // goes before rails_
  std::map<std::uint64_t, std::set<User*>> waiting_;         // fences, by GrantRef::id

  std::mutex mu_;
  std::unordered_map<std::uint64_t, int> exposed_;  // GrantRef::id -> links that opened it
  std::vector<GrantRef> revokes_;

  std::unique_ptr<SlowWork> slow_;  // from the first open on; last: it uses the rest
};

}  // namespace kvcore::transport::rdma
