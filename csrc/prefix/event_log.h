// What appeared in and disappeared from a tree since the last drain, as net differences: the order
// inside one drain does not matter if what disappeared is applied first.
//   PageLog  by page id; bounded by the number of pages (a page may leave one prefix and join
//   another). KeyLog   by page key; past its limit it forgets and says so (lost), and the reader
//   takes a snapshot.
// Thread rules: those of the owner.
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

struct KeyEvents {
  std::vector<pages::Key> stored;
  std::vector<pages::Key> removed;
  bool lost = false;  // true: differences are incomplete, use a snapshot of all keys
};

class KeyLog {
 public:
  explicit KeyLog(std::size_t limit) : limit_(limit) {}
  void stored(const pages::Key& key) { record(key, true); }
  void removed(const pages::Key& key) { record(key, false); }

  KeyEvents drain() {
    KeyEvents out;
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

struct PageEvents {
  std::vector<std::int32_t> removed;
  std::vector<std::int32_t> stored;
};

class PageLog {
 public:
  explicit PageLog(std::size_t num_pages) : state_(num_pages, 0) {}
  void stored(std::int32_t page) { change(page) |= kStored; }
  void removed(std::int32_t page) {
    std::uint8_t& state = change(page);
    if ((state & kStored) != 0) {
      state &= static_cast<std::uint8_t>(~kStored);  // came and went between two drains
    } else {
      state |= kRemoved;
    }
  }

  PageEvents drain() {
    PageEvents out;
    for (const std::int32_t page : touched_) {
      std::uint8_t& state = state_[static_cast<std::size_t>(page)];
      if ((state & kRemoved) != 0) out.removed.push_back(page);
      if ((state & kStored) != 0) out.stored.push_back(page);
      state = 0;
    }
    touched_.clear();
    return out;
  }

 private:
  static constexpr std::uint8_t kTouched = 1, kRemoved = 2, kStored = 4;
  std::uint8_t& change(std::int32_t page) {
    std::uint8_t& state = state_[static_cast<std::size_t>(page)];
    if (state == 0) touched_.push_back(page);
    state |= kTouched;
    return state;
  }
  std::vector<std::uint8_t> state_;
  std::vector<std::int32_t> touched_;
};

}  // namespace kvcore::prefix
