#include "transport/core/link_credits.h"

#include <algorithm>
#include <utility>

namespace kvcore::transport {
namespace {

// What every link has, however much of the total others hold: before it is up, it counts nowhere.
constexpr std::uint64_t kLeastWindow = 64UL * 1024;

}  // namespace

LinkCredits::LinkCredits(Shared* shared, std::shared_ptr<LinkState> link)
    : shared_(shared),
      link_(std::move(link)),
      receive_(std::min(kLeastWindow, shared->window_of(shared->links_up + 1))) {}

void LinkCredits::open(std::uint64_t peers_window) {
  open_ = true;
  shared_->links_up += 1;
  count_exposure();
  send_.open({peers_window, 0});
  link_->credit_bytes = send_.available(true);
}

void LinkCredits::close() {
  if (!std::exchange(open_, false)) return;
  shared_->links_up -= 1;
  shared_->exposed_bytes -= std::exchange(exposed_, 0);
}

void LinkCredits::count_exposure() noexcept {
  if (!open_) return;
  shared_->exposed_bytes -= exposed_;
  exposed_ = receive_.exposure();
  shared_->exposed_bytes += exposed_;
}

// An equal share, as far as other links have given back what they held before this one came.
void LinkCredits::fit() noexcept {
  if (!open_) return;
  count_exposure();
  const std::uint64_t share = shared_->window_of(shared_->links_up);
  const std::uint64_t others = shared_->exposed_bytes - exposed_;
  const std::uint64_t total = shared_->options.credits.total_bytes;
  const std::uint64_t left = total - std::min(total, others);
  receive_.resize(std::min(share, std::max(left, kLeastWindow)));
}

void LinkCredits::collect_polled() {
  if (!open_) return;
  fit();
  PollCredit& credit = *link_->poll_credit;
  for (;;) {
    const std::uint64_t polled = credit.polled.load();
    receive_.give_back(polled - polled_seen_);
    polled_seen_ = polled;
    const std::uint64_t missing = receive_.until_due();
    credit.wake_at = missing == 0 ? PollCredit::kNever : polled + missing;
    if (missing == 0 || credit.polled.load() == polled) return;  // else: polled in between
  }
}

Status LinkCredits::on_announced(const Credit& credit) {
  if (!send_.plausible(credit))
    return Error{ErrorCode::kCorrupt, "the peer announces credits for what was not sent"};
  send_.open(credit);
  link_->credit_bytes = send_.available(true);
  return {};
}

bool LinkCredits::may_send(std::uint64_t cost, Priority priority, std::int64_t now) {
  const bool fits = send_.fits(cost, priority == Priority::kStream);
  if (fits && link_->stalled_since_ns != 0) {
    link_->credit_stall_ns += static_cast<std::uint64_t>(now - link_->stalled_since_ns);
    link_->stalled_since_ns = 0;
  } else if (!fits && link_->stalled_since_ns == 0) {
    link_->stalled_since_ns = now;
  }
  return fits;
}

void LinkCredits::spend(std::uint64_t cost) {
  send_.spend(cost);
  link_->credit_bytes = send_.available(true);
}

}  // namespace kvcore::transport
