#include "sched/load_book.h"

#include <utility>

namespace kvcore::sched {

bool LoadBook::dispatch(std::string_view worker, std::string_view request,
                        std::int64_t uncached_tokens, std::int64_t frames) {
  Worker& w = workers_[std::string(worker)];
  if (!w.entries.try_emplace(std::string(request), Entry{uncached_tokens, frames}).second)
    return false;
  w.total.queued_tokens += uncached_tokens;
  w.total.frames += frames;
  ++w.total.running;
  return true;
}

bool LoadBook::prefilled(std::string_view worker, std::string_view request) {
  const auto w = workers_.find(std::string(worker));
  if (w == workers_.end()) return false;
  const auto entry = w->second.entries.find(std::string(request));
  if (entry == w->second.entries.end()) return false;
  w->second.total.queued_tokens -= std::exchange(entry->second.queued_tokens, 0);
  return true;
}

bool LoadBook::finished(std::string_view worker, std::string_view request) {
  if (!prefilled(worker, request)) return false;
  Worker& w = workers_[std::string(worker)];
  const auto entry = w.entries.find(std::string(request));
  w.total.frames -= entry->second.frames;
  --w.total.running;
  w.entries.erase(entry);
  return true;
}

void LoadBook::forget_worker(std::string_view worker) { workers_.erase(std::string(worker)); }

BookedLoad LoadBook::load(std::string_view worker) const {
  const auto w = workers_.find(std::string(worker));
  return w == workers_.end() ? BookedLoad{} : w->second.total;
}

}  // namespace kvcore::sched
