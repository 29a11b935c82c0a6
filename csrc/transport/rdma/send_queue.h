// Counts what was posted to one queue pair and what is over, with a completion for every N-th piece
// of work only: slots are free again when a completion says that they, and all before, are over.
//
// Numbers are never reused, not even when the queue pair is made anew, so that a late completion of
// an old one says nothing about the new one. Thread rules: a plain value.
#pragma once

#include <cstdint>

namespace kvcore::transport::rdma {

class SendQueue {
 public:
  // A quarter of the depth at most, so that a queue full of unsignalled work cannot come about.
  static constexpr std::uint32_t kSignalEvery = 16;

  explicit SendQueue(std::uint32_t depth)
      : depth_(depth), every_(depth / 4 < kSignalEvery ? depth / 4 + 1 : kSignalEvery) {}

  std::uint32_t free() const noexcept {
    return depth_ - static_cast<std::uint32_t>(posted_ - retired_);
  }
  // Work at the end that would complete without a word, if nothing followed.
  bool silent() const noexcept { return unsignalled_ > 0; }
  bool drained() const noexcept { return posted_ == retired_; }
  std::uint64_t posted() const noexcept { return posted_; }
  std::uint64_t retired() const noexcept { return retired_; }

  struct Ticket {
    std::uint64_t id;
    bool signalled;
  };
  // The next piece of work; `last` = nothing may follow for a while, so its end must be told.
  Ticket next(bool last) noexcept {
    const bool signalled = last || ++unsignalled_ >= every_;
    if (signalled) unsignalled_ = 0;
    return {++posted_, signalled};
  }
  // Takes back the last `count` tickets: they were not posted after all.
  // The queue pair is broken then, and what is left flushes with a word each.
  void unpost(std::uint64_t count) noexcept { posted_ -= count; }
  // Everything up to `id` is over. False: an id of long ago, or one never given.
  bool retire(std::uint64_t id) noexcept {
    if (id <= retired_ || id > posted_) return false;
    retired_ = id;
    return true;
  }
  // The queue pair is destroyed: nothing more will complete.
  void abandon() noexcept {
    retired_ = posted_;
    unsignalled_ = 0;
  }

 private:
  std::uint32_t depth_, every_, unsignalled_ = 0;
  std::uint64_t posted_ = 0, retired_ = 0;
};

}  // namespace kvcore::transport::rdma
