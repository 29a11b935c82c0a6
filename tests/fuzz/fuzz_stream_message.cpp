// StreamMessage (stream/message.h): the two-sided messages of a hand-over.
#include "fuzz.h"
#include "stream/message.h"

namespace kvcore::fuzz {

using namespace stream;

void run(Input input) {
  const auto message = StreamMessage::decode(input);
  if (!message.ok()) return;
  require(message->payload.size() <= kMaxPayloadBytes, "a payload has a limit");
  require(message->reason.size() <= kMaxReasonBytes, "a reason has a limit");
  for (const char c : message->reason)
    require(static_cast<unsigned char>(c) < 0x80, "a peer's words are plain text");
  require(!to_string(message->code).empty(), "a code has a name");
  const auto again = StreamMessage::decode(message->encode());
  require(again.ok(), "what is decoded can be encoded");
  require(again->kind == message->kind && again->grant == message->grant &&
              again->at_ns == message->at_ns && again->payload == message->payload &&
              again->reason == message->reason && again->sums == message->sums &&
              again->code == message->code,
          "and means the same");
}

std::vector<Seed> seeds() {
  std::vector<Seed> out;
  for (int kind = 1; kind <= static_cast<int>(MessageKind::kSums); ++kind) {
    StreamMessage m;
    m.kind = static_cast<MessageKind>(kind);
    m.grant = {7, 8};
    m.at_ns = 123456789;
    m.acked_bytes = 4096;
    m.code = ErrorCode::kStale;
    m.reason = "the receiver\xff is gone";
    m.payload = std::vector<std::byte>(50, std::byte{3});
    m.run.count = 2;
    m.sums = {1, ~0ULL};
    out.push_back(m.encode());
  }
  return out;
}

}  // namespace kvcore::fuzz
