#include "transport/rdma/host.h"

#include <algorithm>
#include <array>

#include "base/text.h"
#include "transport/rdma/device.h"

namespace kvcore::transport::rdma {

void Host::attach(Shared* shared) {
  shared_ = shared;
  shared->grants.set_on_revoke([this](GrantRef grant) { return on_revoke(grant); });
}

Status Host::open(const Gid& peer) {
  if (!nics_.empty()) return {};
  KVCORE_ASSIGN_OR_RETURN(Verbs * verbs, system_verbs());
  KVCORE_ASSIGN_OR_RETURN(const auto chosen,
                          choose_ports(list_ports(), options_.devices, options_.gid_index, peer));
  std::vector<std::unique_ptr<Nic>> opened;
  for (const Choice& c : chosen) {
    if (opened.size() == kMaxRails) break;
    NicRequest request{.device = c.port.device, .port = c.port.number, .gid_index = c.entry.index};
    KVCORE_ASSIGN_OR_RETURN(auto nic, verbs->open(request));
    opened.push_back(std::move(nic));
  }
  nics_ = std::move(opened);
  return {};
}

std::vector<Nic*> Host::nics() const {
  std::vector<Nic*> out;
  for (const auto& nic : nics_) out.push_back(nic.get());
  return out;
}

void Host::remove(User* user) {
  users_.erase(user);
  // Its windows are gone, so what waited for it alone is fenced.
  std::vector<std::uint64_t> ids;
  for (const auto& [id, users] : waiting_)
    if (users.contains(user)) ids.push_back(id);
  for (const std::uint64_t id : ids) fenced(user, GrantRef{id, 0});
}

void Host::hand_over(Nic* nic, const WorkDone& done, std::int64_t now) {
  if (done.kind == WorkKind::kReceive) {
    if (const Status s = nic->post_receives(1); !s) {
      for (User* user : users_) user->fail(s);
    }
  }
  for (User* user : users_) {
    const auto known = user->on_work(nic, done, now);
    if (!known) user->fail(known.error());
    if (!known || *known) return;
  }
  // Nobody's: of a queue pair that was destroyed meanwhile.
}

void Host::poll(std::int64_t now) {
  std::array<WorkDone, 16> done;
  for (const auto& nic : nics_) {
    const Status armed = nic->arm();
    if (!armed) {
      for (User* user : users_) user->fail(armed);
    }
    for (;;) {
      const auto n = nic->poll(done);
      if (!n) {
        for (User* user : users_) user->fail(n.error());
        break;
      }
      for (std::size_t i = 0; i < *n; ++i) hand_over(nic.get(), done[i], now);
      if (*n == 0) break;
    }
    for (const NicEvent event : nic->take_events())
      for (User* user : users_) user->on_nic_event(nic.get(), event, now);
  }
  run_revokes(now);
}

Result<const RegisteredMemory*> Host::memory(RegionId region, std::uint32_t rail) {
  auto& rails = regions_[static_cast<std::uint32_t>(region)];
  if (rails.empty()) {
    KVCORE_ASSIGN_OR_RETURN(const RegionView view, shared_->grants.region(region));
    std::vector<RegionMemory> made;
    for (const auto& nic : nics_) {
      KVCORE_ASSIGN_OR_RETURN(auto memory,
                              RegionMemory::make(nic.get(), view.base, view.bytes, nullptr));
      made.push_back(std::move(memory));
    }
    rails = std::move(made);
  }
  return &rails.at(rail).registered();
}

std::byte* Host::base(RegionId region) const {
  const auto view = shared_->grants.region(region);
  return view ? view->base : nullptr;
}

void Host::exposing(GrantRef grant) {
  const std::lock_guard lock(mu_);
  ++exposed_[grant.id];
}

void Host::concealed(GrantRef grant) {
  const std::lock_guard lock(mu_);
  const auto it = exposed_.find(grant.id);
  if (it != exposed_.end() && --it->second == 0) exposed_.erase(it);
}

Fence Host::on_revoke(GrantRef grant) {
  {
    const std::lock_guard lock(mu_);
    if (!exposed_.contains(grant.id)) return Fence::kDone;
    revokes_.push_back(grant);
  }
  shared_->wake();
  return Fence::kPending;
}

void Host::run_revokes(std::int64_t now) {
  std::vector<GrantRef> revokes;
  {
    const std::lock_guard lock(mu_);
    revokes.swap(revokes_);
  }
  for (const GrantRef grant : revokes) {
    auto& waiting = waiting_[grant.id];
    for (User* user : users_)
      if (!user->revoke(grant, now)) waiting.insert(user);
    fenced(nullptr, grant);
  }
}

void Host::fenced(User* user, GrantRef grant) {
  const auto it = waiting_.find(grant.id);
  if (it == waiting_.end()) return;
  it->second.erase(user);
  if (!it->second.empty()) return;
  waiting_.erase(it);
  if (shared_->grants.fenced(grant)) shared_->events.push(Fenced{grant});
}

}  // namespace kvcore::transport::rdma
