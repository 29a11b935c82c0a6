// Both sides of one rdma link: what the channel calls, whatever carries the control messages.
//
// One round: poll the Nics to empty and hand over what came (on_work), then the control messages
// (on_control), then step; then send what next_control gives and take what there is to take.
// Sans-I/O but for the Nic interfaces. Thread rules: one thread.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "transport/rdma/inbound.h"
#include "transport/rdma/outbound.h"

namespace kvcore::transport::rdma {

class Peer {
 public:
  Peer(const std::vector<Nic*>& nics, OutboundOptions out, InboundOptions in)
      : nics_(nics), outbound_(nics, std::move(out)), inbound_(nics, std::move(in)) {}

  Outbound& outbound() { return outbound_; }
  Inbound& inbound() { return inbound_; }

  // Corrupt: the peer broke the protocol; close the link.
  Status on_control(Bytes bytes, std::int64_t now);
  // False: the completion belongs to no queue pair of this link.
  Result<bool> on_work(const Nic* nic, const WorkDone& done, std::int64_t now);
  void on_event(const Nic* nic, NicEvent event, std::int64_t now);
  Status step(std::int64_t now) {
    KVCORE_RETURN_IF_ERROR(inbound_.step(now));
    outbound_.step(now);
    return outbound_.failure();
  }
  std::int64_t next_timer_ns() const {
    return std::min(inbound_.next_timer_ns(), outbound_.next_timer_ns());
  }
  std::optional<std::vector<std::byte>> next_control();
  void close(const Status& why) {
    outbound_.close(why);
    inbound_.close();
  }

 private:
  std::vector<Nic*> nics_;
  Outbound outbound_;
  Inbound inbound_;
};

}  // namespace kvcore::transport::rdma
