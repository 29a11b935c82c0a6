#include "transport/core/hello.h"

#include <cstring>

#include "base/printable.h"
#include "base/text.h"

namespace kvcore::transport {
namespace {

constexpr std::uint64_t kMinCredits = 64 * 1024;
constexpr std::uint32_t kLink = 1, kJoin = 2;

struct HelloHead {
  std::uint32_t kind, lanes;
  std::int64_t keepalive_ns;
  std::uint64_t window;
  Digest model, layout;
  std::uint16_t role_bytes, identity_bytes;
  std::uint32_t zero;
};
static_assert(sizeof(HelloHead) == 96);

std::string short_hex(const Digest& digest) {
  constexpr char kHex[] = "0123456789abcdef";
  std::string out;
  for (std::size_t i = 0; i < 4; ++i) {
    const auto b = std::to_integer<unsigned>(digest[i]);
    out += kHex[b >> 4];
    out += kHex[b & 15];
  }
  return out;
}

}  // namespace

Status check_options(const TransportOptions& o) {
  if (!o.key.empty() && o.key.size() != AuthSession::kKeyBytes)
    return invalid_argument(text("key has ", o.key.size(), " bytes, must have 0 or 32"));
  if (o.identity.size() > kMaxIdentityBytes)
    return invalid_argument(
        text("identity has ", o.identity.size(), " bytes, at most ", kMaxIdentityBytes));
  if (o.role.size() > kMaxRoleBytes)
    return invalid_argument(text("role has ", o.role.size(), " bytes, at most ", kMaxRoleBytes));
  if (o.handshake_ns <= 0 || o.keepalive_ns < 0)
    return invalid_argument(text("handshake_ns=", o.handshake_ns, " must be above 0, keepalive_ns=",
                                 o.keepalive_ns, " must be 0 or more"));
  if (o.credits.per_link_bytes < kMinCredits || o.credits.total_bytes < kMinCredits)
    return invalid_argument(text("credits per_link_bytes=", o.credits.per_link_bytes,
                                 " and total_bytes=", o.credits.total_bytes, " must be at least ",
                                 kMinCredits));
  return {};
}

std::vector<std::byte> make_link_hello(const TransportOptions& options, std::uint32_t lanes,
                                       std::uint64_t window) {
  const HelloHead head{kLink,
                       lanes,
                       options.keepalive_ns,
                       window,
                       options.model_digest,
                       options.layout_digest,
                       static_cast<std::uint16_t>(options.role.size()),
                       static_cast<std::uint16_t>(options.identity.size()),
                       0};
  std::vector<std::byte> out(sizeof head);
  std::memcpy(out.data(), &head, sizeof head);
  for (const std::string* s : {&options.role, &options.identity}) {
    const auto bytes = std::as_bytes(std::span(*s));
    out.insert(out.end(), bytes.begin(), bytes.end());
  }
  return out;
}

Result<AuthSession> make_link_auth(const TransportOptions& options, bool initiator,
                                   std::string_view label, Bytes hello) {
  return AuthSession::make(
      initiator ? AuthSession::Side::kInitiator : AuthSession::Side::kResponder,
      std::as_bytes(std::span(options.key)), label, hello);
}

Result<PeerHello> parse_link_hello(Bytes hello) {
  HelloHead head{};
  if (hello.size() < sizeof head)
    return Error{ErrorCode::kCorrupt, "the peer's hello is too short"};
  std::memcpy(&head, hello.data(), sizeof head);
  const Bytes names = hello.subspan(sizeof head);
  if (head.role_bytes > kMaxRoleBytes || head.identity_bytes > kMaxIdentityBytes ||
      head.kind != kLink || head.lanes < 1 || head.lanes > kNumPriorities || head.zero != 0 ||
      head.keepalive_ns < 0 || names.size() != std::size_t{head.role_bytes} + head.identity_bytes)
    return Error{ErrorCode::kCorrupt,
                 text("the peer's hello does not fit its head: role of ", head.role_bytes,
                      " bytes, identity of ", head.identity_bytes, ", keep-alive ",
                      head.keepalive_ns, " ns, ", names.size(), " bytes of names")};
  const auto* p = reinterpret_cast<const char*>(names.data());
  return PeerHello{head.lanes,
                   head.keepalive_ns,
                   head.window,
                   head.model,
                   head.layout,
                   printable({p, head.role_bytes}),
                   std::string(p + head.role_bytes, head.identity_bytes)};
}

std::vector<std::byte> make_join_hello(const AuthSession& first, std::uint32_t lane) {
  const JoinHello join{kJoin, lane, first.session_id(), first.token(lane)};
  const auto bytes = std::as_bytes(std::span(&join, 1));
  return {bytes.begin(), bytes.end()};
}

std::optional<JoinHello> parse_join_hello(Bytes hello) {
  JoinHello join{};
  if (hello.size() != sizeof join) return std::nullopt;
  std::memcpy(&join, hello.data(), sizeof join);
  if (join.kind != kJoin) return std::nullopt;
  return join;
}

Status check_models(const Digest& own, const Digest& peers) {
  const Digest none{};
  if (own == none || peers == none || own == peers) return {};
  return Error{ErrorCode::kUnsupported,
               text("the peer serves another model: digest ", short_hex(peers), "..., ours is ",
                    short_hex(own), "...")};
}

}  // namespace kvcore::transport
