#include "stream/core.h"

#include <algorithm>
#include <utility>

#include "base/text.h"

namespace kvcore::stream {
Core::Core(std::shared_ptr<pages::Pool> pool, transport::Transport* transport,
           std::shared_ptr<Inbox> inbox, StreamOptions options, transport::RegionId region)
    : pool_(std::move(pool)),
      transport_(transport),
      inbox_(std::move(inbox)),
      options_(options),
      region_(region),
      stamper_(pool_, options.checksums != Checksums::kOff),
      claimed_(static_cast<std::size_t>(pool_->num_pages())) {}

Result<std::unique_ptr<Core>> Core::make(std::shared_ptr<pages::Pool> pool,
                                         transport::Transport* transport,
                                         std::shared_ptr<Inbox> inbox, StreamOptions options) {
  if (options.limits.max_inflight_bytes < 1 || options.limits.max_write_bytes < 1) {
    return invalid_argument(text("max_inflight_bytes=", options.limits.max_inflight_bytes,
                                 " and max_write_bytes=", options.limits.max_write_bytes,
                                 " must be > 0"));
  }
  if (options.layer_begin < 0 || options.head_begin < 0 || options.staging_bytes < 1) {
    return invalid_argument(text("layer_begin=", options.layer_begin,
                                 " and head_begin=", options.head_begin,
                                 " must be >= 0, staging_bytes=", options.staging_bytes, " > 0"));
  }
  const auto& arena = pool->arena();
  KVCORE_ASSIGN_OR_RETURN(
      const transport::RegionId region,
      transport->register_region(arena->data(), static_cast<std::uint64_t>(arena->bytes()),
                                 arena->fd()));
  return std::unique_ptr<Core>(
      new Core(std::move(pool), transport, std::move(inbox), options, region));
}

Core::~Core() { close(clock_ns()); }

std::int64_t Core::clock_ns() const {
  return options_.clock ? options_.clock->now_ns() : transport::now_ns();
}

Status Core::check_pages(std::span<const std::int32_t> pages) const {
  if (pages.empty() || pages.size() > static_cast<std::size_t>(kMaxSlots)) {
    return invalid_argument(text("pages: ", pages.size(), " must be in [1, ", kMaxSlots, "]"));
  }
  for (const std::int32_t page : pages) {
    if (page < 0 || page >= pool_->num_pages()) {
      return invalid_argument(
          text("pages: page ", page, " must be in [0, ", pool_->num_pages(), ")"));
    }
  }
  return {};
}

bool Core::release(const RequestId& id, std::int64_t now_ns) {
  const auto it = incoming_.find(id);
  if (it == incoming_.end() || !it->second.machine.active()) return false;
  it->second.machine.release(now_ns);
  ++stats_.released;
  settle_receiver(id);
  return true;
}

// ---- commands of the ports

void Core::publish(std::uint64_t sender, const SliceRun& run) {
  const auto it = outgoing_.find(sender);
  if (it != outgoing_.end()) it->second.machine.publish(run);
}

void Core::mark(std::uint64_t sender, std::int64_t at_ns) {
  const auto it = outgoing_.find(sender);
  if (it == outgoing_.end()) return;
  it->second.machine.mark(at_ns);
  settle_sender(sender);
}

void Core::commit(std::uint64_t sender, const std::vector<std::byte>& payload, std::int64_t at_ns) {
  const auto it = outgoing_.find(sender);
  if (it == outgoing_.end()) return;
  it->second.machine.commit(payload, at_ns);
  settle_sender(sender);
}

void Core::abort(std::uint64_t sender, const Error& error) {
  const auto it = outgoing_.find(sender);
  if (it == outgoing_.end()) return;
  it->second.machine.abort(error);
  settle_sender(sender);
}

// ---- events

void Core::handle(transport::Event& event, std::int64_t now_ns) {
  if (const auto* up = std::get_if<transport::Up>(&event)) return on_up(*up);
  if (const auto* c = std::get_if<transport::Completion>(&event)) return on_completion(*c, now_ns);
  if (const auto* a = std::get_if<transport::Arrival>(&event)) return on_arrival(*a, now_ns);
  if (const auto* m = std::get_if<transport::Message>(&event)) return on_message(*m, now_ns);
  if (const auto* f = std::get_if<transport::Fenced>(&event)) return on_fenced(*f);
  if (const auto* d = std::get_if<transport::Down>(&event)) return on_down(*d, now_ns);
}

void Core::on_message(const transport::Message& message, std::int64_t now_ns) {
  auto parsed = StreamMessage::decode(message.bytes);
  if (!parsed) {
    ++stats_.dropped;
    return;
  }
  StreamMessage& m = *parsed;
  const RequestId id = m.request_id;
  if (m.kind == MessageKind::kDone || m.kind == MessageKind::kReceiverAbort) {
    const auto it = sender_of_.find({id, m.grant.id});
    if (it == sender_of_.end() || outgoing_.at(it->second).peer != message.link) {
      ++stats_.dropped;
      return;
    }
    const std::uint64_t sender = it->second;
    outgoing_.at(sender).machine.on_message(m);
    return settle_sender(sender);
  }
  if (m.kind == MessageKind::kOpen) return on_open(id, message, m, now_ns);
  const auto it = incoming_.find(id);
  if (it == incoming_.end()) {
    ++stats_.dropped;
    return;
  }
  const std::size_t share = it->second.machine.share_of(m.grant);
  if (m.kind == MessageKind::kSums && it->second.machine.bound_to(share, message.link))
    return on_sums(id, share, m, now_ns);
  it->second.machine.on_message(message.link, std::move(m), now_ns);
  settle_receiver(id);
}

void Core::on_completion(const transport::Completion& c, std::int64_t now_ns) {
  const auto node = ops_.extract({c.link, c.op});
  if (!node) return;
  unstage(node.mapped());
  const std::uint64_t sender = node.mapped().sender;
  outgoing_.at(sender).machine.on_completion(c.op, c.status, now_ns);
  settle_sender(sender);
}

bool Core::step(std::int64_t now_ns, std::size_t max_events) {
  std::vector<transport::Event> events;
  transport_->poll(&events, max_events);
  // Checking many slices takes a while, so each event gets its own time on the caller's clock.
  const std::int64_t offset = now_ns - clock_ns();
  for (transport::Event& event : events) handle(event, clock_ns() + offset);
  on_time(now_ns);
  const bool more_writes = pump();
  return more_writes || events.size() == max_events;
}

void Core::on_time(std::int64_t now_ns) {
  std::vector<RequestId> late;
  for (const auto& [id, in] : incoming_) {
    if (in.machine.active() && in.machine.deadline_ns() <= now_ns) late.push_back(id);
  }
  for (const RequestId& id : late) {
    incoming_.at(id).machine.on_time(now_ns);
    settle_receiver(id);
  }
  std::vector<std::uint64_t> slow;
  for (const auto& [id, out] : outgoing_) {
    if (!out.machine.ended() && out.machine.deadline_ns() <= now_ns) slow.push_back(id);
  }
  for (const std::uint64_t id : slow) {
    outgoing_.at(id).machine.on_time(now_ns);
    settle_sender(id);
  }
}

std::int64_t Core::next_deadline_ns() const {
  std::int64_t next = 0;
  const auto consider = [&](std::int64_t t) { next = next == 0 ? t : std::min(next, t); };
  for (const auto& [id, in] : incoming_) {
    if (in.machine.active()) consider(in.machine.deadline_ns());
  }
  for (const auto& [id, out] : outgoing_) {
    if (!out.machine.ended()) consider(out.machine.deadline_ns());
  }
  return next;
}

// ---- writes

bool Core::pump() {
  constexpr int kWritesPerTurn = 8;  // then events get their turn again
  for (int i = 0; i < kWritesPerTurn;) {
    bool any = false;
    for (auto& [link, peer] : peers_) {
      if (!peer.up) continue;
      for (const std::uint64_t id : std::set(peer.senders)) {
        if (!post_one(id, peer)) continue;
        any = true;
        ++i;
      }
    }
    if (!any) return false;
  }
  return true;
}

// ---- actions

void Core::settle_receiver(const RequestId& id) {
  const auto it = incoming_.find(id);
  Incoming& in = it->second;
  for (auto& action : in.machine.take_actions()) in.actions.push_back(std::move(action));
  while (in.pending_fences.empty() && !in.actions.empty()) {
    Receiver::Action action = std::move(in.actions.front());
    in.actions.pop_front();
    carry_out(id, in, std::move(action));
  }
  if (in.machine.active() || !in.pending_fences.empty()) return;
  for (std::size_t share = 0; share < in.machine.num_shares(); ++share)
    by_grant_.erase(in.machine.grant(share).id);
  incoming_.erase(it);
}

void Core::carry_out(const RequestId& id, Incoming& in, Receiver::Action action) {
  if (auto* s = std::get_if<Receiver::Send>(&action)) {
    send(s->link, s->message);
  } else if (const auto* arrived = std::get_if<Receiver::LayerArrived>(&action)) {
    StreamEvent event{StreamEvent::Kind::kLayerArrived, id, {}, {ErrorCode::kInternal, {}}, {}};
    event.layer = arrived->layer;
    events_.push_back(std::move(event));
  } else if (std::holds_alternative<Receiver::Fence>(action)) {
    revoke_all(in);
    if (in.pending_fences.empty()) after_fence(in);
  } else if (auto* done = std::get_if<Receiver::Complete>(&action)) {
    ++stats_.completed;
    stats_.bytes_received += done->stats.bytes;
    events_.push_back({StreamEvent::Kind::kComplete,
                       id,
                       std::move(done->payload),
                       {ErrorCode::kInternal, {}},
                       std::move(done->stats)});
  } else if (auto* failed = std::get_if<Receiver::Failed>(&action)) {
    ++stats_.receive_failed;
    events_.push_back({StreamEvent::Kind::kReceiveFailed,
                       id,
                       {},
                       std::move(failed->error),
                       std::move(failed->stats)});
  }
}

void Core::revoke_all(Incoming& in) {
  for (std::size_t share = 0; share < in.machine.num_shares(); ++share) {
    const transport::GrantRef grant = in.machine.grant(share);
    if (transport_->revoke_grant(grant) == transport::Fence::kPending)
      in.pending_fences.insert(grant.id);
  }
}

void Core::after_fence(Incoming& in) {
  if (in.machine.state() == Receiver::State::kComplete) finish_pages(in);
  unclaim(in.pages);
}

void Core::on_fenced(const transport::Fenced& fenced) {
  const auto grant = by_grant_.find(fenced.grant.id);
  if (grant == by_grant_.end()) {
    ++stats_.dropped;
    return;
  }
  const RequestId id = grant->second.first;
  Incoming& in = incoming_.at(id);
  if (in.pending_fences.erase(fenced.grant.id) == 0 || !in.pending_fences.empty()) return;
  after_fence(in);
  settle_receiver(id);
}

void Core::settle_sender(std::uint64_t id) {
  const auto it = outgoing_.find(id);
  Outgoing& out = it->second;
  const auto peer = out.peer ? peers_.find(*out.peer) : peers_.end();
  const std::string scheme = peer == peers_.end() ? std::string() : peer->second.scheme;
  for (auto& action : out.machine.take_actions()) {
    if (auto* s = std::get_if<Sender::Send>(&action)) {
      if (out.peer) send(*out.peer, s->message);
    } else if (auto* c = std::get_if<Sender::CancelWrite>(&action)) {
      if (peer != peers_.end()) peer->second.link->cancel(c->op);
    } else if (std::holds_alternative<Sender::ReleasePages>(action)) {
      io_release(out.pages);
    } else if (auto* e = std::get_if<Sender::Ended>(&action)) {
      StreamEvent event{e->status ? StreamEvent::Kind::kSent : StreamEvent::Kind::kSendFailed,
                        out.machine.id(),
                        {},
                        {ErrorCode::kInternal, {}},
                        {}};
      if (!e->status) event.error = e->status.error();
      ++(e->status ? stats_.sent : stats_.send_failed);
      if (e->status) stats_.bytes_sent += e->bytes;
      event.stats.bytes = e->bytes;
      event.stats.kv_bytes = out.machine.shape().kv_bytes();
      event.stats.num_layers = out.machine.shape().num_layers;
      event.stats.transport = scheme;
      events_.push_back(std::move(event));
    }
  }
  out.port->set_progress(
      {out.machine.state(), out.machine.status(), out.machine.acked_bytes(), scheme});
  if (!out.machine.finished()) return;
  if (peer != peers_.end()) peer->second.senders.erase(id);
  sender_of_.erase({out.machine.id(), out.machine.grant().id});
  outgoing_.erase(it);
}

void Core::send(transport::LinkId link, const StreamMessage& message) {
  const auto l = transport_->link(link);
  if (!l) return;                              // its Down is queued and ends the hand-over
  if (!l->send(message.encode())) l->close();  // a message lost is a hand-over stuck: end it now
}

void Core::io_release(std::span<const std::int32_t> pages) {
  if (!pool_->io_release(pages)) ++stats_.refs_lost;
}

std::vector<StreamEvent> Core::take_events() { return std::exchange(events_, {}); }

CoreStats Core::stats() const {
  CoreStats out = stats_;
  out.receiving = static_cast<std::int64_t>(incoming_.size());
  out.sending = static_cast<std::int64_t>(outgoing_.size());
  if (staging_) out.staged_bytes = staging_->used_bytes();
  for (const auto& [link, peer] : peers_) {
    if (peer.up) out.links.push_back(peer.address);
  }
  return out;
}

void Core::close(std::int64_t now_ns) {
  if (std::exchange(closed_, true)) return;
  std::vector<RequestId> receiving;
  for (const auto& [id, in] : incoming_) receiving.push_back(id);
  for (const RequestId& id : receiving) release(id, now_ns);
  std::vector<std::uint64_t> sending;
  for (const auto& [id, out] : outgoing_) sending.push_back(id);
  for (const std::uint64_t id : sending)
    abort(id, {ErrorCode::kCancelled, "the endpoint was closed"});
  transport_->close();  // completes every write that is still posted, and every fence
  std::vector<transport::Event> events;
  while (transport_->poll(&events) > 0) {
    for (transport::Event& event : events) handle(event, now_ns);
    events.clear();
  }
  if (!transport_->unregister_region(region_)) ++stats_.refs_lost;
  if (staging_ && !transport_->unregister_region(staging_->region())) ++stats_.refs_lost;
}

}  // namespace kvcore::stream
