// StreamGrant: what the receiver of a hand-over tells the sender, carried by the router. It names
// the pages (with generations), where they lie in the receiver's region, the transport's grant, and
// the addresses to connect to. decode() trusts nothing: every count, offset and size is checked.
//
// head_begin/num_heads and layer_begin/num_layers say which part of the model the pages hold; the
// sender must hold the same part in the same layout (extent_pages may differ), or check_layout says
// why it cannot serve the grant.
// Thread rules: plain values. Units: tokens, bytes, nanoseconds.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/result.h"
#include "pages/page_spec.h"
#include "stream/run.h"
#include "transport/link.h"

namespace kvcore::stream {

using HostId = std::array<std::byte, 16>;  // the kernel's boot id: same = one host, one clock
HostId local_host_id();

struct GrantPage {
  std::int32_t page = 0;
  std::uint64_t generation = 0;
  std::int64_t offset_bytes = 0;  // of the page's slice of layer 0, from the region's start
  friend bool operator==(const GrantPage&, const GrantPage&) = default;
};

struct StreamGrant {
  RequestId request_id;
  pages::PageSpecOptions spec;
  std::int32_t head_begin = 0;   // first KV head of the model that the pages hold
  std::int32_t layer_begin = 0;  // first layer of the model that the pages hold
  std::uint32_t class_id = 0;
  std::int64_t first_token = 0;  // of the sequence; a multiple of page_size
  std::int64_t num_tokens = 0;
  std::int64_t ttl_ns = 0;  // from the moment of granting
  HostId host{};
  transport::GrantRef grant;
  std::int64_t layer_stride_bytes = 0;
  std::vector<GrantPage> pages;
  std::vector<std::string> addresses;

  Shape shape() const;
  Placement placement() const;
  Status check() const;
  std::vector<std::byte> encode() const;
  static Result<StreamGrant> decode(std::span<const std::byte> bytes);
};

inline constexpr std::size_t kMaxAddresses = 8;
inline constexpr std::size_t kMaxAddressBytes = 256;

// Ok if slices of `local` can be written into pages of `remote` byte for byte; else Unsupported
// with the first field that differs and both values.
Status check_layout(const pages::PageSpecOptions& local, const pages::PageSpecOptions& remote);

}  // namespace kvcore::stream
