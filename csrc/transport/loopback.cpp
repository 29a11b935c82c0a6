#include "transport/loopback.h"

#include <fcntl.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>

#include "base/text.h"
#include "transport/core/event_queue.h"
#include "transport/core/grants.h"
#include "transport/core/hello.h"
#include "transport/core/leases.h"
#include "transport/core/remote_region.h"

namespace kvcore::transport {
namespace {

class LoopbackTransport;

struct Op {
  enum class Kind : std::uint8_t { kSend, kWrite, kRead, kBorrow } kind = Kind::kSend;
  RegionId region{};
  std::vector<Segment> segments;
  GrantRef grant;
  std::uint64_t tag = 0;
  std::uint64_t bytes = 0;
  std::int64_t deadline_ns = 0;
  bool notify = true;
  bool is_read() const { return kind == Kind::kRead; }
  bool pins() const { return kind == Kind::kWrite || kind == Kind::kRead; }
};

// One end of a link; all fields are guarded by the hub's lock.
struct End {
  LinkId id{};
  LoopbackTransport* transport = nullptr;  // null once its Transport is gone
  std::weak_ptr<End> peer;
  bool open = true;
  std::uint64_t next_op = 1;
  std::map<std::uint64_t, Op> ops;
  LinkInfo info{};
};

struct Action {
  enum class Kind : std::uint8_t { kMessage, kOp, kGiveBack, kFence } kind;
  std::weak_ptr<End> from;  // but for kFence
  Priority priority;
  std::uint64_t op = 0;  // kMessage: 0 = nobody waits for its completion; kGiveBack: the lease
  std::vector<std::byte> message{};
  LoopbackTransport* owner = nullptr;  // kFence
  GrantRef grant{};
};

class Hub final : public LoopbackHub, public std::enable_shared_from_this<Hub> {
 public:
  explicit Hub(const Clock* clock) : clock_(clock) {}
  void set_manual(bool manual) override;
  bool step() override;
  std::size_t run() override;
  std::size_t pending() const override;
  std::uint64_t actions() const override;
  void arm(std::uint64_t nth, LoopbackFault fault) override;
  void advance(std::int64_t ns) override;
  void set_late_fences(bool late) override;
  Result<std::unique_ptr<Transport>> make_transport(TransportOptions options) override;

  std::int64_t now() const {
    return (clock_ != nullptr ? clock_->now_ns() : now_ns()) + offset_ns_;
  }
  void enqueue(Action action);
  void complete(End& end, std::uint64_t op, Status status, std::uint64_t bytes);
  void take_down(End& end, Status own, Status peers);
  void expire();
  void flush_messages(const End& from);
  Fence on_revoke(LoopbackTransport* owner, GrantRef grant);
  void flush_fences(LoopbackTransport* owner);

  mutable std::recursive_mutex mu;
  std::map<std::string, LoopbackTransport*, std::less<>> names;

 private:
  bool step_locked();
  void run_action(Action& action, const LoopbackFault* fault);
  void run_fence(const Action& action);
  Status move_bytes(End& from, End& to, const Op& op, const LoopbackFault* fault);
  void finish(End& from, End& to, std::uint64_t id, Status status);
  void lend(End& from, const End& to, std::uint64_t id);

