#include "stream/sender.h"

#include <algorithm>

#include "base/text.h"

namespace kvcore::stream {

Sender::Sender(const RequestId& id, const Shape& shape, transport::GrantRef grant, HostId host,
               std::int64_t deadline_ns, SenderLimits limits, bool makes_sums)
    : id_(id),
      shape_(shape),
      grant_(grant),
      host_(host),
      deadline_ns_(deadline_ns),
      limits_(limits),
      makes_sums_(makes_sums) {}

std::vector<Sender::Action> Sender::take_actions() { return std::exchange(actions_, {}); }

void Sender::on_up() {
  if (state_ != State::kConnecting && !farewell_) return;
  up_ = true;
  StreamMessage open = message(MessageKind::kOpen);
  open.host = host_;
  open.makes_sums = makes_sums_;
  actions_.push_back(Send{std::move(open)});
  if (farewell_) {
    actions_.push_back(Send{*std::exchange(farewell_, std::nullopt)});
    return;
  }
  state_ = State::kStreaming;
  if (mark_) actions_.push_back(Send{*std::exchange(mark_, std::nullopt)});
}

void Sender::publish(const SliceRun& run) {
  if (ended()) return;
  if (!queue_.empty() && queue_.back().layer == run.layer &&
      queue_.back().first + queue_.back().count == run.first) {
    queue_.back().count += run.count;
  } else {
    queue_.push_back(run);
  }
  queued_bytes_ += shape_.bytes_of(run);
}

void Sender::mark(std::int64_t at_ns) {
  if (ended()) return;
  StreamMessage m = message(MessageKind::kMark);
  m.at_ns = at_ns;
  m.acked_bytes = acked_bytes_;
  if (up_)
    actions_.push_back(Send{std::move(m)});
  else
    mark_ = std::move(m);
}

void Sender::commit(std::vector<std::byte> payload, std::int64_t at_ns) {
  if (ended()) return;
  commit_ = message(MessageKind::kCommit);
  commit_->at_ns = at_ns;
  commit_->payload = std::move(payload);
  commit_if_sent();
}

// How many slots of one kind from the front of a run fit; at least one.
std::int64_t Sender::take_slots(const SliceRun& from, std::int64_t max_bytes) const {
  std::int64_t slots = 0, bytes = 0;
  for (; slots < from.count; ++slots) {
    const auto slot = static_cast<std::int32_t>(from.first + slots);
    bytes += shape_.bytes_of(from.layer, slot);
    const bool fits = bytes <= max_bytes && shape_.is_sealed(slot) == shape_.is_sealed(from.first);
    if (slots > 0 && !fits) break;  // a slice larger than a limit still has to go
  }
  return slots;
}

std::optional<SliceRun> Sender::next_write() {
  if (state_ != State::kStreaming || revoked_ || queue_.empty()) return std::nullopt;
  SliceRun& front = queue_.front();
  const std::int64_t room = limits_.max_inflight_bytes - inflight_bytes_;
  if (inflight_bytes_ > 0 && room < shape_.bytes_of(front.layer, front.first)) return std::nullopt;
  const std::int64_t share = std::max(kLeastWriteBytes, queued_bytes_ / kShareOfQueue);
  SliceRun out = front;
  out.count = static_cast<std::int32_t>(
      take_slots(front, std::min({room, limits_.max_write_bytes, share})));
  queued_bytes_ -= shape_.bytes_of(out);
  front.first += out.count;
  front.count -= out.count;
  if (front.count == 0) queue_.pop_front();
  return out;
}

void Sender::on_posted(transport::OpId op, const SliceRun& run) {
  const std::int64_t bytes = shape_.bytes_of(run);
  inflight_[op] = bytes;
  inflight_bytes_ += bytes;
  posted_slices_ += run.count;
  commit_if_sent();
}

void Sender::on_refused(Error error) { abort(std::move(error)); }

void Sender::commit_if_sent() {
  if (state_ != State::kStreaming || !commit_ || posted_slices_ != shape_.num_slices()) return;
  state_ = State::kCommitted;
  actions_.push_back(Send{*std::exchange(commit_, std::nullopt)});
}

void Sender::on_completion(transport::OpId op, const Status& status, std::int64_t now_ns) {
  const auto it = inflight_.find(op);
  if (it == inflight_.end()) return;
  inflight_bytes_ -= it->second;
  if (status) acked_bytes_ += it->second;
  inflight_.erase(it);
  if (!status && !ended()) {
    if (status.error().code != ErrorCode::kStale) return abort(status.error());
    if (!revoked_) {
      const std::int64_t until = now_ns + kReasonGraceNs;
      deadline_ns_ = deadline_ns_ == 0 ? until : std::min(deadline_ns_, until);
    }
    revoked_ = status.error();
  }
  release_if_idle();
}

void Sender::on_message(const StreamMessage& m) {
  if (ended()) return;
  if (m.kind == MessageKind::kDone && state_ == State::kCommitted) {
    // The receiver says every slice is in place; acknowledgements still under way only hold the
    // refs.
    end(State::kDone, {});
  } else if (m.kind == MessageKind::kReceiverAbort) {
    up_ = false;  // the receiver knows already
    end(State::kFailed, Error{m.code, m.reason});
  }
}

void Sender::on_down(const Error& error) {
  up_ = false;
  farewell_.reset();
  if (!ended()) end(State::kFailed, error);
}

void Sender::on_time(std::int64_t now_ns) {
  if (ended() || deadline_ns_ == 0 || now_ns < deadline_ns_) return;
  if (revoked_) return abort(*revoked_);
  abort({ErrorCode::kTimeout, text("stream ", to_hex(id_), ": ", acked_bytes_, " of ",
                                   shape_.kv_bytes(), " bytes were sent at the deadline")});
}

void Sender::abort(Error error) {
  if (ended()) return;
  StreamMessage m = message(MessageKind::kSenderAbort);
  m.code = error.code;
  m.reason = error.message;
  if (up_)
    actions_.push_back(Send{std::move(m)});
  else
    farewell_ = std::move(m);
  end(State::kFailed, std::move(error));
}

void Sender::end(State state, Status status) {
  state_ = state;
  status_ = status;
  queue_.clear();
  queued_bytes_ = 0;
  commit_.reset();
  if (state == State::kFailed) {
    for (const auto& [op, bytes] : inflight_) actions_.push_back(CancelWrite{op});
  }
  const std::int64_t bytes = state == State::kDone ? shape_.kv_bytes() : acked_bytes_;
  actions_.push_back(Ended{std::move(status), bytes});
  release_if_idle();
}

void Sender::release_if_idle() {
  if (!ended() || released_ || !inflight_.empty()) return;
  released_ = true;
  actions_.push_back(ReleasePages{});
}

}  // namespace kvcore::stream
