#include "sched/placement.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include "base/text.h"

namespace kvcore::sched {
namespace {

constexpr double kShortestRetry = 0.1;
constexpr double kLongestRetry = 60;

std::int64_t frames_for(std::int64_t tokens, const WorkerLoad& w) {
  return (tokens + w.frame_tokens - 1) / w.frame_tokens;
}

double rate(const WorkerLoad& w, const CostModel& m) {
  return w.prefill_tokens_per_s > 0 ? w.prefill_tokens_per_s : m.unknown_tokens_per_s;
}

// The last prompt token is always computed.
double uncached(const Ask& ask, const WorkerLoad& w) {
  return static_cast<double>(ask.prompt_tokens - std::min(w.matched_tokens, ask.prompt_tokens - 1));
}

// Tokens of KV a worker holds for this request: a prefill worker only the prompt's.
std::int64_t held_tokens(const Ask& ask, const WorkerLoad& w) {
  return ask.prompt_tokens + (w.role == Role::kPrefill ? 0 : ask.max_new_tokens);
}

bool could_hold(const Ask& ask, const WorkerLoad& w) {
  const bool fits = w.max_context == 0 || ask.prompt_tokens + ask.max_new_tokens <= w.max_context;
  return fits && frames_for(held_tokens(ask, w), w) <= w.num_frames;
}

std::int64_t missing_frames(const Ask& ask, const WorkerLoad& w) {
  return std::max<std::int64_t>(frames_for(held_tokens(ask, w), w) - w.free_frames, 0);
}

Cost cost_of(const Ask& ask, const WorkerLoad& p, const WorkerLoad& d, bool pair,
             const CostModel& m) {
  Cost c;
  c.queue_s = static_cast<double>(p.queued_tokens) / rate(p, m);
  c.prefill_s = uncached(ask, p) / rate(p, m);
  if (pair) {
    const double stream_s = uncached(ask, d) * ask.kv_bytes_per_token / m.link_bytes_per_s;
    c.stream_s = std::max(stream_s - c.prefill_s, m.stream_tail * stream_s);
  }
  c.decode_s = static_cast<double>(d.running) * m.sequence_s;
  const std::int64_t left = d.free_frames - frames_for(held_tokens(ask, d), d);
  const double used = 1.0 - static_cast<double>(left) / static_cast<double>(d.num_frames);
  c.pressure_s = m.pressure_s * std::pow(std::clamp(used, 0.0, 1.0), 4);
  return c;
}

Status check_worker(const WorkerLoad& w, std::size_t i) {
  const auto bad = [i](const char* field, auto value, const char* allowed) {
    return invalid_argument(
        text("workers[", i, "].", field, "=", value, " is out of range: allowed ", allowed));
  };
  if (w.queued_tokens < 0) return bad("queued_tokens", w.queued_tokens, "0 and up");
  if (w.running < 0) return bad("running", w.running, "0 and up");
  if (w.matched_tokens < 0) return bad("matched_tokens", w.matched_tokens, "0 and up");
  if (!(w.prefill_tokens_per_s >= 0))
    return bad("prefill_tokens_per_s", w.prefill_tokens_per_s, "0 and up");
  if (w.num_frames < 1) return bad("num_frames", w.num_frames, "1 and up");
  if (w.free_frames > w.num_frames) return bad("free_frames", w.free_frames, "at most num_frames");
  if (w.frame_tokens < 1) return bad("frame_tokens", w.frame_tokens, "1 and up");
  if (w.max_context < 0) return bad("max_context", w.max_context, "0 and up");
  return {};
}

Status check(const Ask& ask, std::span<const WorkerLoad> workers, const CostModel& m) {
  if (ask.prompt_tokens < 1)
    return invalid_argument(
        text("prompt_tokens=", ask.prompt_tokens, " is out of range: allowed 1 and up"));
  if (ask.max_new_tokens < 0)
    return invalid_argument(
        text("max_new_tokens=", ask.max_new_tokens, " is out of range: allowed 0 and up"));
  if (!(ask.kv_bytes_per_token >= 0))
    return invalid_argument(
        text("kv_bytes_per_token=", ask.kv_bytes_per_token, " is out of range: allowed 0 and up"));
  if (!(m.unknown_tokens_per_s > 0) || !(m.link_bytes_per_s > 0))
    return invalid_argument(text("unknown_tokens_per_s=", m.unknown_tokens_per_s,
                                 " and link_bytes_per_s=", m.link_bytes_per_s,
                                 " must be greater than 0"));
  for (std::size_t i = 0; i < workers.size(); ++i)
    KVCORE_RETURN_IF_ERROR(check_worker(workers[i], i));
  return {};
}

// Calls visit(prefill index, decode index) for every combination of roles that can answer.
template <class Visit>
void for_each_pair(std::span<const WorkerLoad> workers, Visit visit) {
  for (std::size_t i = 0; i < workers.size(); ++i) {
    if (workers[i].role == Role::kMono) visit(i, i);
    if (workers[i].role != Role::kPrefill) continue;
    for (std::size_t j = 0; j < workers.size(); ++j) {
      if (workers[j].role == Role::kDecode) visit(i, j);
    }
  }
}

}  // namespace

std::string_view to_string(Refusal reason) noexcept {
  switch (reason) {
    case Refusal::kNoWorkers:
      return "no_workers";
    case Refusal::kTooLong:
      return "too_long";
    case Refusal::kNoRoom:
      return "no_room";
    case Refusal::kTooSlow:
      return "too_slow";
  }
  return "no_workers";
}

Result<std::variant<Placement, Rejection>> choose(const Ask& ask,
                                                  std::span<const WorkerLoad> workers,
                                                  const CostModel& model) {
  KVCORE_RETURN_IF_ERROR(check(ask, workers, model));
  std::optional<Placement> best;
  bool any = false, could = false;
  double room_in_s = std::numeric_limits<double>::infinity();
  for_each_pair(workers, [&](std::size_t i, std::size_t j) {
    const WorkerLoad& p = workers[i];
    const WorkerLoad& d = workers[j];
    any = true;
    if (!could_hold(ask, p) || !could_hold(ask, d)) return;
    could = true;
    const Placement here{i, j, cost_of(ask, p, d, i != j, model)};
    const std::int64_t missing = std::max(missing_frames(ask, p), missing_frames(ask, d));
    if (missing > 0) {
      room_in_s =
          std::min(room_in_s, here.cost.queue_s + static_cast<double>(missing) * model.frame_s);
    } else if (!best || here.cost.total_s() < best->cost.total_s()) {
      best = here;
    }
  });
  using Choice = std::variant<Placement, Rejection>;
  const auto soon = [](double s) { return std::clamp(s, kShortestRetry, kLongestRetry); };
  if (!any) return Choice(Rejection{Refusal::kNoWorkers, 1.0});
  if (!could) return Choice(Rejection{Refusal::kTooLong, 0});
  if (!best) return Choice(Rejection{Refusal::kNoRoom, soon(room_in_s)});
  const double late_s = best->cost.first_token_s() - model.max_wait_s;
  if (model.max_wait_s > 0 && late_s > 0) return Choice(Rejection{Refusal::kTooSlow, soon(late_s)});
  return Choice(*best);
}

}  // namespace kvcore::sched
