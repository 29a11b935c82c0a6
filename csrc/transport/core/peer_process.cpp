#include "transport/core/peer_process.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/text.h"

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77  // Linux 6.5
#endif

namespace kvcore::transport {

Result<std::shared_ptr<const PeerProcess>> PeerProcess::of(int socket, pid_t pid) {
  int fd = -1;
  socklen_t size = sizeof fd;
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERPIDFD, &fd, &size) != 0 || fd < 0)
    fd = static_cast<int>(::syscall(SYS_pidfd_open, pid, 0));
  if (fd < 0 && errno == ESRCH)
    return Error{ErrorCode::kPeerDead, text("the peer's process ", pid, " has ended")};
  if (fd < 0)
    return Error{ErrorCode::kUnsupported,
                 text("the peer's process ", pid, " cannot be watched: ", std::strerror(errno))};
  (void)::fcntl(fd, F_SETFD, FD_CLOEXEC);
  return std::shared_ptr<const PeerProcess>(std::make_shared<PeerProcess>(UniqueFd(fd)));
}

bool PeerProcess::ended() const noexcept {
  pollfd p{fd_.get(), POLLIN, 0};
  return ::poll(&p, 1, 0) == 1 && (p.revents & (POLLIN | POLLHUP)) != 0;
}

}  // namespace kvcore::transport
