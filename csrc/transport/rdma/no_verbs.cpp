// In place of system_verbs.cpp where the build found no headers of libibverbs.
#include "transport/rdma/verbs.h"

namespace kvcore::transport::rdma {

Result<Verbs*> system_verbs() {
  return Error{ErrorCode::kUnsupported,
               "this build has no RDMA: the headers of libibverbs (Debian: libibverbs-dev) were "
               "not there when it was compiled"};
}

}  // namespace kvcore::transport::rdma
