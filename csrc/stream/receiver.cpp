#include "stream/receiver.h"

#include <algorithm>

#include "base/text.h"

namespace kvcore::stream {

Receiver::Receiver(const RequestId& id, const Shape& shape, transport::GrantRef grant, HostId host,
                   std::int64_t deadline_ns)
    : id_(id), shape_(shape), grant_(grant), host_(host), deadline_ns_(deadline_ns) {
  arrived_.resize(static_cast<std::size_t>(shape.num_slices()));
  layer_arrived_.resize(static_cast<std::size_t>(shape.num_layers));
  stats_.kv_bytes = shape.kv_bytes();
  stats_.num_layers = shape.num_layers;
}

std::vector<Receiver::Action> Receiver::take_actions() { return std::exchange(actions_, {}); }

std::int32_t Receiver::arrived_slots(std::int32_t layer) const {
  return layer_arrived_[static_cast<std::size_t>(layer)];
}

void Receiver::on_open(transport::LinkId link, const StreamMessage& open, std::string transport) {
  if (state_ != State::kGranted || open.grant != grant_) {
    ++stats_.dropped;
    StreamMessage refusal{.kind = MessageKind::kReceiverAbort, .request_id = id_};
    refusal.code = ErrorCode::kStale;
    refusal.reason = "the grant is not open to this sender";
    actions_.push_back(Send{link, std::move(refusal)});
    return;
  }
  link_ = link;
  state_ = State::kStreaming;
  stats_.same_clock = open.host == host_;
  stats_.transport = std::move(transport);
}

void Receiver::on_arrival(transport::LinkId link, const SliceRun& run, std::int64_t bytes,
                          std::int64_t at_ns, const Status& status, std::int64_t now_ns) {
  if (state_ != State::kStreaming || !bound_to(link)) {
    ++stats_.dropped;
    return;
  }
  if (!status) return fail(status.error(), now_ns);
  if (!shape_.contains(run) || bytes != run.count * shape_.slice_bytes) {
    return fail({ErrorCode::kCorrupt,
                 text("stream ", to_hex(id_), ": ", bytes, " bytes for layer ", run.layer,
                      ", slots ", run.first, " + ", run.count, " do not fit the grant")},
                now_ns);
  }
  count(run, at_ns);
  complete_if_whole(now_ns);
}

void Receiver::count(const SliceRun& run, std::int64_t at_ns) {
  std::int32_t fresh = 0;
  const auto base =
      static_cast<std::size_t>(run.layer) * static_cast<std::size_t>(shape_.num_slots);
  for (std::int32_t slot = run.first; slot < run.first + run.count; ++slot) {
    auto seen = arrived_[base + static_cast<std::size_t>(slot)];
    if (seen) {
      ++stats_.duplicates;
    } else {
      seen = true;
      ++fresh;
    }
  }
  if (fresh == 0) return;
  layer_arrived_[static_cast<std::size_t>(run.layer)] += fresh;
  num_arrived_ += fresh;
  const std::int64_t bytes = fresh * shape_.slice_bytes;
  log_.push_back({at_ns, bytes});
  stats_.bytes += bytes;
  stats_.first_ns = stats_.first_ns == 0 ? at_ns : std::min(stats_.first_ns, at_ns);
  stats_.last_ns = std::max(stats_.last_ns, at_ns);
}

void Receiver::on_message(transport::LinkId link, StreamMessage message, std::int64_t now_ns) {
  if (state_ != State::kStreaming || !bound_to(link)) {
    ++stats_.dropped;
    return;
  }
  switch (message.kind) {
    case MessageKind::kMark:
      if (mark_)
        ++stats_.dropped;
      else
        mark_ = std::move(message);
      return;
    case MessageKind::kCommit:
      if (commit_)
        ++stats_.dropped;
      else
        commit_ = std::move(message);
      return complete_if_whole(now_ns);
    case MessageKind::kSenderAbort:
      return fail({message.code, std::move(message.reason)}, now_ns);
    default:
      ++stats_.dropped;
  }
}

void Receiver::on_down(transport::LinkId link, const Error& error, std::int64_t now_ns) {
  if (!active() || !bound_to(link)) return;
  link_.reset();  // nobody is left to be told
  fail(error, now_ns);
}

void Receiver::on_time(std::int64_t now_ns) {
  if (!active() || deadline_ns_ == 0 || now_ns < deadline_ns_) return;
  fail({ErrorCode::kTimeout, text("stream ", to_hex(id_), ": ", num_arrived_, " of ",
                                  shape_.num_slices(), " slices had arrived at the deadline")},
       now_ns);
}

void Receiver::release(std::int64_t now_ns) {
  if (!active()) return;
  if (link_) {
    StreamMessage abort{.kind = MessageKind::kReceiverAbort, .request_id = id_};
    abort.code = ErrorCode::kCancelled;
    abort.reason = "released by the receiver";
    actions_.push_back(Send{*link_, std::move(abort)});
  }
  finish(State::kReleased, now_ns);
}

void Receiver::complete_if_whole(std::int64_t now_ns) {
  if (state_ != State::kStreaming || !commit_ || num_arrived_ != shape_.num_slices()) return;
  finish(State::kComplete, now_ns);
  actions_.push_back(Send{*link_, {.kind = MessageKind::kDone, .request_id = id_}});
  actions_.push_back(Complete{std::move(commit_->payload), stats_});
}

void Receiver::fail(Error error, std::int64_t now_ns) {
  if (link_) {
    StreamMessage abort{.kind = MessageKind::kReceiverAbort, .request_id = id_};
    abort.code = error.code;
    abort.reason = error.message;
    actions_.push_back(Send{*link_, std::move(abort)});
  }
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
  if (commit_) stats_.commit_ns = commit_->at_ns;
  if (commit_ && stats_.same_clock) {
    stats_.exposed_s =
        kNs * static_cast<double>(std::max<std::int64_t>(0, stats_.end_ns - commit_->at_ns));
  }
  if (!mark_ || stats_.kv_bytes == 0) return;
  stats_.mark_ns = mark_->at_ns;
  std::int64_t arrived = std::min(mark_->acked_bytes, stats_.bytes);
  if (stats_.same_clock) {
    arrived = 0;
    for (const Landed& l : log_) arrived += l.at_ns <= mark_->at_ns ? l.bytes : 0;
    stats_.tail_s =
        kNs * static_cast<double>(std::max<std::int64_t>(0, stats_.last_ns - mark_->at_ns));
  }
  stats_.arrived_fraction = static_cast<double>(arrived) / static_cast<double>(stats_.kv_bytes);
}

}  // namespace kvcore::stream
