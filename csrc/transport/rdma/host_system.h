// What rdma links take from the machine, so that tests can give them another one.
// Thread rules: verbs, ports and counters are called by one thread at a time, available by any.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "base/random.h"
#include "base/result.h"
#include "transport/rdma/device.h"
#include "transport/rdma/nic_counters.h"
#include "transport/rdma/verbs.h"

namespace kvcore::transport::rdma {

struct HostSystem {
  std::function<Status()> available;  // Unsupported, NotFound: why there can be no link
  std::function<Result<Verbs*>()> verbs;
  std::function<std::vector<Port>()> ports;
  std::function<std::unique_ptr<NicCounters>(const Port&)> counters;
  RandomSource* random;  // of the first packet numbers
};

HostSystem this_machine();

}  // namespace kvcore::transport::rdma
