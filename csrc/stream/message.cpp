#include "stream/message.h"

#include <cstring>

#include "base/printable.h"
#include "base/text.h"
#include "stream/bytes.h"

namespace kvcore::stream {
namespace {

constexpr std::uint32_t kMagic = 0x4d53564bu;  // "KVSM"
constexpr std::uint8_t kVersion = 2;

Error corrupt(const std::string& why) {
  return {ErrorCode::kCorrupt, text("stream message: ", why)};
}

}  // namespace

std::vector<std::byte> StreamMessage::encode() const {
  ByteWriter w;
  w.put(kMagic);
  w.put(kVersion);
  w.put(static_cast<std::uint8_t>(kind));
  w.put_raw(request_id.bytes);
  w.put(grant.id);
  w.put(grant.generation);
  switch (kind) {
    case MessageKind::kOpen:
      w.put_raw(host);
      w.put(static_cast<std::uint8_t>(makes_sums));
      break;
    case MessageKind::kMark:
      w.put(at_ns);
      w.put(acked_bytes);
      break;
    case MessageKind::kCommit:
      w.put(at_ns);
      w.put_bytes(payload);
      break;
    case MessageKind::kSenderAbort:
    case MessageKind::kReceiverAbort:
      w.put(static_cast<std::uint8_t>(code));
      w.put_string(std::string_view(reason).substr(0, kMaxReasonBytes));
      break;
    case MessageKind::kSums:
      w.put(tag_of(run));
      for (const std::uint64_t sum : sums) w.put(sum);
      break;
    case MessageKind::kDone:
      break;
  }
  return w.take();
}

Result<StreamMessage> StreamMessage::decode(std::span<const std::byte> bytes) {
  ByteReader r(bytes);
  StreamMessage m;
  if (r.get<std::uint32_t>() != kMagic) return corrupt("wrong magic");
  if (r.get<std::uint8_t>() != kVersion) return corrupt("unknown version");
  const auto kind = r.get<std::uint8_t>();
  const auto copy16 = [&](std::array<std::byte, 16>& to) {
    const auto part = r.get_raw(16);
    if (part.size() == 16) std::memcpy(to.data(), part.data(), 16);
  };
  copy16(m.request_id.bytes);
  m.grant.id = r.get<std::uint64_t>();
  m.grant.generation = r.get<std::uint64_t>();
  m.kind = static_cast<MessageKind>(kind);
  switch (m.kind) {
    case MessageKind::kOpen:
      copy16(m.host);
      m.makes_sums = r.get<std::uint8_t>() != 0;
      break;
    case MessageKind::kMark:
      m.at_ns = r.get<std::int64_t>();
      m.acked_bytes = r.get<std::int64_t>();
      break;
    case MessageKind::kCommit:
      m.at_ns = r.get<std::int64_t>();
      m.payload = r.get_bytes(kMaxPayloadBytes);
      break;
    case MessageKind::kSenderAbort:
    case MessageKind::kReceiverAbort: {
      const auto code = r.get<std::uint8_t>();
      if (code > static_cast<std::uint8_t>(kLastErrorCode)) return corrupt("unknown code");
      m.code = static_cast<ErrorCode>(code);
      m.reason = printable(r.get_string(kMaxReasonBytes));
      break;
    }
    case MessageKind::kSums:
      m.run = run_of(r.get<std::uint64_t>());
      if (m.run.count < 1 || m.run.count > kMaxSumsPerMessage) return corrupt("sums out of range");
      for (std::int32_t i = 0; i < m.run.count && r.ok(); ++i)
        m.sums.push_back(r.get<std::uint64_t>());
      break;
    case MessageKind::kDone:
      break;
    default:
      return corrupt(text("unknown kind ", int{kind}));
  }
  if (!r.ok()) return corrupt("cut short");
  if (!r.at_end()) return corrupt("too long");
  return m;
}

}  // namespace kvcore::stream
