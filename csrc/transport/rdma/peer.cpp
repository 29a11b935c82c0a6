#include "transport/rdma/peer.h"

#include <algorithm>

namespace kvcore::transport::rdma {
namespace {

struct Dispatch {
  Outbound& out;
  Inbound& in;
  std::int64_t now;

  Status operator()(const Offer& m) { return in.on(m, now); }
  Status operator()(const Accept& m) { return out.on(m, now); }
  Status operator()(const Refuse& m) { return out.on(m, now), Status{}; }
  Status operator()(const Broken& m) {
    // Each direction has its own queue pairs and epochs.
    if (m.by_owner)
      out.on(m, now);
    else
      in.on(m, now);
    return {};
  }
  Status operator()(const Map& m) { return in.on(m, now); }
  Status operator()(const Mapped& m) { return out.on(m, now); }
  Status operator()(const Unmapped& m) { return out.on(m, now), Status{}; }
  Status operator()(const Drained& m) { return in.on(m), Status{}; }
  Status operator()(const Begin& m) { return in.on(m, now); }
  Status operator()(const Posted& m) { return in.on(m, now); }
  Status operator()(const Verdict& m) { return out.on(m, now), Status{}; }
  Status operator()(const Abort& m) { return in.on(m, now), Status{}; }
  Status operator()(Text& m) { return in.on(std::move(m), now); }
};

}  // namespace

Status Peer::on_control(Bytes bytes, std::int64_t now) {
  KVCORE_ASSIGN_OR_RETURN(Control control, decode(bytes));
  return std::visit(Dispatch{outbound_, inbound_, now}, control);
}

Result<bool> Peer::on_work(const Nic* nic, const WorkDone& done, std::int64_t now) {
  const auto it = std::ranges::find(nics_, nic);
  if (it == nics_.end()) return false;
  const auto rail = static_cast<std::uint32_t>(it - nics_.begin());
  if (outbound_.owns(rail, done.queue_pair)) {
    outbound_.on_work(rail, done, now);
    return true;
  }
  if (!inbound_.owns(rail, done.queue_pair)) return false;
  KVCORE_RETURN_IF_ERROR(inbound_.on_work(rail, done, now));
  return true;
}

void Peer::on_event(const Nic* nic, NicEvent event, std::int64_t now) {
  const auto it = std::ranges::find(nics_, nic);
  if (it == nics_.end() || event == NicEvent::kPortUp) return;
  // A GID that changed leaves queue pairs that reach nobody: they are made anew.
  outbound_.port_down(static_cast<std::uint32_t>(it - nics_.begin()), now);
}

std::optional<std::vector<std::byte>> Peer::next_control() {
  if (auto control = inbound_.next_control()) return encode(*control);
  if (auto control = outbound_.next_control()) return encode(*control);
  return std::nullopt;
}

}  // namespace kvcore::transport::rdma
