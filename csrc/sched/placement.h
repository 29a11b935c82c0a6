// Placement: which (prefill, decode) pair, or which mono worker, answers a request soonest. One
// cost in seconds, the sum of
//   queue     prompt tokens dispatched there and not computed yet / its rate
//   prefill   uncached tokens of this prompt / its rate
//   stream    what of the KV stream is not hidden behind prefill (pairs only)
//   decode    what one more sequence adds to the decode worker's steps, over a typical answer
//   pressure  how full the decode worker's pages are, steep near the end
// and the least sum wins; equal sums go to the first worker given, so a replay decides the same.
// Thread rules: pure functions of their arguments. Units: tokens, frames, bytes, seconds.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <variant>

#include "base/result.h"

namespace kvcore::sched {

enum class Role : std::uint8_t { kMono, kPrefill, kDecode };

struct WorkerLoad {
  Role role = Role::kMono;
  std::int64_t queued_tokens = 0;   // dispatched there, not computed yet
  std::int64_t running = 0;         // sequences decoding there
  std::int64_t matched_tokens = 0;  // of this prompt, in its prefix cache
  double prefill_tokens_per_s = 0;  // measured; 0 = unknown
  std::int64_t free_frames = 0;     // free or evictable, less what is promised already
  std::int64_t num_frames = 0;
  std::int64_t frame_tokens = 0;  // page_size * extent_pages
  std::int64_t max_context = 0;   // tokens of prompt and answer; 0 = no limit
};

struct Ask {
  std::int64_t prompt_tokens = 0;
  std::int64_t max_new_tokens = 0;
  double kv_bytes_per_token = 0;
};

struct CostModel {
  double unknown_tokens_per_s = 1000;  // rate of a worker that was not measured yet
  double link_bytes_per_s = 1e9;
  double stream_tail =
      0.02;  // share of the stream after prefill ended even on a fast link (last layer)
  double sequence_s = 0.2;  // added to others' answers by one more sequence
  double pressure_s = 0.5;  // of a full decode worker
  double frame_s = 0.5;     // until a busy worker frees one frame, for retry_after_s
  double max_wait_s = 0;    // longest acceptable queue + prefill + stream (the SLO); 0 = no limit
};

struct Cost {
  double queue_s = 0, prefill_s = 0, stream_s = 0, decode_s = 0, pressure_s = 0;
  double total_s() const noexcept { return queue_s + prefill_s + stream_s + decode_s + pressure_s; }
  double first_token_s() const noexcept { return queue_s + prefill_s + stream_s; }
};

// Indexes into the workers given; equal for a mono worker.
struct Placement {
  std::size_t prefill = 0;
  std::size_t decode = 0;
  Cost cost;
};

enum class Refusal : std::uint8_t {
  kNoWorkers,  // the roles at hand cannot answer at all
  kTooLong,    // no worker could hold it even when empty: retrying is useless, retry_after_s = 0
  kNoRoom,     // not enough free frames now
  kTooSlow,    // the best placement breaks max_wait_s
};

struct Rejection {
  Refusal reason = Refusal::kNoWorkers;
  double retry_after_s = 0;
};

std::string_view to_string(Refusal reason) noexcept;

// InvalidArgument for negative or missing numbers; whether to dispatch is the variant.
Result<std::variant<Placement, Rejection>> choose(const Ask& ask,
                                                  std::span<const WorkerLoad> workers,
                                                  const CostModel& model);

}  // namespace kvcore::sched
