// The schemes "tcp" and "shm": sockets and the connections on them. Thread rules: scheme.h.
#pragma once

#include "transport/core/scheme.h"

namespace kvcore::transport {

// keyed: a pre-shared key is set, so that addresses beyond loopback may be used.
std::unique_ptr<Scheme> make_tcp_scheme(bool keyed);
std::unique_ptr<Scheme> make_shm_scheme();

}  // namespace kvcore::transport
