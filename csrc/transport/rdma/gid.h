// Names on a fabric: a port's global identifier (an IPv6 address, or an IPv4 one mapped into it)
// and the number of a queue pair. Thread rules: plain values.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/result.h"

namespace kvcore::transport::rdma {

enum class QueuePairNumber : std::uint32_t {};  // 24 bits

struct Gid {
  std::array<std::uint8_t, 16> bytes{};
  friend bool operator==(const Gid&, const Gid&) = default;

  bool null() const noexcept { return *this == Gid{}; }
  bool ipv4() const noexcept {  // ::ffff:a.b.c.d
    for (int i = 0; i < 10; ++i)
      if (bytes[static_cast<std::size_t>(i)] != 0) return false;
    return bytes[10] == 0xff && bytes[11] == 0xff;
  }
  bool link_local() const noexcept {
    if (ipv4()) return bytes[12] == 169 && bytes[13] == 254;
    return bytes[0] == 0xfe && (bytes[1] & 0xc0) == 0x80;
  }
  bool loopback() const noexcept { return ipv4() && bytes[12] == 127; }
  bool multicast() const noexcept { return ipv4() ? bytes[12] >= 224 : bytes[0] == 0xff; }
  // May lead to another host: not null, loopback, link-local or multicast.
  bool routable() const noexcept {
    return !null() && !loopback() && !link_local() && !multicast() && !(ipv4() && bytes[12] == 0);
  }
};

// Equal leading bits of two of the same family (of the IPv4 part when both are mapped); -1 across
// families.
int common_prefix(const Gid& a, const Gid& b) noexcept;

// "fe80:0000:0000:0000:0000:0000:0000:0001", as sysfs writes it.
Result<Gid> parse_gid(std::string_view text);
// "10.77.0.1" or "fd77::1": of an address as people and sockets write it.
Result<Gid> gid_of_address(std::string_view address);
std::string to_string(const Gid& gid);

}  // namespace kvcore::transport::rdma
