#include "stream/grant.h"

#include <algorithm>
#include <cctype>
#include <fstream>

#include "base/printable.h"
#include "base/text.h"
#include "stream/bytes.h"

namespace kvcore::stream {
namespace {

constexpr std::uint32_t kMagic = 0x5247564bu;  // "KVGR"
constexpr std::uint16_t kVersion = 2;
constexpr std::int64_t kMaxOffset = std::int64_t{1} << 46;
constexpr std::int64_t kMaxTokens = std::int64_t{1} << 40;

constexpr std::int32_t kMaxHeads = 1 << 12;

constexpr int kLatentBit = 0x80;  // of the layout's byte

Error corrupt(const std::string& why) { return {ErrorCode::kCorrupt, text("grant: ", why)}; }

void put_spec(ByteWriter& w, const pages::PageSpecOptions& s) {
  for (const std::int32_t v :
       {s.num_layers, s.num_kv_heads, s.head_dim_k, s.head_dim_v, s.page_size, s.extent_pages}) {
    w.put(v);
  }
  w.put(static_cast<std::uint8_t>(s.format));
  w.put(static_cast<std::uint8_t>(static_cast<int>(s.layout) | (s.latent ? kLatentBit : 0)));
}

pages::PageSpecOptions get_spec(ByteReader& r) {
  pages::PageSpecOptions s;
  for (std::int32_t* v : {&s.num_layers, &s.num_kv_heads, &s.head_dim_k, &s.head_dim_v,
                          &s.page_size, &s.extent_pages}) {
    *v = r.get<std::int32_t>();
  }
  s.format = static_cast<Format>(r.get<std::uint8_t>());
  const int layout = r.get<std::uint8_t>();
  s.layout = static_cast<LayoutId>(layout & ~kLatentBit);
  s.latent = (layout & kLatentBit) != 0;
  return s;
}

// Everything but the pages themselves; `spec` has been accepted by PageSpec::make.
Status check_range(const StreamGrant& g, const pages::PageSpec& spec) {
  const auto n = static_cast<std::int64_t>(g.pages.size());
  const std::int64_t page = g.spec.page_size;
  if (n < 1 || n > kMaxSlots) return corrupt(text("pages=", n, " must be in [1, ", kMaxSlots, "]"));
  if (g.spec.num_layers > kMaxLayers) {
    return corrupt(text("num_layers=", g.spec.num_layers, " must be <= ", kMaxLayers));
  }
  if (g.num_tokens <= (n - 1) * page || g.num_tokens > n * page) {
    return corrupt(text("num_tokens=", g.num_tokens, " does not fill ", n, " pages of ", page));
  }
  if (g.first_token < 0 || g.first_token > kMaxTokens || g.first_token % page != 0) {
    return corrupt(text("first_token=", g.first_token, " must be a multiple of page_size=", page));
  }
  if (g.layer_stride_bytes < spec.slice_bytes() || g.layer_stride_bytes > kMaxOffset / kMaxLayers) {
    return corrupt(text("layer_stride_bytes=", g.layer_stride_bytes, " is out of range"));
  }
  if (g.head_begin < 0 || g.head_begin > kMaxHeads || g.layer_begin < 0 ||
      g.layer_begin > kMaxLayers) {
    return corrupt(
        text("head_begin=", g.head_begin, ", layer_begin=", g.layer_begin, " are out of range"));
  }
  if (g.ttl_ns <= 0) return corrupt(text("ttl_ns=", g.ttl_ns, " must be > 0"));
  return {};
}

Status check_pages(const StreamGrant& g) {
  for (std::size_t slot = 0; slot < g.pages.size(); ++slot) {
    const GrantPage& p = g.pages[slot];
    if (p.page < 0 || p.offset_bytes < 0 || p.offset_bytes > kMaxOffset ||
        p.offset_bytes % 64 != 0) {
      return corrupt(
          text("page ", p.page, " at offset_bytes=", p.offset_bytes, " is out of range"));
    }
    if (!p.sealed) continue;
    const std::int64_t end = static_cast<std::int64_t>(slot + 1) * g.spec.page_size;
    if (g.formats.empty())
      return corrupt(text("page ", p.page, " is sealed, but formats is empty"));
    if (end > g.num_tokens)
      return corrupt(text("page ", p.page, " is sealed but not full: allowed are full pages"));
  }
  return {};
}

Status check_shares(const StreamGrant& g) {
  if (g.shares.empty() || g.shares.size() > kMaxShares) {
    return corrupt(text("shares=", g.shares.size(), " must be in [1, ", kMaxShares, "]"));
  }
  std::vector<Share> shares;
  for (const GrantShare& s : g.shares) shares.push_back(s.share);
  const Status covered = check_cover(shares, g.side());
  return covered ? covered : corrupt(covered.error().message);
}

// Where a share's bytes lie inside a slice, and how many they are.
struct Piece {
  std::int64_t offset, bytes;
};

Piece piece_of(const pages::PageClass& page_class, std::int32_t layer, const Range32& heads,
               bool whole) {
  const std::int64_t slice = page_class.slice_bytes(layer);
  if (whole) return {0, slice};
  const auto views = page_class.layers(1);
  const HeadBlock* blocks = views[static_cast<std::size_t>(layer)].heads;
  const std::int64_t begin = blocks[heads.begin].k_offset_bytes;
  const bool last = heads.end() == page_class.spec().options().num_kv_heads;
  return {begin, (last ? slice : blocks[heads.end()].k_offset_bytes) - begin};
}

// A share in the receiver's own counting.
Share local_share(const StreamGrant& g, std::size_t i) {
  Share s = g.shares[i].share;
  s.layers.begin -= g.layer_begin;
  s.heads.begin -= g.head_begin;
  return s;
}

std::vector<bool> sealed_slots(const StreamGrant& g) {
  std::vector<bool> out;
  if (g.formats.empty()) return out;
  for (const GrantPage& p : g.pages) out.push_back(p.sealed);
  return out;
}

}  // namespace

Status StreamGrant::check() const {
  const StreamGrant& g = *this;
  const auto spec = pages::PageSpec::make(g.spec);
  if (!spec) return corrupt(spec.error().message);
  if (g.spec.format > Format::kBf16 || g.spec.layout > LayoutId::kPacked) {
    return corrupt(text("format=", static_cast<int>(g.spec.format), ", layout=",
                        static_cast<int>(g.spec.layout), " are unknown to this build"));
  }
  KVCORE_RETURN_IF_ERROR(check_range(g, *spec));
  if (!g.formats.empty()) {
    const auto page_class = pages::PageClass::make(*spec, g.formats);
    if (!page_class) return corrupt(page_class.error().message);
  }
  KVCORE_RETURN_IF_ERROR(check_pages(g));
  KVCORE_RETURN_IF_ERROR(check_shares(g));
  if (g.addresses.empty()) return corrupt("addresses must not be empty");
  return {};
}

HostId local_host_id() {
  static const HostId id = [] {
    HostId out{};
    std::ifstream in("/proc/sys/kernel/random/boot_id");
    std::string s;
    in >> s;
    std::size_t nibble = 0;
    for (const char c : s) {
      if (!std::isxdigit(static_cast<unsigned char>(c)) || nibble >= 32) continue;
      const int v = c <= '9' ? c - '0' : (c | 32) - 'a' + 10;
      out[nibble / 2] = (out[nibble / 2] << 4) | static_cast<std::byte>(v);
      ++nibble;
    }
    return out;
  }();
  return id;
}

pages::PageClass StreamGrant::page_class() const {
  const pages::PageSpec made = pages::PageSpec::make(spec).value();
  if (formats.empty()) return pages::PageClass::open(made);
  return pages::PageClass::make(made, formats).value();
}

Shape StreamGrant::shape(std::size_t share) const {
  const Share mine = local_share(*this, share);
  const pages::PageClass sealed_class = page_class();
  const pages::PageClass open = pages::PageClass::open(sealed_class.spec());
  Shape out{.num_layers = mine.layers.count,
            .num_slots = static_cast<std::int32_t>(pages.size()),
            .page_size = spec.page_size,
            .num_tokens = num_tokens,
            .slice_bytes = piece_of(open, 0, mine.heads, with_headers()).bytes,
            .sealed = sealed_slots(*this)};
  for (std::int32_t layer = mine.layers.begin; !formats.empty() && layer < mine.layers.end();
       ++layer)
    out.sealed_bytes.push_back(piece_of(sealed_class, layer, mine.heads, with_headers()).bytes);
  return out;
}

Placement StreamGrant::placement(std::size_t share) const {
  const Share mine = local_share(*this, share);
  const pages::PageClass sealed_class = page_class();
  const pages::PageClass open = pages::PageClass::open(sealed_class.spec());
  Placement out{
      .offsets = {}, .layer_stride_bytes = layer_stride_bytes, .sealed = sealed_slots(*this)};
  const std::int64_t skip =
      mine.layers.begin * layer_stride_bytes + piece_of(open, 0, mine.heads, with_headers()).offset;
  for (const GrantPage& p : pages) out.offsets.push_back(p.offset_bytes + (p.sealed ? 0 : skip));
  if (formats.empty()) return out;
  const auto views = sealed_class.layers(1);
  for (std::int32_t layer = mine.layers.begin; layer < mine.layers.end(); ++layer)
    out.sealed_layers.push_back(views[static_cast<std::size_t>(layer)].run_bytes +
                                piece_of(sealed_class, layer, mine.heads, with_headers()).offset);
  return out;
}

std::vector<std::byte> StreamGrant::encode() const {
  ByteWriter w;
  w.put(kMagic);
  w.put(kVersion);
  w.put_raw(request_id.bytes);
  put_spec(w, spec);
  w.put(head_begin);
  w.put(layer_begin);
  w.put(class_number);
  w.put(static_cast<std::uint32_t>(formats.size()));
  for (const pages::HeadFormats& f : formats) {
    w.put(static_cast<std::uint8_t>(f.k));
    w.put(static_cast<std::uint8_t>(f.v));
  }
  w.put(first_token);
  w.put(num_tokens);
  w.put(ttl_ns);
  w.put_raw(host);
  w.put(layer_stride_bytes);
  w.put(static_cast<std::uint32_t>(pages.size()));
  for (const GrantPage& p : pages) {
    w.put(p.page);
    w.put(p.generation);
    w.put(p.offset_bytes);
    w.put(static_cast<std::uint8_t>(p.sealed));
  }
  w.put(static_cast<std::uint16_t>(shares.size()));
  for (const GrantShare& s : shares) {
    w.put(s.grant.id);
    w.put(s.grant.generation);
    for (const std::int32_t v :
         {s.share.layers.begin, s.share.layers.count, s.share.heads.begin, s.share.heads.count})
      w.put(v);
  }
  w.put(static_cast<std::uint8_t>(addresses.size()));
  for (const std::string& a : addresses) w.put_string(a);
  return w.take();
}

namespace {

Status read_formats(ByteReader& r, StreamGrant& g) {
  const auto count = r.get<std::uint32_t>();
  if (count > static_cast<std::uint32_t>(kMaxLayers) * static_cast<std::uint32_t>(kMaxHeads))
    return corrupt("too many formats");
  for (std::uint32_t i = 0; i < count && r.ok(); ++i) {
    const auto k = r.get<std::uint8_t>(), v = r.get<std::uint8_t>();
    if (k > static_cast<int>(Format::kV3) || v > static_cast<int>(Format::kV3))
      return corrupt(text("format ", int{std::max(k, v)}, " is unknown to this build"));
    g.formats.push_back({static_cast<Format>(k), static_cast<Format>(v)});
  }
  return {};
}

Status read_pages(ByteReader& r, StreamGrant& g) {
  const auto num_pages = r.get<std::uint32_t>();
  if (num_pages > static_cast<std::uint32_t>(kMaxSlots)) return corrupt("too many pages");
  for (std::uint32_t i = 0; i < num_pages && r.ok(); ++i) {
    GrantPage p;
    p.page = r.get<std::int32_t>();
    p.generation = r.get<std::uint64_t>();
    p.offset_bytes = r.get<std::int64_t>();
    const auto sealed = r.get<std::uint8_t>();
    if (sealed > 1) return corrupt(text("sealed=", int{sealed}, " must be 0 or 1"));
    p.sealed = sealed == 1;
    g.pages.push_back(p);
  }
  return {};
}

Status read_shares(ByteReader& r, StreamGrant& g) {
  const auto count = r.get<std::uint16_t>();
  if (count > kMaxShares) return corrupt("too many shares");
  for (int i = 0; i < count && r.ok(); ++i) {
    GrantShare s;
    s.grant.id = r.get<std::uint64_t>();
    s.grant.generation = r.get<std::uint64_t>();
    for (std::int32_t* v : {&s.share.layers.begin, &s.share.layers.count, &s.share.heads.begin,
                            &s.share.heads.count}) {
      *v = r.get<std::int32_t>();
      if (*v < 0 || *v > 2 * kMaxLayers) return corrupt(text("share: ", *v, " is out of range"));
    }
    g.shares.push_back(s);
  }
  return {};
}

}  // namespace

Result<StreamGrant> StreamGrant::decode(std::span<const std::byte> bytes) {
  ByteReader r(bytes);
  StreamGrant g;
  if (r.get<std::uint32_t>() != kMagic) return corrupt("wrong magic");
  if (const auto v = r.get<std::uint16_t>(); v != kVersion) {
    return Error{ErrorCode::kUnsupported, text("grant: version ", v, ", this build reads 2")};
  }
  const auto copy16 = [&](std::array<std::byte, 16>& to) {
    const auto part = r.get_raw(16);
    if (part.size() == 16) std::memcpy(to.data(), part.data(), 16);
  };
  copy16(g.request_id.bytes);
  g.spec = get_spec(r);
  g.head_begin = r.get<std::int32_t>();
  g.layer_begin = r.get<std::int32_t>();
  g.class_number = r.get<std::uint32_t>();
  KVCORE_RETURN_IF_ERROR(read_formats(r, g));
  g.first_token = r.get<std::int64_t>();
  g.num_tokens = r.get<std::int64_t>();
  g.ttl_ns = r.get<std::int64_t>();
  copy16(g.host);
  g.layer_stride_bytes = r.get<std::int64_t>();
  KVCORE_RETURN_IF_ERROR(read_pages(r, g));
  KVCORE_RETURN_IF_ERROR(read_shares(r, g));
  const auto num_addresses = r.get<std::uint8_t>();
  if (num_addresses > kMaxAddresses) return corrupt("too many addresses");
  for (int i = 0; i < num_addresses && r.ok(); ++i) {
    g.addresses.push_back(r.get_string(kMaxAddressBytes));
    if (printable(g.addresses.back()) != g.addresses.back())
      return corrupt(text("address ", i, " holds other than printable ASCII"));
  }
  if (!r.ok()) return corrupt("cut short");
  if (!r.at_end()) return corrupt(text(r.left(), " bytes too long"));
  KVCORE_RETURN_IF_ERROR(g.check());
  return g;
}

}  // namespace kvcore::stream
