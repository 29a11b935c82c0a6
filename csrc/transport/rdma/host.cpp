#include "transport/rdma/host.h"

#include <algorithm>
#include <array>
#include <limits>
#include <span>

#include "base/text.h"

namespace kvcore::transport::rdma {

namespace {
constexpr std::int64_t kIdleLookNs = 1'000'000'000;  // where counters are read for people only
}  // namespace

void Host::attach(Shared* shared) {
  shared_ = shared;
  shared->grants.set_on_revoke([this](GrantRef grant) { return on_revoke(grant); });
}

std::shared_ptr<const Host::Opening> Host::open(const Gid& peer) {
  if (opening_ != nullptr) return opening_;
  opening_ = std::make_shared<Opening>();
  if (slow_ == nullptr) slow_ = std::make_unique<SlowWork>([this] { shared_->wake(); });
  slow_->submit([this, peer] {
    auto rails = std::make_shared<Result<Rails>>(open_nics(peer));
    return [this, rails] { opened(std::move(*rails)); };
  });
  return opening_;
}

Result<Host::Rails> Host::open_nics(const Gid& peer) const {
  KVCORE_ASSIGN_OR_RETURN(Verbs * verbs, system_.verbs());
  KVCORE_ASSIGN_OR_RETURN(
      const auto chosen, choose_ports(system_.ports(), options_.devices, options_.gid_index, peer));
  Rails rails;
  for (const Choice& c : chosen) {
    if (rails.size() == kMaxRails) break;
    NicRequest request{.device = c.port.device, .port = c.port.number, .gid_index = c.entry.index};
    KVCORE_ASSIGN_OR_RETURN(auto nic, verbs->open(request));
    auto counters = system_.counters(c.port);
    if (!counters->read().ok() || c.port.rate_gbps <= 0) counters.reset();
    rails.push_back(std::make_unique<Rail>(
        Rail{std::move(nic), std::move(counters), RateControl(c.port.rate_gbps * 1e9 / 8)}));
  }
  return rails;
}

void Host::opened(Result<Rails> rails) {
  const auto opening = rails.ok() ? opening_ : std::exchange(opening_, nullptr);
  opening->over = true;
  if (rails.ok()) {
    rails_ = std::move(rails).value();
    for (const auto& [id, view] : shared_->grants.regions()) region_changed(id, false);
  } else {
    opening->status = rails.error();
  }
  tell_ready();
}

void Host::tell_ready() {
  for (User* user : users_) user->on_ready();
}

std::vector<Nic*> Host::nics() const {
  std::vector<Nic*> out;
  for (const auto& rail : rails_) out.push_back(rail->nic.get());
  return out;
}

Result<std::uint32_t> Host::random_packet() const {
  std::uint32_t value = 0;
  KVCORE_RETURN_IF_ERROR(system_.random->fill(std::as_writable_bytes(std::span(&value, 1))));
  return value & 0xffffffU;
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
  if (slow_ != nullptr) slow_->run_finished();
  std::array<WorkDone, 16> done;
  for (const auto& rail : rails_) {
    Nic* nic = rail->nic.get();
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
      for (std::size_t i = 0; i < *n; ++i) hand_over(nic, done[i], now);
      if (*n == 0) break;
    }
    for (const NicEvent event : nic->take_events())
      for (User* user : users_) user->on_nic_event(nic, event, now);
  }
  look(now);
  run_revokes(now);
}

// ---- registrations

Result<const RegisteredMemory*> Host::memory(RegionId region, std::uint32_t rail) {
  const auto it = regions_.find(static_cast<std::uint32_t>(region));
  if (it == regions_.end()) {
    KVCORE_RETURN_IF_ERROR(register_soon(region));
    return static_cast<const RegisteredMemory*>(nullptr);
  }
  if (!it->second.over) return static_cast<const RegisteredMemory*>(nullptr);
  if (!it->second.status.ok()) {  // the next operation tries again
    const auto failed = regions_.extract(it);
    return failed.mapped().status.error();
  }
  return &it->second.rails.at(rail).registered();
}

void Host::region_changed(RegionId region, bool gone) {
  const auto it = regions_.find(static_cast<std::uint32_t>(region));
  if (gone && it != regions_.end()) {
    drop(std::move(it->second.rails));
    regions_.erase(it);
  } else if (!gone && it == regions_.end() && !rails_.empty()) {
    (void)register_soon(region);  // in vain: it is gone already, and nobody asks for it
  }
}

Status Host::register_soon(RegionId region) {
  KVCORE_ASSIGN_OR_RETURN(const RegionView view, shared_->grants.region(region));
  const auto id = static_cast<std::uint32_t>(region);
  regions_.emplace(id, Registration{});
  slow_->submit([this, id, view, nics = nics()] {
    auto made = std::make_shared<Result<std::vector<RegionMemory>>>(std::vector<RegionMemory>());
    for (Nic* nic : nics) {
      auto memory = RegionMemory::make(nic, view.base, view.bytes, nullptr);
      if (memory)
        made->value().push_back(std::move(memory).value());
      else
        *made = memory.error();
      if (!memory) break;
    }
    return [this, id, made] { registered(id, std::move(*made)); };
  });
  return {};
}

void Host::registered(std::uint32_t region, Result<std::vector<RegionMemory>> made) {
  const auto it = regions_.find(region);
  if (it == regions_.end()) {  // unregistered meanwhile
    if (made) drop(std::move(made).value());
    return;
  }
  it->second.over = true;
  if (made)
    it->second.rails = std::move(made).value();
  else
    it->second.status = made.error();
  tell_ready();
}

void Host::drop(std::vector<RegionMemory> rails) {
  if (rails.empty()) return;
  slow_->submit([held = std::make_shared<std::vector<RegionMemory>>(std::move(rails))] {
    held->clear();
    return [] {};
  });
}

std::byte* Host::base(RegionId region) const {
  const auto view = shared_->grants.region(region);
  return view ? view->base : nullptr;
}

// ---- rates

std::int64_t Host::ready_ns(std::uint32_t rail, std::int64_t now) {
  return rails_[rail]->pacer.ready_ns(now);
}

std::int64_t Host::next_look_ns() const {
  std::int64_t next = std::numeric_limits<std::int64_t>::max();
  for (const auto& rail : rails_)
    if (rail->counts.tells_congestion) next = std::min(next, rail->next_look);
  return next;
}

void Host::look(std::int64_t now) {
  for (const auto& rail : rails_) {
    if (rail->counters == nullptr || now < rail->next_look) continue;
    const auto counts = rail->counters->read();
    if (!counts) continue;  // a device that goes away says so by its completions
    rail->next_look = now + (counts->tells_congestion ? RateControl::kIntervalNs : kIdleLookNs);
    const std::uint64_t before = rail->control.rate();
    rail->counts = *counts;
    rail->control.look(*counts, now);
    if (rail->control.rate() != before) rail->pacer.set_rate(rail->control.rate(), now);
  }
}

RailInfo Host::info(std::uint32_t rail) const {
  const Rail& r = *rails_[rail];
  RailInfo info;
  info.device = r.nic->info().name;
  info.rate_bytes_per_s = r.control.rate();
  info.rate_cuts = r.control.cuts();
  info.congestion = r.counts.congestion;
  info.marked = r.counts.marked;
  info.lost = r.counts.lost;
  return info;
}

// ---- the fence

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
