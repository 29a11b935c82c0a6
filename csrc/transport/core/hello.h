// What both sides of a link tell each other inside the handshake, under its proof (version 2).
//
//   hello = keepalive_ns i64 | model digest 32 | layout digest 32 | role bytes u16 |
//           identity bytes u16 | role | identity
//
// Thread rules: plain values.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/auth_session.h"
#include "base/result.h"
#include "transport/link.h"

namespace kvcore::transport {

struct PeerHello {
  std::int64_t keepalive_ns = 0;
  Digest model{}, layout{};
  std::string role, identity;
};

// InvalidArgument: what the options of a transport may not be.
Status check_options(const TransportOptions& options);

std::vector<std::byte> make_link_hello(const TransportOptions& options);
// Corrupt: not exactly a hello.
Result<PeerHello> parse_link_hello(Bytes hello);
// May a link live between these two? Unsupported: they serve different models.
Status check_models(const Digest& own, const Digest& peers);

}  // namespace kvcore::transport
