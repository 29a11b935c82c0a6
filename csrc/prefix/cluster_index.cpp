#include "prefix/cluster_index.h"

#include <algorithm>

namespace kvcore::prefix {

bool ClusterIndex::is_old(std::string_view id, std::uint64_t incarnation, std::uint64_t seq) const {
  const auto found = workers_.find(id);
  if (found == workers_.end()) return false;
  const Worker& w = found->second;
  return incarnation < w.incarnation || (incarnation == w.incarnation && seq < w.next_seq);
}

ClusterIndex::Worker& ClusterIndex::worker_of(std::string_view id, std::uint64_t incarnation) {
  const auto [at, fresh] = workers_.try_emplace(std::string(id));
  Worker& w = at->second;
  if (fresh || incarnation != w.incarnation) {
    forget_keys(w);
    w.id = id;
    w.incarnation = incarnation;
    w.next_seq = 0;
    w.synced = true;
  }
  return w;
}

void ClusterIndex::add(Worker& worker, const pages::Key& key) {
  if (worker.keys.insert(key).second) holders_[key].push_back(&worker);
}

void ClusterIndex::take(Worker& worker, const pages::Key& key) {
  if (worker.keys.erase(key) == 0) return;
  const auto found = holders_.find(key);
  std::erase(found->second, &worker);
  if (found->second.empty()) holders_.erase(found);
}

void ClusterIndex::forget_keys(Worker& worker) {
  const auto keys = std::exchange(worker.keys, {});
  for (const pages::Key& key : keys) {
    const auto found = holders_.find(key);
    std::erase(found->second, &worker);
    if (found->second.empty()) holders_.erase(found);
  }
}

Applied ClusterIndex::apply(std::string_view worker, std::uint64_t incarnation, std::uint64_t seq,
                            std::span<const pages::Key> stored,
                            std::span<const pages::Key> removed) {
  if (is_old(worker, incarnation, seq)) return Applied::kStale;
  Worker& w = worker_of(worker, incarnation);
  if (!w.synced || seq != w.next_seq) {
    w.synced = false;
    w.next_seq = seq + 1;
    forget_keys(w);
    return Applied::kResync;
  }
  w.next_seq = seq + 1;
  for (const pages::Key& key : removed) take(w, key);
  for (const pages::Key& key : stored) add(w, key);
  return Applied::kOk;
}

Applied ClusterIndex::apply_snapshot(std::string_view worker, std::uint64_t incarnation,
                                     std::uint64_t seq, std::span<const pages::Key> keys) {
  if (is_old(worker, incarnation, seq)) return Applied::kStale;
  Worker& w = worker_of(worker, incarnation);
  forget_keys(w);
  w.synced = true;
  w.next_seq = seq + 1;
  for (const pages::Key& key : keys) add(w, key);
  return Applied::kOk;
}

bool ClusterIndex::drop(std::string_view worker) {
  const auto found = workers_.find(worker);
  if (found == workers_.end()) return false;
  forget_keys(found->second);
  workers_.erase(found);
  return true;
}

std::vector<std::pair<std::string, std::int64_t>> ClusterIndex::query(
    std::span<const pages::Key> keys) const {
  std::unordered_map<const Worker*, std::int64_t> matched;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    const auto found = holders_.find(keys[i]);
    if (found == holders_.end()) break;
    bool any = false;
    for (const Worker* w : found->second) {
      std::int64_t& n = matched[w];
      if (n != static_cast<std::int64_t>(i)) continue;
      ++n;
      any = true;
    }
    if (!any) break;
  }
  std::vector<std::pair<std::string, std::int64_t>> out;
  for (const auto& [w, n] : matched) {
    if (n > 0) out.emplace_back(w->id, n);
  }
  return out;
}

}  // namespace kvcore::prefix
