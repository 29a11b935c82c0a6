#include "transport/rdma/host_system.h"

namespace kvcore::transport::rdma {
namespace {

Status available() {
  KVCORE_ASSIGN_OR_RETURN(Verbs * verbs, system_verbs());
  (void)verbs;
  if (any_active_port()) return {};
  return Error{ErrorCode::kNotFound, "rdma: this machine has no active RDMA port"};
}

}  // namespace

HostSystem this_machine() {
  static SystemRandom random;
  return {available, system_verbs, [] { return list_ports(); },
          [](const Port& port) -> std::unique_ptr<NicCounters> {
            return std::make_unique<SysfsNicCounters>(port.device, port.number);
          },
          &random};
}

}  // namespace kvcore::transport::rdma
