#include "transport/core/shared.h"

#include <unistd.h>

#include <algorithm>

#include "base/text.h"

namespace kvcore::transport {
namespace {

class MonotonicClock final : public Clock {
 public:
  std::int64_t now_ns() const noexcept override { return transport::now_ns(); }
};

const Clock& system_clock() {
  static const MonotonicClock clock;
  return clock;
}

}  // namespace

Shared::Shared(TransportOptions o)
    : options(std::move(o)),
      clock(options.clock != nullptr ? *options.clock : system_clock()),
      grants(options.random) {}

std::uint64_t Shared::window_of(std::uint64_t links) const noexcept {
  const Credits& c = options.credits;
  return std::min(c.per_link_bytes, c.total_bytes / std::max<std::uint64_t>(1, links));
}

Status Shared::room_for_link() const {
  if (links_up < options.max_links) return {};
  return Error{ErrorCode::kTransport, text("max_links=", options.max_links, " reached")};
}

void Shared::wake() {
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto n = ::write(wake_fd.get(), &one, sizeof one);
}

Status Shared::post(LinkState* state, Command command) {
  bool first = false;
  {
    const std::lock_guard lock(mu);
    if (stopped) return Error{ErrorCode::kPeerDead, "the transport is closed"};
    if (state != nullptr && state->closed) return Error{ErrorCode::kPeerDead, "the link is down"};
    if (std::holds_alternative<CloseCommand>(command.what)) state->closed = true;
    if (std::holds_alternative<StopCommand>(command.what)) stopped = true;
    first = commands.empty();
    commands.push_back(std::move(command));
  }
  if (first) wake();
  return {};
}

}  // namespace kvcore::transport
