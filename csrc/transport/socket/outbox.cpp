#include "transport/socket/outbox.h"

#include <sys/socket.h>

#include <cerrno>
#include <cstring>

#include "base/text.h"

namespace kvcore::transport {
namespace {
constexpr std::size_t kMaxIov = 1024;  // IOV_MAX
}

void Outbox::push_raw(std::vector<std::byte> bytes) {
  if (bytes.empty()) return;
  Sealed sealed;
  sealed.size = bytes.size();
  sealed.head = std::move(bytes);
  bytes_ += sealed.size;
  frames_.push_back(std::move(sealed));
}

void Outbox::push(AuthSession* auth, OutFrame frame) {
  std::size_t payload = 0;
  for (const iovec& v : frame.payload) payload += v.iov_len;
  FramePrefix prefix;
  prefix.type = static_cast<std::uint8_t>(frame.type);
  prefix.priority = static_cast<std::uint8_t>(frame.priority);
  prefix.flags = frame.flags;
  prefix.body_bytes = static_cast<std::uint32_t>(frame.body.size());
  prefix.payload_bytes = static_cast<std::uint32_t>(payload);

  Sealed sealed;
  sealed.head.resize(sizeof prefix + frame.body.size() + kMacBytes);
  std::memcpy(sealed.head.data(), &prefix, sizeof prefix);
  if (!frame.body.empty())
    std::memcpy(sealed.head.data() + sizeof prefix, frame.body.data(), frame.body.size());
  const Mac mac = auth->seal({Bytes(sealed.head).first(sizeof prefix + frame.body.size())});
  std::memcpy(sealed.head.data() + sizeof prefix + frame.body.size(), mac.data(), mac.size());
  sealed.payload = std::move(frame.payload);
  sealed.owned = std::move(frame.owned);
  sealed.size = sealed.head.size() + payload;
  sealed.op = frame.op;
  sealed.fd = std::move(frame.fd);
  bytes_ += sealed.size;
  frames_.push_back(std::move(sealed));
}

void Outbox::detach(std::uint64_t op) {
  for (Sealed& frame : frames_) {
    if (frame.op != op || frame.payload.empty() || !frame.owned.empty()) continue;
    frame.owned.reserve(frame.size - frame.head.size());
    for (const iovec& v : frame.payload) {
      const auto* p = static_cast<const std::byte*>(v.iov_base);
      frame.owned.insert(frame.owned.end(), p, p + v.iov_len);
    }
    frame.payload.assign(1, iovec{frame.owned.data(), frame.owned.size()});
  }
}

// As many frames as fit into one call. A descriptor rides on the first byte of its frame, so such a
// frame starts a call.
std::size_t Outbox::gather(std::vector<iovec>* iov, int* fd) const {
  std::size_t skip = front_sent_;
  std::size_t bytes = 0;
  for (std::size_t i = 0; i < frames_.size() && iov->size() < kMaxIov; ++i) {
    const Sealed& frame = frames_[i];
    if (frame.fd && skip == 0) {
      if (i > 0) break;
      *fd = frame.fd.get();
    }
    const auto add = [&](const void* p, std::size_t n) {
      if (skip >= n) {
        skip -= n;
      } else if (iov->size() < kMaxIov) {
        iov->push_back({const_cast<std::byte*>(static_cast<const std::byte*>(p)) + skip, n - skip});
        bytes += n - skip;
        skip = 0;
      }
    };
    add(frame.head.data(), frame.head.size());
    for (const iovec& v : frame.payload) add(v.iov_base, v.iov_len);
  }
  return bytes;
}

void Outbox::advance(std::size_t sent) {
  bytes_ -= sent;
  front_sent_ += sent;
  while (!frames_.empty() && front_sent_ >= frames_.front().size) {
    front_sent_ -= frames_.front().size;
    frames_.pop_front();
  }
}

Result<std::size_t> Outbox::flush(int socket, std::size_t max_bytes) {
  std::size_t total = 0;
  blocked_ = false;
  std::vector<iovec> iov;
  while (!frames_.empty() && total < max_bytes) {
    iov.clear();
    int fd = -1;
    const std::size_t wanted = gather(&iov, &fd);
    msghdr message{};
    message.msg_iov = iov.data();
    message.msg_iovlen = iov.size();
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    if (fd >= 0) {
      message.msg_control = control;
      message.msg_controllen = sizeof control;
      cmsghdr* header = CMSG_FIRSTHDR(&message);
      header->cmsg_level = SOL_SOCKET;
      header->cmsg_type = SCM_RIGHTS;
      header->cmsg_len = CMSG_LEN(sizeof(int));
      std::memcpy(CMSG_DATA(header), &fd, sizeof fd);
    }
    const ssize_t n = ::sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
      blocked_ = true;
      break;
    }
    if (n < 0) return Error{ErrorCode::kPeerDead, text("sending failed: ", std::strerror(errno))};
    advance(static_cast<std::size_t>(n));
    total += static_cast<std::size_t>(n);
    if (static_cast<std::size_t>(n) < wanted) {  // it is full: asking again says no more than that
      blocked_ = true;
      break;
    }
  }
  return total;
}

}  // namespace kvcore::transport
