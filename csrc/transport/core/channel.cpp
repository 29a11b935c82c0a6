#include "transport/core/channel.h"

#include <cerrno>
#include <cstring>

#include "base/text.h"

namespace kvcore::transport {

Status end_of_pending(const Status& why) {
  if (why.ok()) return Error{ErrorCode::kPeerDead, "the peer closed the link"};
  switch (why.error().code) {
    case ErrorCode::kCancelled:
    case ErrorCode::kPeerDead:
    case ErrorCode::kPeerHung:
      return why;
    default:
      return Error{ErrorCode::kTransport, why.error().message};
  }
}

Error connection_ended(bool up, int error) {
  const std::string how = error == 0 ? "closed" : std::strerror(error);
  if (up) return {ErrorCode::kPeerDead, text("the peer's connection is gone: ", how)};
  if (error == ECONNRESET || error == EPIPE)
    return {ErrorCode::kPeerDead,
            text("the peer ended the connection before it read our hello: ", how)};
  return {ErrorCode::kTransport, text("the connection ended during the handshake (", how,
                                      "): another key, version or protocol?")};
}

}  // namespace kvcore::transport
