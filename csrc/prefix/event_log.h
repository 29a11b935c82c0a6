// EventLog: which page keys appeared and disappeared since the last drain, as a net difference, so the
// order inside one drain does not matter. Bounded: past the limit it forgets and says so (lost), and
// the reader takes a snapshot instead. Thread rules: those of its owner.
#pragma once

#include <cstdint>
#include <cstring>
#include <unordered_map>
#include <vector>

#include "pages/keys.h"

namespace kvcore::prefix {

// Keys are keyed hashes: any eight of their bytes are as good as a hash of them.
struct KeyHash {
  std::size_t operator()(const pages::Key& key) const noexcept {
    std::size_t h;
    std::memcpy(&h, key.data(), sizeof(h));
    return h;
  }
};

struct PrefixEvents {
  std::vector<pages::Key> stored;
  std::vector<pages::Key> removed;
  bool lost = false;  // true: differences are incomplete, use a snapshot of all keys
};

class EventLog {
 public:
  explicit EventLog(std::size_t limit) : limit_(limit) {}
  void stored(const pages::Key& key) { record(key, true); }
  void removed(const pages::Key& key) { record(key, false); }

  PrefixEvents drain() {
    PrefixEvents out;
    out.lost = lost_;
    for (const auto& [key, was_stored] : net_)
      (was_stored ? out.stored : out.removed).push_back(key);
    net_.clear();
    lost_ = false;
    return out;
  }

 private:
  // A key alternates between stored and removed, so a second event undoes the first.
  void record(const pages::Key& key, bool was_stored) {
    if (lost_) return;
    const auto [at, fresh] = net_.try_emplace(key, was_stored);
    if (!fresh) {
      net_.erase(at);
    } else if (net_.size() > limit_) {
      net_.clear();
      lost_ = true;
    }
  }

  std::size_t limit_;
  std::unordered_map<pages::Key, bool, KeyHash> net_;
  bool lost_ = false;
};

}  // namespace kvcore::prefix
