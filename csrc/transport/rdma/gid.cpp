#include "transport/rdma/gid.h"

#include <arpa/inet.h>
#include <netinet/in.h>

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/text.h"

namespace kvcore::transport::rdma {

int common_prefix(const Gid& a, const Gid& b) noexcept {
  if (a.ipv4() != b.ipv4()) return -1;
  const std::size_t first = a.ipv4() ? 12 : 0;
  for (std::size_t i = first; i < 16; ++i) {
    const auto differ = static_cast<std::uint8_t>(a.bytes[i] ^ b.bytes[i]);
    if (differ != 0) return static_cast<int>((i - first) * 8) + std::countl_zero(differ);
  }
  return static_cast<int>((16 - first) * 8);
}

Result<Gid> parse_gid(std::string_view written) {
  while (!written.empty() && (written.back() == '\n' || written.back() == ' '))
    written.remove_suffix(1);
  Gid gid;
  const std::string name(written);
  if (::inet_pton(AF_INET6, name.c_str(), gid.bytes.data()) != 1)
    return invalid_argument(text("gid '", name, "' is no IPv6 address"));
  return gid;
}

Result<Gid> gid_of_address(std::string_view address) {
  const std::string name(address.substr(0, address.find('%')));
  Gid gid;
  if (::inet_pton(AF_INET6, name.c_str(), gid.bytes.data()) == 1) return gid;
  if (::inet_pton(AF_INET, name.c_str(), gid.bytes.data() + 12) != 1)
    return invalid_argument(text("address '", name, "' is neither IPv4 nor IPv6"));
  gid.bytes[10] = gid.bytes[11] = 0xff;
  return gid;
}

std::string to_string(const Gid& gid) {
  char out[INET6_ADDRSTRLEN] = {};
  if (gid.ipv4())
    ::inet_ntop(AF_INET, gid.bytes.data() + 12, out, sizeof out);
  else
    ::inet_ntop(AF_INET6, gid.bytes.data(), out, sizeof out);
  return out;
}

}  // namespace kvcore::transport::rdma
