// Credits of one link: what a receiver lets its peer have under way, so that its memory is bounded
// by what it announced, however slowly its application polls.
//
// Both sides charge the same cost for every frame that makes the receiver hold something: its bytes
// plus kFrameCost. The receiver gives the cost back when it holds nothing of it any more (payload
// has landed, a message or arrival was polled, a read was served) and announces a new limit, which
// counts all bytes since the link began and only grows. A frame larger than the whole window may
// go when nothing else is under way. Thread rules: plain values, one thread at a time. Units:
// bytes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

namespace kvcore::transport {

inline constexpr std::uint64_t kFrameCost = 64;  // of an entry in a queue, whatever it holds

// What travels: everything below `limit` may be sent; `consumed` of it has been given back.
struct Credit {
  std::uint64_t limit;
  std::uint64_t consumed;
};

class SendWindow {
 public:
  void open(const Credit& credit) {
    limit_ = std::max(limit_, credit.limit);
    consumed_ = std::max(consumed_, credit.consumed);
    size_ = std::max(size_, limit_ - std::min(limit_, consumed_));
  }
  bool idle() const noexcept { return sent_ == consumed_; }
  // A quarter of the window is kept for the highest class.
  std::uint64_t available(bool highest_class) const noexcept {
    const std::uint64_t kept = sent_ + (highest_class ? 0 : size_ / 4);
    return limit_ - std::min(limit_, kept);
  }
  bool fits(std::uint64_t cost, bool highest_class) const noexcept {
    return cost <= available(highest_class) || idle();
  }
  void spend(std::uint64_t cost) noexcept { sent_ += cost; }
  // An announcement can never be below what was announced, or above what was sent.
  bool plausible(const Credit& credit) const noexcept {
    return credit.consumed <= sent_ && credit.limit >= credit.consumed;
  }

 private:
  std::uint64_t limit_ = 0, consumed_ = 0, sent_ = 0, size_ = 0;
};

class ReceiveWindow {
 public:
  explicit ReceiveWindow(std::uint64_t window) : window_(window), limit_(window) {}
  // More links share the same memory now, or fewer. What was announced stays.
  void resize(std::uint64_t window) noexcept { window_ = window; }
  // False: the peer sends more than it may.
  bool take(std::uint64_t cost, std::uint64_t largest_cost) noexcept {
    received_ += cost;
    return received_ <= limit_ + largest_cost;
  }
  void give_back(std::uint64_t cost) noexcept { consumed_ += cost; }
  // What is held or may still come: what this link can cost.
  std::uint64_t exposure() const noexcept { return std::max(limit_, received_) - consumed_; }

  // How much more must be given back before an announcement is worth its frame; 0 = it is due.
  std::uint64_t until_due() const noexcept {
    const std::uint64_t grown = consumed_ + window_ - std::min(limit_, consumed_ + window_);
    const std::uint64_t worth = window_ >= kCoarse ? window_ / 4 : 1;
    return worth - std::min(worth, grown);
  }
  Credit announce() noexcept {
    limit_ = std::max(limit_, consumed_ + window_);
    return {limit_, consumed_};
  }

 private:
  // From here on a quarter of the window is larger than any frame: nobody waits for less.
  static constexpr std::uint64_t kCoarse = 8UL * 1024 * 1024;
  std::uint64_t window_, limit_;
  std::uint64_t received_ = 0, consumed_ = 0;
};

}  // namespace kvcore::transport
