// The credits of one link, both ways (credit_window.h), tied to what polls give back
// (event_queue.h) and to what LinkInfo shows. What costs how much is the channel's business.
// Thread rules: the I/O thread. Units: bytes.
#pragma once

#include <memory>

#include "transport/core/credit_window.h"
#include "transport/core/shared.h"

namespace kvcore::transport {

class LinkCredits {
 public:
  LinkCredits(Shared* shared, std::shared_ptr<LinkState> link);

  std::uint64_t first_window() const noexcept { return receive_.exposure(); }  // for the hello
  // The link is up, or over: it shares the memory of all links with the others.
  void open(std::uint64_t peers_window);
  void close();

  // What the peer sends.
  bool take(std::uint64_t cost, std::uint64_t largest_cost) noexcept {  // false: more than it may
    return receive_.take(cost, largest_cost);
  }
  void give_back(std::uint64_t cost) noexcept { receive_.give_back(cost); }
  // Takes what polls have given back, and asks for a wake-up when they have given back enough.
  void collect_polled();
  bool due() noexcept {
    fit();
    return receive_.until_due() == 0;
  }
  Credit announce() noexcept {
    const Credit credit = receive_.announce();
    count_exposure();
    return credit;
  }

  // What this side sends. Corrupt: an announcement that cannot be.
  Status on_announced(const Credit& credit);
  bool may_send(std::uint64_t cost, Priority priority, std::int64_t now);
  std::uint64_t available(Priority priority) const noexcept {
    return send_.available(priority == Priority::kStream);
  }
  void spend(std::uint64_t cost);

 private:
  void fit() noexcept;
  void count_exposure() noexcept;

  Shared* shared_;
  std::shared_ptr<LinkState> link_;
  SendWindow send_;
  ReceiveWindow receive_;
  std::uint64_t polled_seen_ = 0;  // of LinkState::poll_credit
  std::uint64_t exposed_ = 0;      // of receive_, as counted in Shared
  bool open_ = false;
};

}  // namespace kvcore::transport
