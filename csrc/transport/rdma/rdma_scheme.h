// The address scheme "rdma:HOST:PORT": the tcp port where the session of an rdma link begins.
// Thread rules: as core/scheme.h says.
#pragma once

#include <memory>

#include "transport/core/scheme.h"
#include "transport/link.h"
#include "transport/rdma/host_system.h"

namespace kvcore::transport::rdma {

// keyed: without a key only loopback addresses are allowed.
std::unique_ptr<Scheme> make_rdma_scheme(const RdmaOptions& options, bool keyed,
                                         HostSystem system = this_machine());

// Ok when this build and machine have what an rdma link needs; else Unsupported or NotFound.
inline Status available() { return this_machine().available(); }

}  // namespace kvcore::transport::rdma
