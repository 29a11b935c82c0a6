#include "wire/session.h"

#include <algorithm>
#include <cstring>

#include "base/printable.h"
#include "base/text.h"

namespace kvcore::wire {
namespace {

constexpr char kMagic[4] = {'K', 'V', 'C', 'W'};
constexpr std::size_t kMaxRoleBytes = 64;

struct Header {
  char magic[4];
  std::uint16_t version;
  std::uint16_t type;
  std::uint32_t flags;
  std::uint32_t body_bytes;
  std::uint64_t session;
  std::uint64_t sequence;
};
static_assert(sizeof(Header) == kFrameHeaderBytes);

Header read_header(Bytes data) {
  Header header;
  std::memcpy(&header, data.data(), sizeof header);
  return header;
}

Error corrupt(std::string message) { return {ErrorCode::kCorrupt, std::move(message)}; }

}  // namespace

Result<Session> Session::make(AuthSession::Side side, Bytes key, std::string_view role,
                              std::size_t max_frame_bytes) {
  if (role.size() > kMaxRoleBytes || !is_utf8(role))
    return invalid_argument(
        text("role has ", role.size(), " bytes, must be UTF-8 of at most ", kMaxRoleBytes));
  if (max_frame_bytes < 64 || max_frame_bytes > UINT32_MAX)
    return invalid_argument(text("max_frame_bytes=", max_frame_bytes, " must be in [64, 2^32)"));
  KVCORE_ASSIGN_OR_RETURN(auto auth,
                          AuthSession::make(side, key, text("kvcore-wire-", kWireVersion),
                                            std::as_bytes(std::span(role.data(), role.size()))));
  return Session(std::move(auth), max_frame_bytes);
}

std::string Session::peer_role() const {
  const auto& hello = auth_.peer_hello();
  return printable({reinterpret_cast<const char*>(hello.data()), hello.size()});
}

Status Session::check_header(Bytes data) const {
  const Header h = read_header(data);
  if (std::memcmp(h.magic, kMagic, 4) != 0) return corrupt("frame without the magic number");
  if (h.version != kWireVersion)
    return corrupt(text("frame version ", h.version, ", this side speaks ", kWireVersion));
  if (h.flags != 0) return corrupt(text("frame flags ", h.flags, " are unknown"));
  if (h.body_bytes > max_frame_bytes_)
    return corrupt(text("frame body of ", h.body_bytes, " bytes exceeds ", max_frame_bytes_));
  if (h.session != auth_.session_id()) return corrupt("frame of another session");
  if (h.sequence != auth_.receive_sequence())
    return corrupt(text("frame sequence ", h.sequence, ", expected ", auth_.receive_sequence()));
  return {};
}

Status Session::take_frame(Bytes frame, std::vector<Message>* messages) {
  const Bytes signed_part = frame.first(frame.size() - kFrameMacBytes);
  KVCORE_RETURN_IF_ERROR(auth_.open({signed_part}, frame.last(kFrameMacBytes)));
  KVCORE_ASSIGN_OR_RETURN(auto message, decode_body(signed_part.subspan(kFrameHeaderBytes)));
  if (message.spec->type != read_header(frame).type)
    return corrupt("frame type differs from its body's");
  messages->push_back(std::move(message));
  return {};
}

Status Session::feed(Bytes in, std::vector<std::byte>* out, std::vector<Message>* messages) {
  if (dead_) return Error{ErrorCode::kTransport, "the session ended with an error before"};
  dead_ = true;  // until this call succeeds
  if (!auth_.established()) {
    KVCORE_ASSIGN_OR_RETURN(const std::size_t used, auth_.feed(in, out));
    in = in.subspan(used);
  }
  // Whole frames are decoded where they lie; only a cut one is stored.
  while (!in.empty()) {
    std::size_t want = kFrameHeaderBytes;
    if (buffer_.size() >= kFrameHeaderBytes ||
        (buffer_.empty() && in.size() >= kFrameHeaderBytes)) {
      const Bytes header = buffer_.empty() ? in : Bytes(buffer_);
      KVCORE_RETURN_IF_ERROR(check_header(header));
      want += read_header(header).body_bytes + kFrameMacBytes;
    }
    if (buffer_.empty() && want > kFrameHeaderBytes && in.size() >= want) {
      KVCORE_RETURN_IF_ERROR(take_frame(in.first(want), messages));
      in = in.subspan(want);
      continue;
    }
    const std::size_t n = std::min(want - buffer_.size(), in.size());
    buffer_.insert(buffer_.end(), in.begin(), in.begin() + static_cast<std::ptrdiff_t>(n));
    in = in.subspan(n);
    if (want > kFrameHeaderBytes && buffer_.size() == want) {
      KVCORE_RETURN_IF_ERROR(take_frame(buffer_, messages));
      buffer_.clear();
    } else if (buffer_.size() == kFrameHeaderBytes) {
      KVCORE_RETURN_IF_ERROR(check_header(buffer_));
    }
  }
  dead_ = false;
  return {};
}

Result<std::vector<std::byte>> Session::encode(const Message& message) {
  if (!established())
    return Error{ErrorCode::kTransport, "the handshake is not complete: nothing can be sent yet"};
  KVCORE_ASSIGN_OR_RETURN(const auto body, encode_body(message));
  if (body.size() > max_frame_bytes_)
    return invalid_argument(text("message '", message.spec->name, "' has ", body.size(),
                                 " bytes, max_frame_bytes=", max_frame_bytes_));
  const Header header{{'K', 'V', 'C', 'W'},
                      kWireVersion,
                      message.spec->type,
                      0,
                      static_cast<std::uint32_t>(body.size()),
                      auth_.session_id(),
                      auth_.send_sequence()};
  std::vector<std::byte> frame(sizeof header);
  std::memcpy(frame.data(), &header, sizeof header);
  frame.insert(frame.end(), body.begin(), body.end());
  const Mac mac = auth_.seal({Bytes(frame)});
  frame.insert(frame.end(), mac.begin(), mac.end());
  return frame;
}

}  // namespace kvcore::wire
