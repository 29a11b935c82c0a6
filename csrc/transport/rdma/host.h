// What the rdma links of one Transport share: opened NICs, registrations, and the fence.
//
// The NICs are opened for the first link, when the peer's address is known, and stay open. Their
// completions are taken by whichever channel works first and handed to the link that owns the queue
// pair. A revoke comes from any thread: when no link ever opened the grant it is fenced at once,
// else it waits here for the I/O thread, and the event Fenced follows.
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
#include "transport/rdma/memory.h"
#include "transport/rdma/peer.h"

namespace kvcore::transport::rdma {

class Host {
 public:
  // One link, as the host drives it.
  class User {
   public:
    virtual ~User() = default;
    virtual Result<bool> on_work(const Nic* nic, const WorkDone& done, std::int64_t now) = 0;
    virtual void on_nic_event(const Nic* nic, NicEvent event, std::int64_t now) = 0;
    virtual bool revoke(GrantRef grant, std::int64_t now) = 0;  // as Inbound::revoke
    virtual void fail(Status why) = 0;
  };

  explicit Host(RdmaOptions options) : options_(std::move(options)) {}

  void attach(Shared* shared);  // once, before any other thread
  Status open(const Gid& peer);
  std::vector<Nic*> nics() const;
  const RdmaOptions& options() const { return options_; }

  void add(User* user) { users_.insert(user); }
  void remove(User* user);

  // Takes all completions and events there are, and the revokes that wait.
  void poll(std::int64_t now);

  Result<const RegisteredMemory*> memory(RegionId region, std::uint32_t rail);
  std::byte* base(RegionId region) const;
  void forget(RegionId region) { regions_.erase(static_cast<std::uint32_t>(region)); }

  void exposing(GrantRef grant);
  void concealed(GrantRef grant);
  void fenced(User* user, GrantRef grant);

 private:
  Fence on_revoke(GrantRef grant);
  void run_revokes(std::int64_t now);
  void hand_over(Nic* nic, const WorkDone& done, std::int64_t now);

  const RdmaOptions options_;
  Shared* shared_ = nullptr;
  std::vector<std::unique_ptr<Nic>> nics_;
  std::set<User*> users_;
  std::unordered_map<std::uint32_t, std::vector<RegionMemory>> regions_;  // by rail; before nics_
  std::map<std::uint64_t, std::set<User*>> waiting_;                      // fences, by GrantRef::id

  std::mutex mu_;
  std::unordered_map<std::uint64_t, int> exposed_;  // GrantRef::id -> links that opened it
  std::vector<GrantRef> revokes_;
};

}  // namespace kvcore::transport::rdma
