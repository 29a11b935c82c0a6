#include "transport/rdma/inbound.h"

#include <algorithm>
#include <limits>

#include "base/text.h"

namespace kvcore::transport::rdma {
namespace {

Error broken_peer(std::string what) { return {ErrorCode::kCorrupt, std::move(what)}; }

bool has(Rights rights, Rights bit) {
  return (static_cast<unsigned>(rights) & static_cast<unsigned>(bit)) != 0;
}

}  // namespace

Inbound::Inbound(std::vector<Nic*> nics, InboundOptions options)
    : options_(std::move(options)), slot_op_(kMaxSlots, 0) {
  for (Nic* nic : nics) rails_.push_back({.nic = nic, .queue = SendQueue(nic->info().send_depth)});
}

// ---- rails

Status Inbound::on(const Offer& m, std::int64_t now) {
  if (m.rail >= rails_.size())
    return control_.push_back(Refuse{m.rail, m.epoch}), Status{};  // it has more NICs than we
  Rail& rail = rails_[m.rail];
  if (m.epoch <= rail.epoch) return broken_peer(text("rail ", m.rail, " offered twice"));
  kill_rail(m.rail, false);
  rail.epoch = m.epoch;
  KVCORE_ASSIGN_OR_RETURN(const std::uint32_t packet, options_.random_packet());
  auto pair = rail.nic->make_queue_pair(packet);
  if (!pair || !(*pair)->connect(m.sender, options_.path)) {
    control_.push_back(Refuse{m.rail, m.epoch});
    return {};
  }
  rail.pair = std::move(pair).value();
  control_.push_back(Accept{m.rail, m.epoch, rail.pair->local()});
  deliver(now);
  return {};
}

void Inbound::on(const Broken& m, std::int64_t) {
  if (m.rail < rails_.size() && m.epoch == rails_[m.rail].epoch) kill_rail(m.rail, false);
}

// The windows go, then their queue pair: a fence without a wait. In this order, since Soft-RoCE
// lets the destruction of a queue pair wait up to 50 s for the windows that are bound to it.
void Inbound::kill_rail(std::uint32_t index, bool tell) {
  Rail& rail = rails_[index];
  if (rail.pair == nullptr) return;
  for (auto& [id, exposed] : exposed_) {
    exposed.rails[index] = {};
    exposed.undrained &= ~(1U << index);
  }
  rail.pair.reset();
  rail.queue.abandon();
  rail.pending.clear();
  rail.posted.clear();
  if (tell) control_.push_back(Broken{index, rail.epoch, true});
  end_revokes();
}

bool Inbound::owns(std::uint32_t rail, QueuePairNumber number) const {
  return rails_[rail].pair != nullptr && rails_[rail].pair->local().number == number;
}

// ---- windows

Status Inbound::on(const Map& m, std::int64_t now) {
  if (m.rail >= rails_.size())
    return broken_peer(text("rail ", m.rail, " of ", rails_.size(), " asked for"));
  Rail& rail = rails_[m.rail];
  if (rail.pair == nullptr || m.epoch != rail.epoch) return {};  // it learns that it broke
  const auto refuse = [&](Error why) {
    control_.push_back(Mapped{m.grant, m.rail, m.question, std::move(why), Rights::kRead, {}});
    return Status{};
  };
  if (!exposed_.contains(m.grant.id)) {
    options_.exposing(m.grant);
    if (const Status s = open_grant(m, now); !s) {
      options_.concealed(m.grant);
      return refuse(s.error());
    }
  }
  Exposed& exposed = exposed_.at(m.grant.id);
  if (exposed.revoked || exposed.grant.ref != m.grant)
    return refuse({ErrorCode::kStale, "the grant is revoked or of another generation"});
  OnRail& on_rail = exposed.rails[m.rail];
  if (on_rail.ranges.empty()) {
    const auto registered = expose(&exposed, m.rail);
    if (!registered) {
      on_rail = {};
      return refuse(registered.error());
    }
    if (!*registered) {
      std::erase_if(unregistered_,
                    [&](const Map& w) { return w.grant == m.grant && w.rail == m.rail; });
      unregistered_.push_back(m);
      return {};
    }
  }
  on_rail.questions.push_back(m.question);
  answer(&exposed, m.rail);
  post_pending(m.rail);
  return {};
}

Status Inbound::open_grant(const Map& m, std::int64_t now) {
  KVCORE_ASSIGN_OR_RETURN(Grant grant, options_.grant(m.grant, now));
  if (grant.ranges.size() > kMaxWindows)
    return Error{ErrorCode::kUnsupported, text("the grant has ", grant.ranges.size(),
                                               " ranges, rdma can open ", kMaxWindows)};
  exposed_.emplace(m.grant.id,
                   Exposed{.grant = std::move(grant), .rails = std::vector<OnRail>(rails_.size())});
  return {};
}

// False: the region is not registered yet.
Result<bool> Inbound::expose(Exposed* exposed, std::uint32_t index) {
  Rail& rail = rails_[index];
  const Grant& grant = exposed->grant;
  KVCORE_ASSIGN_OR_RETURN(const RegisteredMemory* memory, options_.memory(grant.region, index));
  if (memory == nullptr) return false;
  const auto base = reinterpret_cast<std::uint64_t>(options_.base(grant.region));
  OnRail& on_rail = exposed->rails[index];
  for (const Range& r : grant.ranges) {
    KVCORE_ASSIGN_OR_RETURN(auto window, rail.nic->make_window());
    const std::uint32_t key = following_key(window->key());
    on_rail.ranges.push_back({std::move(window), base + r.offset, r.bytes, key, memory});
  }
  for (std::size_t i = 0; i < on_rail.ranges.size(); ++i)
    rail.pending.push_back({WorkKind::kBind, grant.ref.id, i});
  on_rail.binding = on_rail.ranges.size();
  return true;
}

void Inbound::answer(Exposed* exposed, std::uint32_t index) {
  OnRail& on_rail = exposed->rails[index];
  if (on_rail.binding > 0 || exposed->revoked) return;
  const Grant& grant = exposed->grant;
  Mapped mapped{grant.ref, index, 0, {}, grant.rights, {}};
  for (std::size_t i = 0; i < on_rail.ranges.size(); ++i)
    mapped.ranges.push_back({grant.ranges[i].offset, grant.ranges[i].bytes,
                             on_rail.ranges[i].address, on_rail.ranges[i].key, 0});
  for (const std::uint32_t question : std::exchange(on_rail.questions, {})) {
    mapped.question = question;
    control_.push_back(mapped);
  }
}

void Inbound::post_pending(std::uint32_t index) {
  Rail& rail = rails_[index];
  while (rail.pair != nullptr && !rail.pending.empty() && rail.queue.free() > 0) {
    const PendingWork next = rail.pending.front();
    const Exposed& exposed = exposed_.at(next.grant);
    const BoundRange& range = exposed.rails[index].ranges[next.window];
    const auto ticket = rail.queue.next(rail.pending.size() == 1 || rail.queue.free() == 1);
    Work work;
    work.id = ticket.id;
    work.signalled = ticket.signalled;
    work.kind = next.kind;
    work.window = range.window.get();
    work.memory = range.memory;
    work.remote_address = range.address;
    work.window_bytes = range.bytes;
    work.remote_key = range.key;
    work.remote_read = has(exposed.grant.rights, Rights::kRead);
    work.remote_write = has(exposed.grant.rights, Rights::kWrite);
    std::size_t posted = 0;
    if (!rail.pair->post({&work, 1}, &posted)) {
      rail.queue.unpost(1);
      return kill_rail(index, true);
    }
    rail.pending.pop_front();
    rail.posted.push_back({ticket.id, next.kind, next.grant});
  }
}

Status Inbound::on_work(std::uint32_t index, const WorkDone& done, std::int64_t now) {
  Rail& rail = rails_[index];
  if (done.status != WorkStatus::kOk) {
    kill_rail(index, true);
    deliver(now);
    return {};
  }
  if (done.kind == WorkKind::kReceive) {
    const Immediate immediate = Immediate::unpack(done.immediate);
    if (!counters_.arrived(immediate, index))
      return broken_peer(text("immediate ", done.immediate, " on rail ", index));
    check_complete(immediate.slot);
    deliver(now);
    return {};
  }
  if (!rail.queue.retire(done.id)) return {};
  while (!rail.posted.empty() && rail.posted.front().id <= done.id) {
    const PostedWork work = rail.posted.front();
    rail.posted.pop_front();
    const auto it = exposed_.find(work.grant);
    if (it == exposed_.end()) continue;
    OnRail& on_rail = it->second.rails[index];
    if (work.kind == WorkKind::kInvalidate) {
      if (--on_rail.invalidating == 0) on_rail.ranges.clear();
    } else if (--on_rail.binding == 0) {
      answer(&it->second, index);
    }
  }
  end_revokes();
  return {};
}

bool Inbound::revoke(GrantRef ref, std::int64_t now) {
  const auto it = exposed_.find(ref.id);
  if (it == exposed_.end() || it->second.grant.ref != ref) return true;
  const bool mapped =
      std::ranges::any_of(it->second.rails, [](const OnRail& r) { return !r.ranges.empty(); });
  if (!mapped) {
    exposed_.erase(it);
    options_.concealed(ref);
    return true;
  }
  it->second.report = true;
  if (!it->second.revoked) begin_revoke(ref.id, now);
  return false;
}

void Inbound::begin_revoke(std::uint64_t id, std::int64_t now) {
  Exposed& exposed = exposed_.at(id);
  exposed.revoked = true;
  exposed.fence_until = now + kFenceNs;
  control_.push_back(Unmapped{exposed.grant.ref});
  for (std::uint32_t r = 0; r < rails_.size(); ++r) {
    OnRail& on_rail = exposed.rails[r];
    if (!on_rail.ranges.empty()) exposed.undrained |= 1U << r;
    on_rail.invalidating = on_rail.ranges.size();
    for (std::size_t i = 0; i < on_rail.ranges.size(); ++i)
      rails_[r].pending.push_back({WorkKind::kInvalidate, id, i});
  }
  for (std::uint32_t r = 0; r < rails_.size(); ++r) post_pending(r);
}

void Inbound::on(const Drained& m) {
  const auto it = exposed_.find(m.grant.id);
  if (it == exposed_.end() || it->second.grant.ref != m.grant || !it->second.revoked) return;
  it->second.undrained = 0;
  end_revokes();
}

// A grant is fenced when no rail has a window of it, or a packet for one, any more.
void Inbound::end_revokes() {
  std::erase_if(exposed_, [&](const auto& entry) {
    const Exposed& exposed = entry.second;
    if (!exposed.revoked || exposed.undrained != 0) return false;
    for (const OnRail& r : exposed.rails)
      if (!r.ranges.empty()) return false;
    if (exposed.report) fenced_.push_back(exposed.grant.ref);
    options_.concealed(exposed.grant.ref);
    return true;
  });
}

// ---- arrivals

Status Inbound::on(const Begin& m, std::int64_t) {
  if (m.op == 0 || writes_.contains(m.op)) return broken_peer(text("write ", m.op, " begun twice"));
  if (slot_op_[m.slot] != 0) return broken_peer(text("slot ", m.slot, " is in use"));
  KVCORE_RETURN_IF_ERROR(options_.charge(kBeginCredit));
  slot_op_[m.slot] = m.op;
  writes_.emplace(m.op, Write{.begin = m});
  order_[static_cast<std::size_t>(m.priority)].push_back({false, m.op, {}});
  return {};
}

Status Inbound::on(const Posted& m, std::int64_t now) {
  if (m.rails >= 1U << rails_.size())
    return broken_peer(text("write ", m.op, " ends on rails ", m.rails));
  const auto it = writes_.find(m.op);
  if (it == writes_.end() || it->second.over) return {};  // its verdict is on its way
  counters_.expect(it->second.begin.slot, m.attempt, m.rails);
  check_complete(it->second.begin.slot);
  deliver(now);
  return {};
}

void Inbound::on(const Abort& m, std::int64_t now) {
  const auto it = writes_.find(m.op);
  if (it == writes_.end()) return;
  it->second.over = true;
  counters_.forget(it->second.begin.slot);
  slot_op_[it->second.begin.slot] = 0;
  deliver(now);
}

Status Inbound::on(Text m, std::int64_t now) {
  KVCORE_RETURN_IF_ERROR(options_.charge(text_credit(m.bytes.size())));
  order_[static_cast<std::size_t>(m.priority)].push_back({true, m.op, std::move(m.bytes)});
  deliver(now);
  return {};
}

void Inbound::check_complete(std::uint32_t slot) {
  const std::uint64_t op = slot_op_[slot];
  if (op != 0 && counters_.complete(slot)) writes_.at(op).complete = true;
}

void Inbound::deliver(std::int64_t now) {
  for (auto& queue : order_) {
    while (!queue.empty()) {
      Item& item = queue.front();
      if (item.is_message) {
        deliveries_.emplace_back(std::move(item.message));
        if (item.op != 0) control_.push_back(Verdict{item.op, {}});
      } else {
        const auto it = writes_.find(item.op);
        if (!it->second.over && !it->second.complete) break;
        if (it->second.over)
          options_.give_back(kBeginCredit);
        else
          announce(&it->second, now);
        writes_.erase(it);
      }
      queue.pop_front();
    }
  }
}

void Inbound::announce(Write* write, std::int64_t now) {
  const Begin& b = write->begin;
  counters_.forget(b.slot);
  slot_op_[b.slot] = 0;
  const auto grant = options_.grant(b.grant, now);
  if (!grant) {
    options_.give_back(kBeginCredit);
    control_.push_back(Verdict{b.op, grant.error()});
    return;
  }
  bytes_arrived_ += b.bytes;
  deliveries_.emplace_back(Arrived{b.grant, b.tag, b.bytes, b.notify});
  control_.push_back(Verdict{b.op, {}});
}

// ---- time

Status Inbound::step(std::int64_t now) {
  for (const Map& waiting : std::exchange(unregistered_, {}))
    KVCORE_RETURN_IF_ERROR(on(waiting, now));
  std::vector<std::uint64_t> expired;
  std::vector<std::uint32_t> late;
  for (auto& [id, exposed] : exposed_) {
    if (!exposed.revoked && exposed.grant.expires_ns != 0 && now >= exposed.grant.expires_ns)
      expired.push_back(id);
    if (!exposed.revoked || now < exposed.fence_until) continue;
    for (std::uint32_t r = 0; r < rails_.size(); ++r)
      if (!exposed.rails[r].ranges.empty() || (exposed.undrained & 1U << r) != 0) late.push_back(r);
  }
  for (const std::uint64_t id : expired) begin_revoke(id, now);
  for (const std::uint32_t r : late) kill_rail(r, true);
  for (std::uint32_t r = 0; r < rails_.size(); ++r) post_pending(r);
  end_revokes();
  deliver(now);
  return {};
}

std::int64_t Inbound::next_timer_ns() const {
  std::int64_t next = std::numeric_limits<std::int64_t>::max();
  for (const auto& [id, exposed] : exposed_) {
    if (exposed.revoked)
      next = std::min(next, exposed.fence_until);
    else if (exposed.grant.expires_ns != 0)
      next = std::min(next, exposed.grant.expires_ns);
  }
  return next;
}

std::optional<Control> Inbound::next_control() {
  if (control_.empty()) return std::nullopt;
  Control control = std::move(control_.front());
  control_.pop_front();
  return control;
}

void Inbound::close() {
  for (std::uint32_t r = 0; r < rails_.size(); ++r) kill_rail(r, false);
  for (auto& [id, exposed] : exposed_) {
    if (exposed.report) fenced_.push_back(exposed.grant.ref);
    options_.concealed(exposed.grant.ref);
  }
  exposed_.clear();
}

std::size_t Inbound::windows() const {
  std::size_t count = 0;
  for (const auto& [id, exposed] : exposed_)
    for (const OnRail& r : exposed.rails) count += r.ranges.size();
  return count;
}

}  // namespace kvcore::transport::rdma
