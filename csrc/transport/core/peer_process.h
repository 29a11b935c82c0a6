// The process at the other end of a unix socket, by pidfd: its death is seen whoever else holds
// the socket, and its number, once taken again, cannot be mistaken for it. Thread rules: immutable.
#pragma once

#include <sys/types.h>

#include <memory>

#include "base/result.h"
#include "transport/core/unique_fd.h"

namespace kvcore::transport {

class PeerProcess {
 public:
  // Of a connected unix socket whose other end has pid `pid`. Make it before the handshake: the
  // peer's proof then shows that it lived when its descriptor was opened, so that a number that was
  // free meanwhile is found out. PeerDead: no such process any more. Unsupported: this process
  // cannot watch that one (it lives in another pid namespace).
  static Result<std::shared_ptr<const PeerProcess>> of(int socket, pid_t pid);
  // An empty descriptor: this very process.
  explicit PeerProcess(UniqueFd fd) : fd_(std::move(fd)) {}

  int fd() const noexcept { return fd_.get(); }  // readable once the process has ended
  bool ended() const noexcept;

 private:
  UniqueFd fd_;
};

}  // namespace kvcore::transport
