// What both sides of a link tell each other inside the handshake, under its proof (version 2).
//
//   hello = 1 u32 | lanes u32 | keepalive_ns i64 | window u64 | model digest 32 | layout digest 32
//   |
//           role bytes u16 | identity bytes u16 | 0 u32 | role | identity
//   join  = 2 u32 | lane u32 | session u64 | token 16: this connection is lane n of that session
//
// Thread rules: plain values.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/auth_session.h"
#include "base/result.h"
#include "transport/link.h"

namespace kvcore::transport {

struct PeerHello {
  std::uint32_t lanes = 1;  // connections the link may have, one per class
  std::int64_t keepalive_ns = 0;
  std::uint64_t window = 0;  // credits to begin with
  Digest model{}, layout{};
  std::string role, identity;
};

// InvalidArgument: what the options of a transport may not be.
Status check_options(const TransportOptions& options);

std::vector<std::byte> make_link_hello(const TransportOptions& options, std::uint32_t lanes,
                                       std::uint64_t window);
// One side of a session under the transport's key.
Result<AuthSession> make_link_auth(const TransportOptions& options, bool initiator,
                                   std::string_view label, Bytes hello);
// Corrupt: not exactly a hello.
Result<PeerHello> parse_link_hello(Bytes hello);
// May a link live between these two? Unsupported: they serve different models.
Status check_models(const Digest& own, const Digest& peers);

struct JoinHello {
  std::uint32_t kind;
  std::uint32_t lane;
  std::uint64_t session;
  Mac token;  // AuthSession::token(lane) of that session
};
static_assert(sizeof(JoinHello) == 32);

std::vector<std::byte> make_join_hello(const AuthSession& first, std::uint32_t lane);
// Empty: not a join.
std::optional<JoinHello> parse_join_hello(Bytes hello);

}  // namespace kvcore::transport
