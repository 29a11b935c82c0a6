// LoadBook: what was dispatched to each worker and is not done, counted from the moment of
// dispatch, so that two requests placed between two heartbeats see each other. Invariants: an entry
// ends exactly once; unknown requests and workers are ignored and counted by the return value (late
// messages of a request that was retried elsewhere are normal). Thread rules: one thread. No clock.
// Units: tokens, frames.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>

namespace kvcore::sched {

struct BookedLoad {
  std::int64_t queued_tokens = 0;
  std::int64_t running = 0;
  std::int64_t frames = 0;
};

class LoadBook {
 public:
  // False if the request is booked at this worker already.
  bool dispatch(std::string_view worker, std::string_view request, std::int64_t uncached_tokens,
                std::int64_t frames);
  // Its prompt is computed: no longer queued, still running.
  bool prefilled(std::string_view worker, std::string_view request);
  bool finished(std::string_view worker, std::string_view request);
  void forget_worker(std::string_view worker);
  BookedLoad load(std::string_view worker) const;

 private:
  struct Entry {
    std::int64_t queued_tokens;
    std::int64_t frames;
  };
  struct Worker {
    BookedLoad total;
    std::unordered_map<std::string, Entry> entries;
  };
  std::unordered_map<std::string, Worker> workers_;
};

}  // namespace kvcore::sched
