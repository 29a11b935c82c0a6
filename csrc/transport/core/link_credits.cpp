#include "transport/core/link_credits.h"

#include <utility>

namespace kvcore::transport {

LinkCredits::LinkCredits(Shared* shared, std::shared_ptr<LinkState> link)
    : shared_(shared), link_(std::move(link)), receive_(shared->window_of(shared->links_up + 1)) {}

void LinkCredits::open(std::uint64_t peers_window) {
  open_ = true;
  shared_->links_up += 1;
  send_.open({peers_window, 0});
  link_->credit_bytes = send_.available(true);
}

void LinkCredits::close() {
  if (std::exchange(open_, false)) shared_->links_up -= 1;
}

void LinkCredits::collect_polled() {
  if (!open_) return;
  receive_.resize(shared_->window_of(shared_->links_up));
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
