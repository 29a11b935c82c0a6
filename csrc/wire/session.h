// One authenticated conversation: handshake, then frames. No sockets: bytes in, messages out.
//
//   frame = header 32 | body | MAC 16
//   header = "KVCW" | version u16 | type u16 | flags u32 (0) | body bytes u32 | session u64 |
//   sequence u64
//
// The MAC covers header and body; session and sequence must be the next ones of this direction, so
// a frame that was changed, repeated, reordered or taken from another session ends the
// conversation. A frame longer than max_frame_bytes is refused from its header, before its body is
// stored. Thread rules: one thread at a time. After an error from feed the session is dead: close.
#pragma once

#include "base/auth_session.h"
#include "wire/codec.h"

namespace kvcore::wire {

inline constexpr std::uint16_t kWireVersion = 1;
inline constexpr std::size_t kFrameHeaderBytes = 32;
inline constexpr std::size_t kFrameMacBytes = 16;
inline constexpr std::size_t kDefaultMaxFrameBytes = 16UL * 1024 * 1024;

class Session {
 public:
  // role: told to the peer under the handshake's proof (<= 64 bytes of UTF-8), e.g. "router".
  static Result<Session> make(AuthSession::Side side, Bytes key, std::string_view role,
                              std::size_t max_frame_bytes = kDefaultMaxFrameBytes);
  std::vector<std::byte> start() { return auth_.start(); }
  // Appends handshake bytes to be sent to *out and complete messages to *messages.
  Status feed(Bytes in, std::vector<std::byte>* out, std::vector<Message>* messages);
  // One frame, ready to be sent after everything encoded before it.
  Result<std::vector<std::byte>> encode(const Message& message);

  bool established() const noexcept { return auth_.established(); }
  std::string peer_role() const;
  bool mid_frame() const noexcept { return !buffer_.empty(); }  // EOF now would cut a frame

 private:
  Session(AuthSession auth, std::size_t max_frame_bytes)
      : auth_(std::move(auth)), max_frame_bytes_(max_frame_bytes) {}
  Status check_header(Bytes header) const;
  Status take_frame(Bytes frame, std::vector<Message>* messages);

  AuthSession auth_;
  std::size_t max_frame_bytes_;
  std::vector<std::byte> buffer_;  // an incomplete frame
  bool dead_ = false;
};

}  // namespace kvcore::wire
