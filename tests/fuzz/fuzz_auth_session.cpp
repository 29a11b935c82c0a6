// Both sides of the handshake (base/auth_session.h), alone and against each other.
// Input: side u8, then (flags u8, length u16, bytes)*. flags bit 0: the bytes are what an honest
// other side says next, changed by xor with the input.
#include "base/auth_session.h"
#include "fuzz.h"

namespace kvcore::fuzz {
namespace {

constexpr std::string_view kLabel = "kvcore-fuzz-1";

AuthSession make(AuthSession::Side side) {
  const std::vector<std::byte> key(AuthSession::kKeyBytes, std::byte{5});
  const std::vector<std::byte> hello(40, std::byte{1});
  auto made = AuthSession::make(side, key, kLabel, hello);
  require(made.ok(), "a session is made");
  return std::move(*made);
}

struct Pair {
  explicit Pair(AuthSession::Side tested)
      : victim(make(tested)),
        honest(make(tested == AuthSession::Side::kInitiator ? AuthSession::Side::kResponder
                                                            : AuthSession::Side::kInitiator)) {
    said = honest.start();
    heard = victim.start();
  }
  // What the honest side says to all it has heard so far.
  std::vector<std::byte> next() {
    if (honest_alive && !heard.empty())
      honest_alive = honest.feed(std::exchange(heard, {}), &said).ok();
    return std::exchange(said, {});
  }
  AuthSession victim, honest;
  std::vector<std::byte> said, heard;
  bool honest_alive = true;
};

}  // namespace

void run(Input input) {
  Choices in(input);
  Pair pair((in.number() & 1) != 0 ? AuthSession::Side::kInitiator : AuthSession::Side::kResponder);
  bool changed = false;
  while (!in.empty() && !pair.victim.established()) {
    const bool honest = (in.number() & 1) != 0;
    const Input bytes = in.bytes(in.number<std::uint16_t>());
    std::vector<std::byte> to_victim(bytes.begin(), bytes.end());
    if (honest) {
      to_victim = pair.next();
      for (std::size_t i = 0; i < std::min(bytes.size(), to_victim.size()); ++i) {
        to_victim[i] ^= bytes[i];
        changed |= bytes[i] != std::byte{0};
      }
    } else {
      changed |= !to_victim.empty();
    }
    std::vector<std::byte> out;
    const auto used = pair.victim.feed(to_victim, &out);
    pair.heard.insert(pair.heard.end(), out.begin(), out.end());
    require(out.size() <= 2 * (AuthSession::kMaxHelloBytes + 512), "an answer is small");
    if (!used.ok()) {
      require(!pair.victim.established(), "an error establishes nothing");
      const auto again = pair.victim.feed(to_victim, &out);
      require(to_victim.empty() || !again.ok(), "a dead session stays dead");
      return;
    }
    require(*used <= to_victim.size(), "no byte is used that was not there");
  }
  if (!pair.victim.established()) return;
  require(!changed, "only the unchanged words of a holder of the key establish");
  require(pair.victim.peer_hello() == std::vector<std::byte>(40, std::byte{1}),
          "the peer's hello is what it said");
  const Input frame = in.rest();
  Mac mac{};
  std::memcpy(mac.data(), frame.data(), std::min(mac.size(), frame.size()));
  require(!pair.victim.open({frame}, mac).ok(), "a MAC cannot be guessed");
}

std::vector<Seed> seeds() {
  const auto turn = [](Builder& b, std::uint8_t honest, Input bytes) -> Builder& {
    return b.number(honest).number(static_cast<std::uint16_t>(bytes.size())).raw(bytes);
  };
  std::vector<Seed> out;
  for (const std::uint8_t side : {std::uint8_t{0}, std::uint8_t{1}}) {
    Builder honest, changed, forged;
    turn(turn(honest.number(side), 1, {}), 1, {});
    std::vector<std::byte> mask(60);
    mask[50] = std::byte{1};
    turn(turn(changed.number(side), 1, mask), 1, {});
    std::vector<std::byte> hello(8 + 32 + 1);
    std::memcpy(hello.data(), "KVCA\x01\x01\x21\x00", 8);
    turn(turn(forged.number(side), 0, hello), 1, {});
    for (Builder* b : {&honest, &changed, &forged}) out.push_back(b->take());
  }
  return out;
}

}  // namespace kvcore::fuzz
