#include "stream/port.h"

#include <algorithm>
#include <utility>

#include "base/text.h"
#include "stream/core.h"

namespace kvcore::stream {

SendPort::SendPort(std::uint64_t sender, const RequestId& id, const Shape& shape,
                   std::int64_t first_token, std::int32_t layer_begin, const PagesView* pages,
                   std::shared_ptr<Inbox> inbox)
    : sender_(sender),
      id_(id),
      shape_(shape),
      first_token_(first_token),
      layer_begin_(layer_begin),
      pages_(pages),
      inbox_(std::move(inbox)) {
  published_.resize(static_cast<std::size_t>(shape.num_slices()));
  cursor_.resize(static_cast<std::size_t>(shape.num_layers));
}

void SendPort::send_run(const SliceRun& run) {
  inbox_->push([sender = sender_, run](Core& core) { core.publish(sender, run); });
}

Status SendPort::may_publish(const SliceRun& run) const {
  if (!shape_.contains(run)) {
    return invalid_argument(text("layer=", layer_begin_ + run.layer, ", pages ", run.first, " + ",
                                 run.count, " must lie inside [", layer_begin_, ", ",
                                 layer_begin_ + shape_.num_layers, ") and [0, ", shape_.num_slots,
                                 ")"));
  }
  const auto base =
      static_cast<std::size_t>(run.layer) * static_cast<std::size_t>(shape_.num_slots);
  const auto begin = published_.begin() + static_cast<std::ptrdiff_t>(base) + run.first;
  const auto end = begin + run.count;
  if (std::find(begin, end, true) != end) {
    return invalid_argument(text("layer=", layer_begin_ + run.layer, ": some of pages ", run.first,
                                 " + ", run.count, " were published before"));
  }
  return {};
}

void SendPort::note_published(const SliceRun& run) {
  const auto base =
      static_cast<std::size_t>(run.layer) * static_cast<std::size_t>(shape_.num_slots);
  std::fill_n(published_.begin() + static_cast<std::ptrdiff_t>(base) + run.first, run.count, true);
  num_published_ += run.count;
}

Status SendPort::publish(std::int32_t layer, std::int32_t first, std::int32_t count,
                         std::int32_t valid_last) {
  const SliceRun run{layer - layer_begin_, first, count};
  const std::lock_guard lock(mu_);
  if (shape_.contains(run)) {
    const std::int32_t want = shape_.valid_tokens(first + count - 1);
    if (valid_last != want) {
      return invalid_argument(text("valid_tokens_in_last=", valid_last, " of page ",
                                   first + count - 1, " must be ", want,
                                   ": a page is published once, when it is complete"));
    }
  }
  KVCORE_RETURN_IF_ERROR(may_publish(run));
  note_published(run);
  send_run(run);
  return {};
}

Status SendPort::push_cached(std::int32_t first, std::int32_t count) {
  const std::lock_guard lock(mu_);
  for (std::int32_t layer = 0; layer < shape_.num_layers; ++layer)  // all of them or none
    KVCORE_RETURN_IF_ERROR(may_publish({layer, first, count}));
  for (std::int32_t layer = 0; layer < shape_.num_layers; ++layer)
    note_published({layer, first, count});
  inbox_->push([sender = sender_, layers = shape_.num_layers, first, count](Core& core) {
    for (std::int32_t layer = 0; layer < layers; ++layer)
      core.publish(sender, {layer, first, count});
  });
  return {};
}

Status SendPort::push_cached_upto(std::int64_t end_token) {
  const std::lock_guard lock(mu_);
  for (std::int32_t layer = 0; layer < shape_.num_layers; ++layer)
    publish_upto_locked(layer, end_token);
  return {};
}

Status SendPort::publish_upto(std::int32_t layer, std::int64_t end_token) {
  if (layer < 0 || layer >= pages_->num_layers) {
    return invalid_argument(text("layer=", layer, " must be in [0, ", pages_->num_layers, ")"));
  }
  const std::int32_t own = layer - layer_begin_;
  if (own < 0 || own >= shape_.num_layers) return {};
  const std::lock_guard lock(mu_);
  publish_upto_locked(own, end_token);
  return {};
}

void SendPort::publish_upto_locked(std::int32_t layer, std::int64_t end_token) {
  const std::int32_t ready = shape_.ready_slots(end_token - first_token_);
  auto& cursor = cursor_[static_cast<std::size_t>(layer)];
  const auto base = static_cast<std::size_t>(layer) * static_cast<std::size_t>(shape_.num_slots);
  while (cursor < ready) {
    const std::int32_t first = cursor++;
    if (published_[base + static_cast<std::size_t>(first)]) continue;
    while (cursor < ready && !published_[base + static_cast<std::size_t>(cursor)]) ++cursor;
    const SliceRun run{layer, first, cursor - first};
    note_published(run);
    send_run(run);
  }
}

void SendPort::mark(std::int64_t at_ns) {
  const std::lock_guard lock(mu_);
  if (std::exchange(marked_, true)) return;
  inbox_->push([sender = sender_, at_ns](Core& core) { core.mark(sender, at_ns); });
}

Status SendPort::commit(std::vector<std::byte> payload, std::int64_t at_ns) {
  if (payload.size() > kMaxPayloadBytes) {
    return invalid_argument(
        text("payload of ", payload.size(), " bytes must be <= ", kMaxPayloadBytes));
  }
  const std::lock_guard lock(mu_);
  if (committed_) return invalid_argument("commit was given before");
  if (num_published_ != shape_.num_slices()) {
    return invalid_argument(text("commit: ", num_published_, " of ", shape_.num_slices(),
                                 " slices have been published"));
  }
  committed_ = true;
  inbox_->push([sender = sender_, at_ns, payload = std::move(payload)](Core& core) {
    core.commit(sender, payload, at_ns);
  });
  return {};
}

void SendPort::abort(ErrorCode code, std::string reason) {
  inbox_->push([sender = sender_, error = Error{code, std::move(reason)}](Core& core) {
    core.abort(sender, error);
  });
}

bool SendPort::all_published() const {
  const std::lock_guard lock(mu_);
  return num_published_ == shape_.num_slices();
}

SendPort::Progress SendPort::progress() const {
  const std::lock_guard lock(progress_mu_);
  return progress_;
}

void SendPort::set_progress(Progress progress) {
  const std::lock_guard lock(progress_mu_);
  progress_ = std::move(progress);
}

}  // namespace kvcore::stream