  const Clock* const clock_;
  bool manual_ = false, late_fences_ = false;
  std::uint64_t next_name_ = 1;
  std::atomic<std::int64_t> offset_ns_{0};
  std::uint64_t actions_ = 0;
  std::map<std::uint64_t, LoopbackFault> faults_;
  std::deque<Action> queues_[kNumPriorities];
};

class LoopbackLink final : public Link {
 public:
  LoopbackLink(std::shared_ptr<Hub> hub, std::shared_ptr<End> end)
      : hub_(std::move(hub)), end_(std::move(end)) {}
  LinkId id() const noexcept override { return end_->id; }
  Result<OpId> send(std::span<const std::byte> message, const SendOptions& options) override;
  Result<OpId> write(RegionId local, std::span<const Segment> segments, GrantRef grant,
                     std::uint64_t tag, const OpOptions& options) override {
    return post(Op::Kind::kWrite, local, segments, grant, tag, options);
  }
  Result<OpId> read(RegionId local, std::span<const Segment> segments, GrantRef grant,
                    const OpOptions& options) override {
    return post(Op::Kind::kRead, local, segments, grant, 0, options);
  }
  Result<OpId> borrow(GrantRef grant, std::span<const Range> ranges,
                      std::int64_t deadline_ns) override;
  void give_back(LeaseId lease) override {
    const std::lock_guard lock(hub_->mu);
    hub_->enqueue(Action{Action::Kind::kGiveBack, end_, Priority::kStream,
                         static_cast<std::uint64_t>(lease)});
  }
  void cancel(OpId op) override {
    const std::lock_guard lock(hub_->mu);
    hub_->complete(*end_, static_cast<std::uint64_t>(op),
                   Error{ErrorCode::kCancelled, "cancelled by this side"}, 0);
  }
  void set_pacing(std::uint64_t) override {}  // steps are the pace here
  LinkInfo info() const override;
  void close() override {
    const std::lock_guard lock(hub_->mu);
    hub_->flush_messages(*end_);
    hub_->take_down(*end_, Error{ErrorCode::kCancelled, "closed by this side"}, {});
  }

 private:
  Result<OpId> post(Op::Kind kind, RegionId local, std::span<const Segment> segments,
                    GrantRef grant, std::uint64_t tag, const OpOptions& options);
  Status check_open(bool takes_a_slot) const;
  std::shared_ptr<Hub> hub_;
  std::shared_ptr<End> end_;
};

class LoopbackTransport final : public Transport {
 public:
  LoopbackTransport(std::shared_ptr<Hub> hub, TransportOptions options)
      : hub_(std::move(hub)), options_(std::move(options)), grants_(options_.random) {
    grants_.set_on_revoke([this](GrantRef grant) { return hub_->on_revoke(this, grant); });
  }
  ~LoopbackTransport() override { close(); }

  Result<RegionId> register_region(const RegionSpec& spec) override {
    return grants_.add_region(spec);
  }
  Status unregister_region(RegionId region) override { return grants_.remove_region(region); }
  Result<Grant> create_grant(RegionId region, std::span<const Range> ranges, Rights rights,
                             std::int64_t expires_ns, std::string_view peer) override {
    return grants_.create(region, ranges, rights, expires_ns, peer);
  }
  Fence revoke_grant(GrantRef grant) override { return grants_.revoke(grant); }
  Result<std::string> listen(std::string_view address) override;
  Result<std::shared_ptr<Link>> connect(std::string_view address) override;
  std::shared_ptr<Link> link(LinkId id) const override;
  std::size_t poll(std::vector<Event>* events, std::size_t max_events) override {
    hub_->expire();
    return events_.poll(events, max_events);
  }
  int event_fd() const noexcept override { return events_.fd(); }
  void close() override;

  std::shared_ptr<End> new_end(const LoopbackTransport& peer);

