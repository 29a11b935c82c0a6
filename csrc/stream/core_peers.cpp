// The part of Core that keeps one link per peer: which address, connecting, going down.
#include <algorithm>
#include <utility>

#include "base/text.h"
#include "stream/core.h"

namespace kvcore::stream {
namespace {

std::string scheme_part(const std::string& address) { return address.substr(0, address.find(':')); }

int preference(const std::string& scheme) {
  constexpr std::string_view kBestFirst[] = {"loopback", "shm", "rdma", "tcp"};
  const auto it = std::find(std::begin(kBestFirst), std::end(kBestFirst), scheme);
  return it == std::end(kBestFirst) ? -1 : static_cast<int>(it - std::begin(kBestFirst));
}

}  // namespace

std::string Core::scheme_of(transport::LinkId link) const {
  const auto l = transport_->link(link);
  return l ? l->info().scheme : std::string();
}

Result<transport::LinkId> Core::peer_for(const StreamGrant& grant) {
  std::vector<std::string> usable;
  const bool same_host = grant.host == local_host_id();
  for (const std::string& a : grant.addresses) {
    const std::string scheme = scheme_part(a);
    if (preference(scheme) < 0 || (scheme == "shm" && !same_host)) continue;
    usable.push_back(a);
  }
  std::stable_sort(usable.begin(), usable.end(), [](const auto& a, const auto& b) {
    return preference(scheme_part(a)) < preference(scheme_part(b));
  });
  if (usable.empty()) {
    return Error{ErrorCode::kUnsupported,
                 "grant: none of its addresses can be used from this host"};
  }
  if (!options_.allow_fallback) usable.resize(1);
  for (const auto& [link, peer] : peers_) {
    if (std::find(usable.begin(), usable.end(), peer.address) != usable.end()) return link;
  }
  return connect(std::move(usable));
}

Result<transport::LinkId> Core::connect(std::vector<std::string> addresses) {
  std::string failures;
  while (!addresses.empty()) {
    const std::string address = addresses.front();
    addresses.erase(addresses.begin());
    auto link = transport_->connect(address);
    if (link) {
      const transport::LinkId id = (*link)->id();
      peers_.emplace(id, Peer{std::move(link).value(),
                              address,
                              scheme_part(address),
                              std::move(addresses),
                              false,
                              {}});
      return id;
    }
    failures += text(failures.empty() ? "" : "; ", address, ": ", link.error().message);
    if (addresses.empty()) return Error{link.error().code, failures};
    ++stats_.fallbacks;
  }
  return Error{ErrorCode::kInternal, "no address to connect to"};
}

void Core::attach(std::uint64_t id, Outgoing& out, transport::LinkId link) {
  Peer& peer = peers_.at(link);
  peer.senders.insert(id);
  out.peer = link;
  if (peer.up) out.machine.on_up();
}

void Core::on_up(const transport::Up& up) {
  const auto it = peers_.find(up.link);
  if (it == peers_.end()) return;  // accepted links make themselves known by an open message
  it->second.up = true;
  for (const std::uint64_t id : std::set(it->second.senders)) {
    outgoing_.at(id).machine.on_up();
    settle_sender(id);
  }
}

void Core::on_down(const transport::Down& down, std::int64_t now_ns) {
  Error error =
      down.status ? Error{ErrorCode::kPeerDead, "the peer closed the link"} : down.status.error();
  std::vector<RequestId> receiving;
  for (const auto& [id, in] : incoming_) receiving.push_back(id);
  for (const RequestId& id : receiving) {
    incoming_.at(id).machine.on_down(down.link, error, now_ns);
    settle_receiver(id);
  }
  auto peer = peers_.extract(down.link);
  if (!peer) return;
  const auto senders = std::exchange(peer.mapped().senders, {});
  error.message = text(peer.mapped().address, ": ", error.message);
  if (!peer.mapped().up && !peer.mapped().left.empty()) {
    ++stats_.fallbacks;
    auto next = connect(std::move(peer.mapped().left));
    if (next) {
      for (const std::uint64_t id : senders) attach(id, outgoing_.at(id), *next);
      return;
    }
    error.message += "; " + next.error().message;
  }
  for (const std::uint64_t id : senders) {
    outgoing_.at(id).peer.reset();
    outgoing_.at(id).machine.on_down(error);
    settle_sender(id);
  }
}

}  // namespace kvcore::stream
