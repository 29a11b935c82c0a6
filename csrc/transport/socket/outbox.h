// Frames of one connection in the order of the socket, sealed as they are put in.
// Payload stays where it lies until it is sent or detach()ed. Thread rules: the I/O thread.
#pragma once

#include <sys/uio.h>

#include <deque>
#include <optional>

#include "transport/core/unique_fd.h"
#include "transport/socket/frame.h"

namespace kvcore::transport {

struct OutFrame {
  FrameType type;
  Priority priority = Priority::kStream;
  std::uint16_t flags = 0;
  std::vector<std::byte> body{};
  std::vector<iovec> payload{};  // memory of operation `op`, or into `owned`
  std::vector<std::byte> owned{};
  std::uint64_t op = 0;
  UniqueFd fd{};  // sent along by SCM_RIGHTS
};

class Outbox {
 public:
  void push_raw(std::vector<std::byte> bytes);  // handshake
  void push(AuthSession* auth, OutFrame frame);
  // The memory of this operation is not touched any more: what is unsent of it is copied.
  void detach(std::uint64_t op);
  // Sends until the socket is full or nothing is left or `max_bytes` went out. Returns bytes sent;
  // PeerDead when the connection broke.
  Result<std::size_t> flush(int socket, std::size_t max_bytes);
  bool blocked() const noexcept { return blocked_; }  // the socket was full at the last flush
  bool empty() const noexcept { return frames_.empty(); }
  std::size_t bytes() const noexcept { return bytes_; }

 private:
  struct Sealed {
    std::vector<std::byte> head;  // prefix, body, MAC
    std::vector<iovec> payload;
    std::vector<std::byte> owned;
    std::size_t size = 0;  // head and payload
    std::uint64_t op = 0;
    UniqueFd fd;
  };
  std::size_t gather(std::vector<iovec>* iov, int* fd) const;
  void advance(std::size_t sent);

  std::deque<Sealed> frames_;
  std::size_t front_sent_ = 0;
  std::size_t bytes_ = 0;  // unsent
  bool blocked_ = false;
};

}  // namespace kvcore::transport
