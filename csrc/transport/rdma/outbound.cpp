#include "transport/rdma/outbound.h"

#include <algorithm>
#include <limits>

#include "base/text.h"

namespace kvcore::transport::rdma {
namespace {

constexpr std::int64_t kAcknowledgeNs = 1'000'000'000;  // it has arrived, our own queue lags
constexpr int kLookAhead = 64;  // operations of a class that wait for windows and are passed by

bool allows(Rights rights, bool is_read) {
  const auto bit = static_cast<unsigned>(is_read ? Rights::kRead : Rights::kWrite);
  return (static_cast<unsigned>(rights) & bit) != 0;
}

}  // namespace

Outbound::Outbound(std::vector<Nic*> nics, OutboundOptions options)
    : options_(std::move(options)), attempts_(kMaxSlots, 0) {
  for (Nic* nic : nics) rails_.push_back({.nic = nic, .queue = SendQueue(nic->info().send_depth)});
  for (std::uint32_t slot = kMaxSlots; slot-- > 0;) free_slots_.push_back(slot);
}

Outbound::Op* Outbound::find(std::uint64_t op) {
  const auto it = ops_.find(op);
  return it == ops_.end() ? nullptr : &it->second;
}

void Outbound::start(Job job) {
  const std::uint64_t id = job.op;
  const auto c = static_cast<std::size_t>(job.priority);
  const bool is_read = job.is_read;
  Op op{.job = std::move(job)};
  op.announced = is_read;  // a read has no place in the order of arrivals
  ops_.emplace(id, std::move(op));
  if (is_read)
    active_[c].push_back(id);
  else
    waiting_[c].push_back({false, id, {}});
}

void Outbound::send(Priority priority, std::vector<std::byte> message, std::uint64_t op) {
  if (op != 0) sends_.insert(op);
  waiting_[static_cast<std::size_t>(priority)].push_back({true, op, std::move(message)});
}

void Outbound::give_up_send(std::uint64_t op, const Status& why) {
  bool taken_back = false;
  for (auto& queue : waiting_)
    std::erase_if(queue, [&](const Item& i) {
      if (!i.is_message || i.op != op) return false;
      options_.on_unqueued(i.message.size());
      return taken_back = true;
    });
  sends_.erase(op);
  done_.push_back({op, Error{why.error().code,
                             text(why.error().message,
                                  taken_back ? "; the message was taken back"
                                             : "; the message had left, the peer may get it")}});
}

void Outbound::give_up(std::uint64_t id, Status why, std::int64_t now) {
  if (sends_.contains(id)) return give_up_send(id, why);
  Op* op = find(id);
  if (op != nullptr && !op->ending) stop(op, std::move(why), true, now);
}

// Nothing more of it is posted; it is over when its queues hold nothing of it.
void Outbound::stop(Op* op, Status why, bool tell, std::int64_t now) {
  const std::uint64_t id = op->job.op;
  if (tell && op->announced && !op->job.is_read && !op->settled) urgent_.push_back(Abort{id});
  op->ending = true;
  op->end = std::move(why);
  op->drain_until = now + (op->end.ok() ? kAcknowledgeNs : kDrainGraceNs);
  ending_.insert(id);
  settle(op);
}

void Outbound::settle(Op* op) {
  if (op->outstanding > 0) return;
  const std::uint64_t id = op->job.op;
  if (op->ending) return finish(id, op->end);
  if (op->replay) {  // from the beginning, once its grant has been looked up again
    op->replay = false;
    op->plan = {};
    op->next_chunk = 0;
    ++replays_;
    drop_map(op->job.grant.id);
    again_.push_back(id);
    return;
  }
  const bool posted = !op->plan.chunks.empty() && op->next_chunk == op->plan.chunks.size();
  if (op->job.is_read && posted) finish(id, {});
}

void Outbound::finish(std::uint64_t id, Status status) {
  const auto it = ops_.find(id);
  if (it->second.announced && !it->second.job.is_read) free_slots_.push_back(it->second.slot);
  ending_.erase(id);
  ops_.erase(it);
  done_.push_back({id, std::move(status)});
}

void Outbound::drop_map(std::uint64_t grant) { maps_.erase(grant); }

// ---- the owner's answers

Status Outbound::on(const Accept& m, std::int64_t now) {
  if (m.rail >= rails_.size())
    return Error{ErrorCode::kCorrupt, text("rail ", m.rail, " of ", rails_.size(), " accepted")};
  Rail& rail = rails_[m.rail];
  if (rail.state != RailState::kOffered || m.epoch != rail.epoch) return {};  // of an older offer
  if (const Status s = rail.pair->connect(m.owner, options_.path); !s) {
    break_rail(m.rail, true, true, now);
    return {};
  }
  rail.state = RailState::kReady;
  return {};
}

void Outbound::on(const Refuse& m, std::int64_t now) {
  if (m.rail >= rails_.size() || m.epoch != rails_[m.rail].epoch) return;
  if (rails_[m.rail].state == RailState::kOffered) break_rail(m.rail, true, false, now);
}

void Outbound::on(const Broken& m, std::int64_t now) {
  if (m.rail >= rails_.size() || m.epoch != rails_[m.rail].epoch) return;
  break_rail(m.rail, false, false, now);
}

Status Outbound::on(const Mapped& m, std::int64_t now) {
  if (m.rail >= rails_.size())
    return Error{ErrorCode::kCorrupt, text("rail ", m.rail, " of ", rails_.size(), " mapped")};
  const auto it = maps_.find(m.grant.id);
  if (it == maps_.end() || it->second.generation != m.grant.generation ||
      it->second.rails[m.rail].question != m.question)
    return {};  // an answer to a question of before
  if (m.status.ok()) {
    it->second.rights = m.rights;
    it->second.rails[m.rail].ranges = m.ranges;
    return {};
  }
  maps_.erase(it);
  std::vector<std::uint64_t> ids;
  for (const auto& [id, op] : ops_)
    if (op.job.grant == m.grant && op.announced && !op.ending) ids.push_back(id);
  for (const std::uint64_t id : ids) stop(find(id), m.status, true, now);
  return {};
}

void Outbound::on(const Unmapped& m, std::int64_t now) {
  drop_map(m.grant.id);
  std::vector<std::uint64_t> ids;  // those that have begun: the windows are dead under them
  for (const auto& [id, op] : ops_)
    if (op.job.grant == m.grant && !op.plan.chunks.empty() && !op.ending) ids.push_back(id);
  const Error stale{ErrorCode::kStale, "the grant was revoked"};
  for (const std::uint64_t id : ids) stop(find(id), stale, true, now);
  if (in_queues_.contains(m.grant.id))
    draining_.insert_or_assign(m.grant.id, m.grant);
  else
    urgent_.push_back(Drained{m.grant});
}

// The last chunk of a grant that the owner took back was acknowledged, or its rail was broken, of
// which the owner is told before.
void Outbound::left_queue(const GrantRef& grant) {
  const auto it = in_queues_.find(grant.id);
  if (--it->second > 0) return;
  in_queues_.erase(it);
  const auto waited_for = draining_.extract(grant.id);
  if (waited_for) urgent_.push_back(Drained{waited_for.mapped()});
}

void Outbound::on(const Verdict& m, std::int64_t now) {
  if (sends_.erase(m.op) > 0) {
    done_.push_back({m.op, m.status});
    return;
  }
  Op* op = find(m.op);
  if (op == nullptr || op->job.is_read || !op->announced) return;
  op->settled = true;
  if (op->ending && !m.status.ok()) return;
  // An operation that was being given up, but had arrived already, is reported as what it is.
  stop(op, m.status, false, now);
}

// ---- rails

void Outbound::offer(std::uint32_t index, std::int64_t now) {
  Rail& rail = rails_[index];
  ++rail.epoch;
  if (rail.epoch > 1) ++reconnects_;
  const auto packet = options_.random_packet();
  if (!packet) {
    failure_ = packet.error();
    return;
  }
  auto pair = rail.nic->make_queue_pair(*packet);
  if (!pair) return rail.health.on_error(now);
  rail.pair = std::move(pair).value();
  rail.state = RailState::kOffered;
  urgent_.push_back(Offer{index, rail.epoch, rail.pair->local()});
}

// The queue pair is destroyed at once, which ends all that it holds: what has not completed counts
// as flushed. (An error state and a wait for the flush would say the same a little more exactly,
// and later.) blame: the rail itself is at fault. tell: the owner does not know yet.
void Outbound::break_rail(std::uint32_t index, bool blame, bool tell, std::int64_t now) {
  Rail& rail = rails_[index];
  if (rail.state == RailState::kDown) return;
  if (blame) rail.health.on_error(now);
  if (tell) urgent_.push_back(Broken{index, rail.epoch, false});
  for (auto& [id, map] : maps_) map.rails[index] = {};
  rail.pair.reset();
  rail.queue.abandon();
  rail.state = RailState::kDown;
  for (const Sent& sent : rail.sent)
    if (sent.op != 0) ops_.at(sent.op).replay = true;
  if (!rail.sent.empty()) retire(index, rail.sent.back().id);
}

void Outbound::retire(std::uint32_t index, std::uint64_t id) {
  Rail& rail = rails_[index];
  while (!rail.sent.empty() && rail.sent.front().id <= id) {
    const Sent sent = rail.sent.front();
    rail.sent.pop_front();
    rail.in_flight -= sent.bytes;
    if (sent.op == 0) continue;
    Op* op = find(sent.op);
    --op->outstanding;
    left_queue(op->job.grant);
    settle(op);
  }
}

bool Outbound::owns(std::uint32_t rail, QueuePairNumber number) const {
  return rails_[rail].pair != nullptr && rails_[rail].pair->local().number == number;
}

void Outbound::on_work(std::uint32_t index, const WorkDone& done, std::int64_t now) {
  // A revoked window is the owner's right, and no error of the rail.
  if (done.status != WorkStatus::kOk)
    return break_rail(index, done.status != WorkStatus::kRemoteAccess, true, now);
  // Those before it were done without a word: what fails always says so itself.
  if (rails_[index].queue.retire(done.id)) retire(index, done.id);
}

void Outbound::port_down(std::uint32_t rail, std::int64_t now) {
  break_rail(rail, true, true, now);
}

// ---- posting

// Windows on every usable rail, then the cut. False: not now (or it ended).
bool Outbound::prepare(Op* op, std::int64_t now, bool* waiting) {
  const Job& job = op->job;
  auto [it, fresh] = maps_.try_emplace(job.grant.id);
  GrantMap& map = it->second;
  if (fresh) {
    map.generation = job.grant.generation;
    map.rails.resize(rails_.size());
  }
  if (map.generation != job.grant.generation) {
    stop(op, Error{ErrorCode::kStale, "the grant has another generation"}, true, now);
    return false;
  }
  std::vector<RailMap> usable;
  bool pending = false;
  for (std::uint32_t r = 0; r < rails_.size(); ++r) {
    if (rails_[r].state != RailState::kReady) continue;
    auto& on_rail = map.rails[r];
    if (on_rail.question == 0) {
      on_rail.question = ++questions_;
      urgent_.push_back(Map{job.grant, r, rails_[r].epoch, on_rail.question});
    }
    pending = pending || on_rail.ranges.empty();
    usable.push_back({r, job.keys[r], rails_[r].nic->info().max_pieces, on_rail.ranges});
  }
  *waiting = pending || usable.empty();
  if (*waiting) return false;
  if (!allows(map.rights, job.is_read)) {
    stop(op, invalid_argument(text("the grant does not allow to ", job.is_read ? "read" : "write")),
         true, now);
    return false;
  }
  auto plan = cut(job.base, job.segments, job.bytes, usable);
  if (!plan) {
    stop(op, plan.error(), true, now);
    return false;
  }
  op->plan = std::move(plan).value();
  if (!job.is_read) {
    std::uint32_t& attempt = attempts_[op->slot];
    attempt = (attempt + 1) % kAttempts;
    urgent_.push_back(Posted{job.op, attempt, op->plan.rails});
  }
  return true;
}

bool Outbound::post_chunk(Op* op, const Chunk& chunk, std::int64_t now) {
  Rail& rail = rails_[chunk.rail];
  if (rail.state != RailState::kReady) {  // it was cut for a rail that broke
    op->replay = true;
    settle(op);
    return false;
  }
  const bool room = rail.in_flight == 0 || rail.in_flight + chunk.bytes <= options_.in_flight_bytes;
  if (rail.queue.free() == 0 || !room || !options_.may_post(chunk.rail, now)) return false;
  Work work;
  const auto ticket = rail.queue.next(chunk.last_of_rail || rail.queue.free() == 1);
  work.id = ticket.id;
  work.signalled = ticket.signalled;
  work.kind = op->job.is_read      ? WorkKind::kRead
              : chunk.last_of_rail ? WorkKind::kWriteImmediate
                                   : WorkKind::kWrite;
  work.pieces = std::span(op->plan.pieces).subspan(chunk.first_piece, chunk.num_pieces);
  work.remote_address = chunk.remote_address;
  work.remote_key = chunk.remote_key;
  work.immediate = Immediate{op->slot, chunk.rail, attempts_[op->slot]}.pack();
  std::size_t posted = 0;
  const Status status = rail.pair->post({&work, 1}, &posted);
  if (!status) {
    rail.queue.unpost(1);
    op->replay = true;
    const std::uint64_t id = op->job.op;
    break_rail(chunk.rail, true, true, now);
    if (Op* still = find(id); still != nullptr && still->replay) settle(still);
    return false;
  }
  rail.sent.push_back({ticket.id, op->job.op, chunk.bytes});
  rail.in_flight += chunk.bytes;
  rail.bytes_posted += chunk.bytes;
  ++op->outstanding;
  ++in_queues_[op->job.grant.id];
  ++op->next_chunk;
  options_.on_posted(chunk.rail, chunk.bytes);
  return true;
}

// An empty write that tells its end, and with it that of all before it.
void Outbound::mark(std::uint32_t index, std::int64_t now) {
  Rail& rail = rails_[index];
  if (rail.state != RailState::kReady || !rail.queue.silent() || rail.queue.free() == 0) return;
  const auto ticket = rail.queue.next(true);
  const Work work{.id = ticket.id, .kind = WorkKind::kWrite, .signalled = true};
  std::size_t posted = 0;
  if (rail.pair->post({&work, 1}, &posted).ok()) {
    rail.sent.push_back({ticket.id, 0, 0});
    return;
  }
  rail.queue.unpost(1);
  break_rail(index, true, true, now);
}

// Posts what fits. True: all of it is in the queues, or it is over.
bool Outbound::advance(Op* op, std::int64_t now, bool* waiting) {
  const std::uint64_t id = op->job.op;
  *waiting = op->outstanding > 0 && op->replay;  // its flushed work is not all back
  if (*waiting) return false;
  if (op->plan.chunks.empty() && !prepare(op, now, waiting)) return find(id) == nullptr;
  while (op->next_chunk < op->plan.chunks.size()) {
    if (post_chunk(op, op->plan.chunks[op->next_chunk], now)) continue;
    op = find(id);
    if (op == nullptr) return true;
    *waiting = op->replay || op->plan.chunks.empty();
    return false;
  }
  return true;
}

void Outbound::step(std::int64_t now) {
  bool all_rest = true;
  for (std::uint32_t r = 0; r < rails_.size(); ++r) {
    Rail& rail = rails_[r];
    if (rail.state == RailState::kDown && rail.health.usable(now)) offer(r, now);
    all_rest = all_rest && rail.state == RailState::kDown && !rail.health.usable(now);
  }
  if (all_rest && failure_.ok())
    failure_ = Error{ErrorCode::kTransport, "every rail of the link failed and rests"};
  std::set<std::uint32_t> stuck;
  for (const std::uint64_t id : ending_)
    if (const Op& op = ops_.at(id); now >= op.drain_until)
      for (std::uint32_t r = 0; r < rails_.size(); ++r)
        if ((op.plan.rails & 1U << r) != 0) stuck.insert(r);
  for (const std::uint32_t r : stuck) break_rail(r, false, true, now);
  post_all(now);
  for (std::uint32_t r = 0; r < rails_.size(); ++r) mark(r, now);
}

void Outbound::post_all(std::int64_t now) {
  for (const std::uint64_t id : std::exchange(again_, {}))
    if (const Op* op = find(id); op != nullptr) {
      auto& queue = active_[static_cast<std::size_t>(op->job.priority)];
      if (std::ranges::find(queue, id) == queue.end()) queue.push_front(id);
    }
  for (auto& queue : active_) {
    int passed = 0;
    for (std::size_t i = 0; i < queue.size() && passed < kLookAhead;) {
      Op* op = find(queue[i]);
      bool waiting = false;
      if (op == nullptr || op->ending || advance(op, now, &waiting)) {
        queue.erase(queue.begin() + static_cast<std::ptrdiff_t>(i));
        continue;
      }
      if (!waiting) return;  // the rails are full, or the pace says no: lower classes wait too
      ++passed;
      ++i;
    }
  }
}

std::int64_t Outbound::next_timer_ns() const {
  std::int64_t next = std::numeric_limits<std::int64_t>::max();
  for (const Rail& rail : rails_) {
    if (rail.state == RailState::kDown) next = std::min(next, rail.health.rests_until_ns());
  }
  for (const std::uint64_t id : ending_) next = std::min(next, ops_.at(id).drain_until);
  return next;
}

bool Outbound::afford(std::uint64_t credit, std::size_t priority) {
  if (!options_.may_send(credit, static_cast<Priority>(priority))) return false;
  options_.on_sent(credit);
  return true;
}

std::optional<Control> Outbound::next_control() {
  if (!urgent_.empty()) {
    Control control = std::move(urgent_.front());
    urgent_.pop_front();
    return control;
  }
  for (std::size_t c = 0; c < kNumPriorities; ++c) {
    auto& queue = waiting_[c];
    while (!queue.empty()) {
      Item& item = queue.front();
      if (item.is_message) {
        if (!afford(text_credit(item.message.size()), c)) return std::nullopt;
        options_.on_unqueued(item.message.size());
        Control control = Text{static_cast<Priority>(c), std::move(item.message), item.op};
        queue.pop_front();
        return control;
      }
      Op* op = find(item.op);
      if (op != nullptr && free_slots_.empty()) break;
      if (op != nullptr && !afford(kBeginCredit, c)) return std::nullopt;
      queue.pop_front();
      if (op == nullptr) continue;  // given up before it had its place
      op->announced = true;
      op->slot = free_slots_.back();
      free_slots_.pop_back();
      active_[c].push_back(op->job.op);
      return Begin{op->job.op,  op->slot,      op->job.priority, op->job.grant,
                   op->job.tag, op->job.bytes, op->job.notify};
    }
    // What a higher class has not posted yet goes before any word of a lower one.
    if (!active_[c].empty()) break;
  }
  return std::nullopt;
}

void Outbound::close(const Status& why) {
  for (Rail& rail : rails_) {
    rail.pair.reset();
    rail.queue.abandon();
    rail.sent.clear();
    rail.in_flight = 0;
    rail.state = RailState::kDown;
  }
  std::vector<std::uint64_t> ids;
  for (const auto& [id, op] : ops_) ids.push_back(id);
  std::ranges::sort(ids);
  for (const std::uint64_t id : ids) finish(id, why);
  for (const std::uint64_t id : std::exchange(sends_, {})) done_.push_back({id, why});
}

}  // namespace kvcore::transport::rdma
