#include "transport/core/io_transport.h"
#include "transport/rdma/rdma_scheme.h"
#include "transport/socket/socket_scheme.h"

namespace kvcore::transport {

Result<std::unique_ptr<Transport>> make_transport(TransportOptions options) {
  Schemes schemes;
  schemes.push_back(make_shm_scheme());
  schemes.push_back(make_tcp_scheme(!options.key.empty()));
  schemes.push_back(rdma::make_rdma_scheme(options.rdma, !options.key.empty()));
  return IoTransport::make(std::move(options), std::move(schemes));
}

}  // namespace kvcore::transport
