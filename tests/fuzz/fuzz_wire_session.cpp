// A whole control conversation (wire/session.h) after an honest handshake.
// Input: (mode u8, length u16, bytes)*. mode 0: raw bytes; 1: a body, put into a frame with the
// right session, sequence and MAC; 2: the same frame twice; 3: a frame whose header is overwritten
// by the first bytes before it is sealed. The high bit of mode cuts the delivery in two.
#include "fuzz.h"
#include "wire/session.h"

namespace kvcore::fuzz {
namespace {

using namespace wire;

constexpr std::size_t kMaxFrame = 4096;
constexpr std::string_view kLabel = "kvcore-wire-1";

struct Talk {
  Talk()
      : victim(std::move(*Session::make(AuthSession::Side::kResponder, key, "fuzz", kMaxFrame))),
        peer(std::move(*AuthSession::make(AuthSession::Side::kInitiator, key, kLabel, {}))) {
    std::vector<std::byte> reply, proof;
    require(victim.feed(peer.start(), &reply, &messages).ok(), "the hello is taken");
    require(peer.feed(reply, &proof).ok(), "the reply is right");
    require(victim.feed(proof, &reply, &messages).ok() && victim.established(), "it is up");
  }
  std::vector<std::byte> framed(Input body, bool overwrite) {
    std::vector<std::byte> frame(kFrameHeaderBytes);
    const std::uint16_t version = kWireVersion;
    std::uint16_t type = 0;
    std::memcpy(&type, body.data(), std::min<std::size_t>(2, body.size()));
    const auto bytes = static_cast<std::uint32_t>(body.size());
    const std::uint64_t session = peer.session_id(), sequence = peer.send_sequence();
    std::memcpy(frame.data(), "KVCW", 4);
    std::memcpy(frame.data() + 4, &version, 2);
    std::memcpy(frame.data() + 6, &type, 2);
    std::memcpy(frame.data() + 12, &bytes, 4);
    std::memcpy(frame.data() + 16, &session, 8);
    std::memcpy(frame.data() + 24, &sequence, 8);
    if (overwrite)
      std::ranges::copy(body.first(std::min(body.size(), frame.size())), frame.begin());
    frame.insert(frame.end(), body.begin(), body.end());
    const Mac mac = peer.seal({frame});
    frame.insert(frame.end(), mac.begin(), mac.end());
    return frame;
  }
  std::vector<std::byte> key = std::vector<std::byte>(32, std::byte{3});
  std::vector<Message> messages;
  Session victim;
  AuthSession peer;
};

}  // namespace

void run(Input input) {
  Talk talk;
  Choices in(input);
  std::size_t delivered = 0;
  while (!in.empty()) {
    const auto mode = in.number();
    const Input bytes = in.bytes(in.number<std::uint16_t>());
    std::vector<std::byte> frame(bytes.begin(), bytes.end());
    if ((mode & 3) != 0) frame = talk.framed(bytes, (mode & 3) == 3);
    if ((mode & 3) == 2) {
      const auto once = frame;
      frame.insert(frame.end(), once.begin(), once.end());
    }
    const std::size_t cut = (mode & 0x80) != 0 ? frame.size() / 2 : frame.size();
    delivered += frame.size();
    std::vector<std::byte> out;
    Status status = talk.victim.feed(Input(frame).first(cut), &out, &talk.messages);
    if (status.ok()) status = talk.victim.feed(Input(frame).subspan(cut), &out, &talk.messages);
    require(out.empty(), "an established session answers nothing by itself");
    if ((mode & 3) == 2) require(!status.ok(), "a frame that is repeated ends the session");
    if (!status.ok()) {
      require(!talk.victim.feed(frame, &out, &talk.messages).ok(), "a dead session stays dead");
      return;
    }
  }
  require(talk.messages.size() * kFrameHeaderBytes <= delivered, "no message without a frame");
}

std::vector<Seed> seeds() {
  std::vector<Seed> out;
  Builder all;
  for (const MessageSpec& spec : all_messages()) {
    Message message{&spec, {}};
    for (const FieldSpec& field : spec.fields)
      message.values.push_back(field.kind == FieldKind::kId ? Value(std::string(16, 'i'))
                                                            : default_value(field));
    auto body = encode_body(message);
    require(body.ok(), "every message can be encoded");
    const auto put = [&](Builder& b, std::uint8_t mode) {
      b.number(mode).number(static_cast<std::uint16_t>(body->size())).raw(*body);
    };
    put(all, 0x81);
    Builder twice;
    put(twice, 2);
    out.push_back(twice.take());
  }
  out.push_back(all.take());
  return out;
}

}  // namespace kvcore::fuzz
