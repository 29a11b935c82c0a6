#include "stream/receiver.h"

#include <algorithm>
#include <utility>

#include "base/text.h"

namespace kvcore::stream {

Receiver::Receiver(const RequestId& id, std::vector<ShareOf> shares, HostId host,
                   std::int64_t deadline_ns, bool tell_layers)
    : id_(id), host_(host), deadline_ns_(deadline_ns), tell_layers_(tell_layers) {
  std::int32_t layers = 0;
  for (ShareOf& s : shares) {
    Incoming in{std::move(s.shape), s.grant, s.layer_begin};
    in.arrived.resize(static_cast<std::size_t>(in.shape.num_slices()));
    in.layer_arrived.resize(static_cast<std::size_t>(in.shape.num_layers));
    stats_.kv_bytes += in.shape.kv_bytes();
    layers = std::max(layers, in.shape.num_layers);
    const auto begin = static_cast<std::size_t>(in.layer_begin);
    const std::size_t end = begin + static_cast<std::size_t>(in.shape.num_layers);
    if (layer_missing_.size() < end) layer_missing_.resize(end);
    for (std::size_t layer = begin; layer < end; ++layer)
      layer_missing_[layer] += in.shape.num_slots;
    shares_.push_back(std::move(in));
  }
  stats_.num_layers = layers;
}

std::vector<Receiver::Action> Receiver::take_actions() { return std::exchange(actions_, {}); }

std::int32_t Receiver::arrived_slots(std::int32_t layer, std::size_t share) const {
  return shares_[share].layer_arrived[static_cast<std::size_t>(layer)];
}

std::size_t Receiver::share_of(transport::GrantRef grant) const noexcept {
  const auto it = std::find_if(shares_.begin(), shares_.end(),
                               [&](const Incoming& in) { return in.grant == grant; });
  return static_cast<std::size_t>(it - shares_.begin());
}

bool Receiver::bound_to(std::size_t share, transport::LinkId link) const noexcept {
  return share < shares_.size() && shares_[share].link == link;
}

void Receiver::on_open(transport::LinkId link, const StreamMessage& open,
                       const std::string& transport) {
  const std::size_t share = share_of(open.grant);
  if (active() && bound_to(share, link)) {
    ++stats_.dropped;  // told again: nothing changes
    return;
  }
  if (!active() || share == shares_.size() || shares_[share].link) {
    ++stats_.dropped;
    StreamMessage refusal{
        .kind = MessageKind::kReceiverAbort, .request_id = id_, .grant = open.grant};
    refusal.code = ErrorCode::kStale;
    refusal.reason = "the grant is not open to this sender";
    actions_.push_back(Send{link, std::move(refusal)});
    return;
  }
  shares_[share].link = link;
  shares_[share].same_clock = open.host == host_;
  state_ = State::kStreaming;
  stats_.same_clock = std::all_of(shares_.begin(), shares_.end(),
                                  [](const Incoming& in) { return in.link && in.same_clock; });
  if (stats_.transport.find(transport) == std::string::npos)
    stats_.transport += (stats_.transport.empty() ? "" : "+") + transport;
}

void Receiver::on_arrival(transport::LinkId link, std::size_t share, const SliceRun& run,
                          std::int64_t bytes, std::int64_t at_ns, const Status& status,
                          std::int64_t now_ns) {
  if (state_ != State::kStreaming || !bound_to(share, link)) {
    ++stats_.dropped;
    return;
  }
  if (!status) return fail(status.error(), now_ns);
  Incoming& in = shares_[share];
  if (!in.shape.contains(run) || bytes != in.shape.bytes_of(run)) {
    return fail({ErrorCode::kCorrupt,
                 text("stream ", to_hex(id_), ": ", bytes, " bytes for layer ", run.layer,
                      ", slots ", run.first, " + ", run.count, " do not fit the grant")},
                now_ns);
  }
  count(in, run, at_ns);
  complete_if_whole(now_ns);
}

void Receiver::count(Incoming& in, const SliceRun& run, std::int64_t at_ns) {
  std::int32_t fresh = 0;
  std::int64_t bytes = 0;
  const auto base =
      static_cast<std::size_t>(run.layer) * static_cast<std::size_t>(in.shape.num_slots);
  for (std::int32_t slot = run.first; slot < run.first + run.count; ++slot) {
    auto seen = in.arrived[base + static_cast<std::size_t>(slot)];
    if (seen) {
      ++stats_.duplicates;
    } else {
      seen = true;
      ++fresh;
      bytes += in.shape.bytes_of(run.layer, slot);
    }
  }
  if (fresh == 0) return;
  in.layer_arrived[static_cast<std::size_t>(run.layer)] += fresh;
  const std::int32_t own = in.layer_begin + run.layer;
  auto& missing = layer_missing_[static_cast<std::size_t>(own)];
  missing -= fresh;
  if (missing == 0 && tell_layers_) actions_.push_back(LayerArrived{own});
  in.num_arrived += fresh;
  in.bytes += bytes;
  log_.push_back({at_ns, bytes});
  stats_.bytes += bytes;
  stats_.first_ns = stats_.first_ns == 0 ? at_ns : std::min(stats_.first_ns, at_ns);
  stats_.last_ns = std::max(stats_.last_ns, at_ns);
}

void Receiver::on_message(transport::LinkId link, StreamMessage message, std::int64_t now_ns) {
  const std::size_t share = share_of(message.grant);
  if (state_ != State::kStreaming || !bound_to(share, link)) {
    ++stats_.dropped;
    return;
  }
  Incoming& in = shares_[share];
  const auto keep_first = [&](std::optional<StreamMessage>& slot) {
    if (slot)
      ++stats_.dropped;
    else
      slot = std::move(message);
  };
  switch (message.kind) {
    case MessageKind::kMark:
      return keep_first(in.mark);
    case MessageKind::kCommit:
      keep_first(in.commit);
      return complete_if_whole(now_ns);
    case MessageKind::kSenderAbort:
      in.link.reset();  // it knows
      return fail({message.code, std::move(message.reason)}, now_ns);
    default:
      ++stats_.dropped;
  }
}

void Receiver::on_down(transport::LinkId link, const Error& error, std::int64_t now_ns) {
  if (!active()) return;
  bool mine = false;
  for (Incoming& in : shares_) {
    if (in.link != link) continue;
    in.link.reset();  // nobody is left to be told
    mine = true;
  }
  if (mine) fail(error, now_ns);
}

void Receiver::on_time(std::int64_t now_ns) {
  if (!active() || deadline_ns_ == 0 || now_ns < deadline_ns_) return;
  std::int64_t arrived = 0, slices = 0, silent = 0;
  for (const Incoming& in : shares_) {
    arrived += in.num_arrived;
    slices += in.shape.num_slices();
    silent += !in.link;
  }
  fail({ErrorCode::kTimeout,
        text("stream ", to_hex(id_), ": ", arrived, " of ", slices,
             " slices had arrived at the deadline",
             silent > 0 ? text("; ", silent, " of ", shares_.size(), " senders never came") : "")},
       now_ns);
}

void Receiver::tell_all(const StreamMessage& message) {
  for (const Incoming& in : shares_) {
    if (!in.link) continue;
    actions_.push_back(Send{*in.link, message});
    std::get<Send>(actions_.back()).message.grant = in.grant;
  }
}

void Receiver::release(std::int64_t now_ns) {
  if (!active()) return;
  StreamMessage abort{.kind = MessageKind::kReceiverAbort, .request_id = id_};
  abort.code = ErrorCode::kCancelled;
  abort.reason = "released by the receiver";
  tell_all(abort);
  finish(State::kReleased, now_ns);
}

void Receiver::complete_if_whole(std::int64_t now_ns) {
  const bool whole =
      std::all_of(shares_.begin(), shares_.end(), [](const Incoming& in) { return in.whole(); });
  if (state_ != State::kStreaming || !whole) return;
  finish(State::kComplete, now_ns);
  tell_all({.kind = MessageKind::kDone, .request_id = id_});
  actions_.push_back(Complete{take_payload(), stats_});
}

// Of the first share that gave one: all ranks of a sender may sample the same token.
std::vector<std::byte> Receiver::take_payload() {
  for (Incoming& in : shares_) {
    if (!in.commit->payload.empty()) return std::move(in.commit->payload);
  }
  return {};
}

void Receiver::fail(Error error, std::int64_t now_ns) {
  StreamMessage abort{.kind = MessageKind::kReceiverAbort, .request_id = id_};
  abort.code = error.code;
  abort.reason = error.message;
  tell_all(abort);
  finish(State::kFailed, now_ns);
  actions_.push_back(Failed{std::move(error), stats_});
}

void Receiver::finish(State state, std::int64_t now_ns) {
  state_ = state;
  stats_.end_ns = now_ns;
  account();
  actions_.push_back(Fence{});
}

void Receiver::account() {
  constexpr double kNs = 1e-9;
  bool marked = true, committed = true;
  std::int64_t acked = 0;
  for (const Incoming& in : shares_) {
    marked = marked && in.mark;
    committed = committed && in.commit;
    if (in.mark) stats_.mark_ns = std::max(stats_.mark_ns, in.mark->at_ns);
    if (in.commit) stats_.commit_ns = std::max(stats_.commit_ns, in.commit->at_ns);
    if (in.mark) acked += std::min(in.mark->acked_bytes, in.bytes);
  }
  if (committed && stats_.same_clock) {
    stats_.exposed_s =
        kNs * static_cast<double>(std::max<std::int64_t>(0, stats_.end_ns - stats_.commit_ns));
  }
  if (!marked || stats_.kv_bytes == 0) return;
  if (stats_.same_clock) {
    acked = 0;
    for (const Landed& l : log_) acked += l.at_ns <= stats_.mark_ns ? l.bytes : 0;
    stats_.tail_s =
        kNs * static_cast<double>(std::max<std::int64_t>(0, stats_.last_ns - stats_.mark_ns));
  }
  stats_.arrived_fraction = static_cast<double>(acked) / static_cast<double>(stats_.kv_bytes);
}

}  // namespace kvcore::stream
