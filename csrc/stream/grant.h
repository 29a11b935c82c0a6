// StreamGrant: what the receiver of a hand-over tells the sender, carried by the router. It names
// the pages (with generations), where they lie in the receiver's region, the shares that senders
// give and the transport's grant for each, and the addresses to connect to. decode() trusts
// nothing: every count, offset and size is checked.
//
// With one share slices come whole, headers included. With several each brings the blocks of its KV
// heads in its layers, nothing else, and the receiver makes the headers. Pages that the receiver
// keeps compressed have the formats named here; the sender encodes them on the way.
// Thread rules: plain values. Units: tokens, bytes, nanoseconds.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/result.h"
#include "pages/page_class.h"
#include "pages/page_spec.h"
#include "stream/plan.h"
#include "stream/run.h"
#include "transport/link.h"

namespace kvcore::stream {

using HostId = std::array<std::byte, 16>;  // the kernel's boot id: same = one host, one clock
HostId local_host_id();

struct GrantPage {
  std::int32_t page = 0;
  std::uint64_t generation = 0;
  std::int64_t offset_bytes = 0;  // of the page's slice of layer 0, from the region's start
  bool sealed = false;            // of the grant's class, else open
  friend bool operator==(const GrantPage&, const GrantPage&) = default;
};

struct GrantShare {
  transport::GrantRef grant;
  Share share;  // the whole of it where it is the only one
  friend bool operator==(const GrantShare&, const GrantShare&) = default;
};

struct StreamGrant {
  RequestId request_id;
  pages::PageSpecOptions spec;
  std::int32_t head_begin = 0;   // first KV head of the model that the pages hold
  std::int32_t layer_begin = 0;  // first layer of the model that the pages hold
  // Of the sealed pages: their number at the receiver, and [num_layers][num_kv_heads]; empty: none.
  std::uint32_t class_number = 0;
  std::vector<pages::HeadFormats> formats;
  std::int64_t first_token = 0;  // of the sequence; a multiple of page_size
  std::int64_t num_tokens = 0;
  std::int64_t ttl_ns = 0;  // from the moment of granting
  HostId host{};
  std::int64_t layer_stride_bytes = 0;  // of open pages
  std::vector<GrantPage> pages;
  std::vector<GrantShare> shares;
  std::vector<std::string> addresses;

  Side side() const { return {spec, layer_begin, head_begin}; }
  bool with_headers() const noexcept { return shares.size() == 1; }
  // The class of sealed pages, or of open ones where there are none. After check().
  pages::PageClass page_class() const;
  Shape shape(std::size_t share) const;
  Placement placement(std::size_t share) const;
  Status check() const;
  std::vector<std::byte> encode() const;
  static Result<StreamGrant> decode(std::span<const std::byte> bytes);
};

inline constexpr std::size_t kMaxAddresses = 8;
inline constexpr std::size_t kMaxAddressBytes = 256;
inline constexpr std::size_t kMaxShares = 256;

}  // namespace kvcore::stream
