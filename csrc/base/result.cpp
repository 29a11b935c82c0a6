#include "base/result.h"

namespace kvcore {

std::string_view to_string(ErrorCode code) noexcept {
  switch (code) {
    case ErrorCode::kInvalidArgument: return "InvalidArgument";
    case ErrorCode::kOutOfPages: return "OutOfPages";
    case ErrorCode::kNotFound: return "NotFound";
    case ErrorCode::kStale: return "Stale";
    case ErrorCode::kTimeout: return "Timeout";
    case ErrorCode::kCancelled: return "Cancelled";
    case ErrorCode::kPeerDead: return "PeerDead";
    case ErrorCode::kTransport: return "TransportError";
    case ErrorCode::kCorrupt: return "Corrupt";
    case ErrorCode::kUnauthenticated: return "Unauthenticated";
    case ErrorCode::kUnsupported: return "Unsupported";
    case ErrorCode::kIo: return "IoError";
    case ErrorCode::kInternal: return "InternalError";
    case ErrorCode::kPeerHung: return "PeerHung";
  }
  return "InternalError";
}

}  // namespace kvcore
