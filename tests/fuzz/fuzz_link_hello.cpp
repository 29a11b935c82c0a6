// The hello inside a link's handshake (transport/core/hello.h): from a peer that proved the key.
#include "fuzz.h"
#include "transport/core/hello.h"

namespace kvcore::fuzz {

using namespace transport;

void run(Input input) {
  const auto hello = parse_link_hello(input);
  if (!hello.ok()) {
    require(hello.error().code == ErrorCode::kCorrupt, "what is refused is Corrupt");
    return;
  }
  require(hello->lanes >= 1 && hello->lanes <= kNumPriorities, "lanes have a limit");
  require(hello->keepalive_ns >= 0, "a keep-alive is not negative");
  require(hello->role.size() <= kMaxRoleBytes, "a role has a limit");
  require(hello->identity.size() <= kMaxIdentityBytes, "an identity has a limit");
  for (const char c : hello->role)
    require(static_cast<unsigned char>(c) < 0x80, "a peer's words are plain text");
  require(check_models(hello->model, hello->model).ok(), "equal models agree");
}

std::vector<Seed> seeds() {
  TransportOptions options;
  options.identity = "decode-0";
  options.role = "decode";
  options.model_digest[0] = std::byte{1};
  return {make_link_hello(options, 3, 1 << 20), make_link_hello({}, 1, 1 << 20)};
}

}  // namespace kvcore::fuzz
