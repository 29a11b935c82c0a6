// ClusterIndex: which worker holds which page keys, as the router knows it. Soft state: rebuilt
// from the workers' events; a wrong entry costs a recompute, never a wrong answer. Events carry
// (incarnation, seq): seq counts from 0 within an incarnation (one life of a worker process). A
// gap, or events of an incarnation whose beginning was not seen, empty the worker's entries and ask
// for a snapshot; old and repeated events are dropped.
//
// Invariants: a worker is listed under a key exactly if the key is in the worker's own set.
// Thread rules: one thread. No clock. Units: page keys (one per page_size tokens).
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "prefix/event_log.h"

namespace kvcore::prefix {

enum class Applied : std::uint8_t {
  kOk,      // taken
  kStale,   // repeated, or of an earlier incarnation: dropped
  kResync,  // something is missing: the worker shall send a snapshot
};

class ClusterIndex {
 public:
  Applied apply(std::string_view worker, std::uint64_t incarnation, std::uint64_t seq,
                std::span<const pages::Key> stored, std::span<const pages::Key> removed);
  // Replaces all entries of the worker; the next event has seq + 1.
  Applied apply_snapshot(std::string_view worker, std::uint64_t incarnation, std::uint64_t seq,
                         std::span<const pages::Key> keys);
  // Forgets the worker. False if it was unknown.
  bool drop(std::string_view worker);

  // For each worker that holds keys[0]: how many leading keys it holds without a gap. One pass.
  std::vector<std::pair<std::string, std::int64_t>> query(std::span<const pages::Key> keys) const;

  std::int64_t num_workers() const noexcept { return static_cast<std::int64_t>(workers_.size()); }
  std::int64_t num_keys() const noexcept { return static_cast<std::int64_t>(holders_.size()); }

 private:
  struct Worker {
    std::string id;
    std::uint64_t incarnation = 0;
    std::uint64_t next_seq = 0;
    bool synced = true;
    std::unordered_set<pages::Key, KeyHash> keys;
  };
  Worker& worker_of(std::string_view id, std::uint64_t incarnation);
  bool is_old(std::string_view id, std::uint64_t incarnation, std::uint64_t seq) const;
  void add(Worker& worker, const pages::Key& key);
  void take(Worker& worker, const pages::Key& key);
  void forget_keys(Worker& worker);

  std::map<std::string, Worker, std::less<>> workers_;  // addresses of values are stable
  std::unordered_map<pages::Key, std::vector<const Worker*>, KeyHash> holders_;
};

}  // namespace kvcore::prefix