  std::shared_ptr<Hub> hub_;
  TransportOptions options_;
  EventQueue events_;
  GrantTable grants_;
  Leases leases_{&grants_, &events_};
  std::map<std::uint64_t, std::shared_ptr<End>> ends_;
  std::uint64_t next_link_ = 1;
  bool closed_ = false;
};

// ---- Hub

void Hub::set_manual(bool manual) {
  const std::lock_guard lock(mu);
  manual_ = manual;
  if (!manual_) run();
}

bool Hub::step() {
  const std::lock_guard lock(mu);
  expire();
  return step_locked();
}

std::size_t Hub::run() {
  const std::lock_guard lock(mu);
  std::size_t n = 0;
  while (step()) ++n;
  return n;
}

std::size_t Hub::pending() const {
  const std::lock_guard lock(mu);
  std::size_t n = 0;
  for (const auto& q : queues_) n += q.size();
  return n;
}

std::uint64_t Hub::actions() const {
  const std::lock_guard lock(mu);
  return actions_;
}

void Hub::arm(std::uint64_t nth, LoopbackFault fault) {
  const std::lock_guard lock(mu);
  faults_[actions_ + nth] = fault;
}

void Hub::advance(std::int64_t ns) {
  const std::lock_guard lock(mu);
  offset_ns_ += ns;
  expire();
}

void Hub::enqueue(Action action) {
  queues_[static_cast<std::size_t>(action.priority)].push_back(std::move(action));
  if (!manual_) run();
}

bool Hub::step_locked() {
  for (auto& queue : queues_) {
    if (queue.empty()) continue;
    Action action = std::move(queue.front());
    queue.pop_front();
    ++actions_;
    const auto fault = faults_.extract(actions_);
    run_action(action, fault ? &fault.mapped() : nullptr);
    return true;
  }
  return false;
}

void Hub::set_late_fences(bool late) {
  const std::lock_guard lock(mu);
  late_fences_ = late;
}

Fence Hub::on_revoke(LoopbackTransport* owner, GrantRef grant) {
  const std::lock_guard lock(mu);
  if (!late_fences_) return Fence::kDone;
  enqueue(Action{Action::Kind::kFence, {}, Priority::kBackground, 0, {}, owner, grant});
  return Fence::kPending;
}

void Hub::run_fence(const Action& action) {
  if (action.owner->grants_.fenced(action.grant)) action.owner->events_.push(Fenced{action.grant});
}

void Hub::flush_fences(LoopbackTransport* owner) {
  const auto of_owner = [&](const Action& a) {
    return a.kind == Action::Kind::kFence && a.owner == owner;
  };
  for (auto& queue : queues_) {
    for (const Action& action : queue)
      if (of_owner(action)) run_fence(action);
    std::erase_if(queue, of_owner);
  }
}

void Hub::run_action(Action& action, const LoopbackFault* fault) {
  if (action.kind == Action::Kind::kFence) return run_fence(action);
  const auto from = action.from.lock();
  if (!from || !from->open) return;
  const auto to = from->peer.lock();
  if (!to) return;
  if (fault && *fault == LoopbackFault::kDrop) return;
  if (fault && *fault == LoopbackFault::kDown) {
    const Error dead{ErrorCode::kPeerDead, "the link was cut"};
    take_down(*from, dead, dead);
    return;
  }
  if (action.kind == Action::Kind::kGiveBack)
    return to->transport->leases_.give_back(to->id, action.op);
  if (action.kind == Action::Kind::kMessage) {
    if (action.op != 0 && !from->ops.contains(action.op)) return;  // taken back
    const std::uint64_t bytes = action.message.size();
    ++to->info.messages_in;
    to->transport->events_.push(Message{to->id, std::move(action.message), now()});
    if (action.op != 0) complete(*from, action.op, {}, bytes);
    return;
  }
  const auto it = from->ops.find(action.op);
  if (it == from->ops.end()) return;  // cancelled or expired meanwhile
  if (it->second.kind == Op::Kind::kBorrow) return lend(*from, *to, action.op);
  finish(*from, *to, action.op, move_bytes(*from, *to, it->second, fault));
}

void Hub::lend(End& from, const End& to, std::uint64_t id) {
  const Op& op = from.ops.at(id);
  LoopbackTransport& lender = *to.transport;
  std::vector<Range> ranges;
  for (const Segment& s : op.segments) ranges.push_back({s.remote_offset, s.bytes});
  static const auto this_process = std::make_shared<const PeerProcess>(UniqueFd());
  const Leases::Borrower borrower{to.id, from.transport->options_.identity, this_process, nullptr,
                                  0};
  const auto lent = lender.leases_.lend(borrower, id, op.grant, ranges, now());
  if (!lent) return complete(from, id, lent.error(), 0);
  const RegionView view = *lender.grants_.region(lent->region);
  const auto mapping =
      RemoteRegion::make(UniqueFd(::fcntl(view.fd, F_DUPFD_CLOEXEC, 0)), view.bytes);
  if (!mapping) {
    lender.leases_.give_back(to.id, id);
    return complete(from, id, mapping.error(), 0);
  }
  Borrowed out{from.id, OpId{id}, LeaseId{id}, {}, *mapping, lent->expires_ns, {}};
  for (const Range& r : ranges) out.spans.emplace_back((*mapping)->data() + r.offset, r.bytes);
  from.ops.erase(id);
  from.transport->events_.push(std::move(out));
}

Status Hub::move_bytes(End& from, End& to, const Op& op, const LoopbackFault* fault) {
  if (fault && *fault == LoopbackFault::kFail)
    return Error{ErrorCode::kTransport, "the operation was made to fail"};
  KVCORE_ASSIGN_OR_RETURN(const RegionView local, from.transport->grants_.region(op.region));
  const Rights right = op.is_read() ? Rights::kRead : Rights::kWrite;
  GrantTable& grants = to.transport->grants_;
  const std::string& who = from.transport->options_.identity;
  std::vector<Range> ranges;
  for (const Segment& s : op.segments) ranges.push_back({s.remote_offset, s.bytes});
  KVCORE_RETURN_IF_ERROR(grants.check(op.grant, right, ranges, now(), who));
  bool first = true;
  for (const Segment& s : op.segments) {
    for (std::uint64_t done = 0; done < s.bytes; done += kLandingBytes) {
      const Range piece{s.remote_offset + done, std::min(kLandingBytes, s.bytes - done)};
      std::byte* mine = local.base + s.local_offset + done;
      KVCORE_RETURN_IF_ERROR(grants.with_ranges(
          op.grant, right, {&piece, 1}, now(), who, [&](std::span<std::byte* const> theirs) {
            if (op.is_read()) {
              std::memmove(mine, theirs[0], piece.bytes);
            } else {
              std::memmove(theirs[0], mine, piece.bytes);
              if (first && fault && *fault == LoopbackFault::kCorrupt) *theirs[0] ^= std::byte{1};
            }
            first = false;
          }));
    }
    if (fault && *fault == LoopbackFault::kHalf)
      return Error{ErrorCode::kTransport, "the operation was made to fail half way"};
  }
  if (fault && *fault == LoopbackFault::kCorrupt)
    return Error{ErrorCode::kCorrupt, "a segment's checksum differs"};
  return {};
}

void Hub::finish(End& from, End& to, std::uint64_t id, Status status) {
  const Op& op = from.ops.at(id);
  const bool arrived = status.ok() || status.error().code == ErrorCode::kCorrupt;
  if (!op.is_read() && op.notify && arrived)
    to.transport->events_.push(Arrival{to.id, op.grant, op.tag, op.bytes, now(), status});
  if (status.ok()) {
    (op.is_read() ? from.info.bytes_in : from.info.bytes_out) += op.bytes;
    (op.is_read() ? to.info.bytes_out : to.info.bytes_in) += op.bytes;
  }
  const std::uint64_t bytes = status.ok() ? op.bytes : 0;
  complete(from, id, std::move(status), bytes);
}

void Hub::complete(End& end, std::uint64_t op, Status status, std::uint64_t bytes) {
  const auto it = end.ops.find(op);
  if (it == end.ops.end()) return;
  if (it->second.pins()) end.transport->grants_.unpin(it->second.region);
  const bool borrows = it->second.kind == Op::Kind::kBorrow;
  end.ops.erase(it);
  if (borrows)
    return end.transport->events_.push(
        Borrowed{end.id, OpId{op}, {}, {}, {}, 0, std::move(status)});
  end.transport->events_.push(Completion{end.id, OpId{op}, std::move(status), bytes});
}

void Hub::take_down(End& end, Status own, Status peers) {
  if (!end.open) return;
  end.open = false;
  end.info.up = false;
  end.transport->leases_.link_ended(end.id, own.ok());
  const Error pending =
      own.ok() ? Error{ErrorCode::kPeerDead, "the peer closed the link"} : own.error();
  while (!end.ops.empty()) complete(end, end.ops.begin()->first, pending, 0);
  end.transport->events_.push(Down{end.id, std::move(own)});
  LoopbackTransport* transport = end.transport;
  const auto peer = end.peer.lock();
  if (peer) take_down(*peer, std::move(peers), {});
  transport->ends_.erase(static_cast<std::uint64_t>(end.id));
}

void Hub::flush_messages(const End& from) {
  for (auto& queue : queues_) {
    for (Action& action : queue)
      if (action.kind == Action::Kind::kMessage && action.from.lock().get() == &from)
        run_action(action, nullptr);
    std::erase_if(queue, [&](const Action& action) {
      return action.kind != Action::Kind::kFence && action.from.lock().get() == &from;
    });
  }
}

void Hub::expire() {
  const std::lock_guard lock(mu);
  for (auto& [name, transport] : names) {
    transport->leases_.work(now());
    for (auto& [id, end] : transport->ends_) {
      std::vector<std::uint64_t> late;
      for (auto& [op_id, op] : end->ops)
        if (op.deadline_ns != 0 && now() >= op.deadline_ns) late.push_back(op_id);
      for (const auto op_id : late)
        complete(*end, op_id, Error{ErrorCode::kTimeout, "the operation's deadline passed"}, 0);
    }
  }
}

Result<std::unique_ptr<Transport>> Hub::make_transport(TransportOptions options) {
  const std::lock_guard lock(mu);
  KVCORE_RETURN_IF_ERROR(check_options(options));
  auto transport = std::make_unique<LoopbackTransport>(shared_from_this(), std::move(options));
  names[text("#", next_name_++)] = transport.get();  // anonymous until it listens
  return std::unique_ptr<Transport>(std::move(transport));
}

// ---- LoopbackLink

Status LoopbackLink::check_open(bool takes_a_slot) const {
  if (!end_->open) return Error{ErrorCode::kPeerDead, "the link is down"};
  if (takes_a_slot && end_->ops.size() >= end_->transport->options_.max_outstanding_ops)
    return Error{ErrorCode::kTransport, text("max_outstanding_ops=", end_->ops.size(), " reached")};
  return {};
}

Result<OpId> LoopbackLink::send(std::span<const std::byte> message, const SendOptions& options) {
  const std::lock_guard lock(hub_->mu);
  if (message.size() > kMaxMessageBytes)
    return invalid_argument(
        text("message of ", message.size(), " bytes exceeds ", kMaxMessageBytes));
  const bool tracked = options.completion || options.deadline_ns != 0;
  KVCORE_RETURN_IF_ERROR(check_open(tracked));
  const std::uint64_t id = end_->next_op++;
  if (tracked) {
    Op op;
    op.deadline_ns = options.deadline_ns;
    end_->ops.emplace(id, std::move(op));
  }
  ++end_->info.messages_out;
  hub_->enqueue(Action{Action::Kind::kMessage,
                       end_,
                       options.priority,
                       tracked ? id : 0,
                       {message.begin(), message.end()}});
  return OpId{id};
}

Result<OpId> LoopbackLink::post(Op::Kind kind, RegionId local, std::span<const Segment> segments,
                                GrantRef grant, std::uint64_t tag, const OpOptions& options) {
  const std::lock_guard lock(hub_->mu);
  KVCORE_RETURN_IF_ERROR(check_open(true));
  KVCORE_ASSIGN_OR_RETURN([[maybe_unused]] const RegionView view,
                          end_->transport->grants_.pin(local, segments));
  Op op{
      kind,          local, {segments.begin(), segments.end()}, grant, tag, 0, options.deadline_ns,
      options.notify};
  for (const Segment& s : segments) op.bytes += s.bytes;
  const std::uint64_t id = end_->next_op++;
  end_->ops.emplace(id, std::move(op));
  hub_->enqueue(Action{Action::Kind::kOp, end_, options.priority, id});
  return OpId{id};
}

Result<OpId> LoopbackLink::borrow(GrantRef grant, std::span<const Range> ranges,
                                  std::int64_t deadline_ns) {
  const std::lock_guard lock(hub_->mu);
  KVCORE_RETURN_IF_ERROR(check_open(true));
  KVCORE_ASSIGN_OR_RETURN(auto segments, segments_to_borrow(ranges));
  Op op{Op::Kind::kBorrow, {}, std::move(segments), grant, 0, 0, deadline_ns};
  const std::uint64_t id = end_->next_op++;
  end_->ops.emplace(id, std::move(op));
  hub_->enqueue(Action{Action::Kind::kOp, end_, Priority::kStream, id});
  return OpId{id};
}

LinkInfo LoopbackLink::info() const {
  const std::lock_guard lock(hub_->mu);
  LinkInfo info = end_->info;
  info.outstanding_ops = end_->ops.size();
  return info;
}

// ---- LoopbackTransport

Result<std::string> LoopbackTransport::listen(std::string_view address) {
  const std::lock_guard lock(hub_->mu);
  if (!address.starts_with("loopback:") || address.size() <= 9)
    return invalid_argument(text("address=", address, " must be loopback:NAME"));
  if (!hub_->names.emplace(std::string(address), this).second)
    return invalid_argument(text("address=", address, " is in use"));
  return std::string(address);
}

std::shared_ptr<End> LoopbackTransport::new_end(const LoopbackTransport& peer) {
  auto end = std::make_shared<End>();
  end->id = LinkId{next_link_++};
  end->transport = this;
  end->info.id = end->id;
  end->info.scheme = "loopback";
  end->info.peer_identity = peer.options_.identity;
  end->info.peer_role = peer.options_.role;
  end->info.peer_model = peer.options_.model_digest;
  end->info.peer_layout = peer.options_.layout_digest;
  end->info.up = true;
  ends_[static_cast<std::uint64_t>(end->id)] = end;
  return end;
}

Result<std::shared_ptr<Link>> LoopbackTransport::connect(std::string_view address) {
  const std::lock_guard lock(hub_->mu);
  const auto it = hub_->names.find(address);
  if (it == hub_->names.end() || !address.starts_with("loopback:"))
    return Error{ErrorCode::kNotFound, text("address=", address, ": nobody listens there")};
  LoopbackTransport& other = *it->second;
  auto mine = new_end(other);
  Status refused = check_models(options_.model_digest, other.options_.model_digest);
  if (other.options_.key != options_.key)
    refused = Error{ErrorCode::kUnauthenticated, "the keys differ"};
  if (!refused.ok()) {  // as on real links: Down follows, the peer sees nothing
    events_.push(Down{mine->id, std::move(refused)});
    mine->open = mine->info.up = false;
    ends_.erase(static_cast<std::uint64_t>(mine->id));
    return std::shared_ptr<Link>(std::make_shared<LoopbackLink>(hub_, mine));
  }
  auto theirs = other.new_end(*this);
  mine->info.peer_address = std::string(address);
  mine->peer = theirs;
  theirs->peer = mine;
  events_.push(Up{mine->id, false});
  other.events_.push(Up{theirs->id, true});
  return std::shared_ptr<Link>(std::make_shared<LoopbackLink>(hub_, mine));
}

std::shared_ptr<Link> LoopbackTransport::link(LinkId id) const {
  const std::lock_guard lock(hub_->mu);
  const auto it = ends_.find(static_cast<std::uint64_t>(id));
  if (it == ends_.end()) return nullptr;
  return std::make_shared<LoopbackLink>(hub_, it->second);
}

void LoopbackTransport::close() {
  const std::lock_guard lock(hub_->mu);
  if (closed_) return;
  closed_ = true;
  const Error closed{ErrorCode::kCancelled, "closed by this side"};
  while (!ends_.empty()) {
    const auto end = ends_.begin()->second;
    hub_->take_down(*end, closed, {});
  }
  hub_->flush_fences(this);
  leases_.close();
  std::erase_if(hub_->names, [&](const auto& entry) { return entry.second == this; });
}

}  // namespace

std::shared_ptr<LoopbackHub> make_loopback_hub(const Clock* clock) {
  return std::make_shared<Hub>(clock);
}

}  // namespace kvcore::transport
