#include "stream/grant.h"

#include <cctype>
#include <fstream>

#include "base/printable.h"
#include "base/text.h"
#include "stream/bytes.h"

namespace kvcore::stream {
namespace {

constexpr std::uint32_t kMagic = 0x5247564bu;  // "KVGR"
constexpr std::uint16_t kVersion = 1;
constexpr std::int64_t kMaxOffset = std::int64_t{1} << 46;
constexpr std::int64_t kMaxTokens = std::int64_t{1} << 40;

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
  if (g.head_begin < 0 || g.layer_begin < 0) return corrupt("head_begin, layer_begin must be >= 0");
  if (g.ttl_ns <= 0) return corrupt(text("ttl_ns=", g.ttl_ns, " must be > 0"));
  return {};
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
  for (const GrantPage& p : g.pages) {
    if (p.page < 0 || p.offset_bytes < 0 || p.offset_bytes > kMaxOffset ||
        p.offset_bytes % 64 != 0) {
      return corrupt(
          text("page ", p.page, " at offset_bytes=", p.offset_bytes, " is out of range"));
    }
  }
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

Shape StreamGrant::shape() const {
  const auto made = pages::PageSpec::make(spec);
  return {.num_layers = spec.num_layers,
          .num_slots = static_cast<std::int32_t>(pages.size()),
          .page_size = spec.page_size,
          .num_tokens = num_tokens,
          .slice_bytes = made ? made->slice_bytes() : 0};
}

Placement StreamGrant::placement() const {
  Placement out{.offsets = {}, .layer_stride_bytes = layer_stride_bytes};
  out.offsets.reserve(pages.size());
  for (const GrantPage& p : pages) out.offsets.push_back(p.offset_bytes);
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
  w.put(class_id);
  w.put(first_token);
  w.put(num_tokens);
  w.put(ttl_ns);
  w.put_raw(host);
  w.put(grant.id);
  w.put(grant.generation);
  w.put(layer_stride_bytes);
  w.put(static_cast<std::uint32_t>(pages.size()));
  for (const GrantPage& p : pages) {
    w.put(p.page);
    w.put(p.generation);
    w.put(p.offset_bytes);
  }
  w.put(static_cast<std::uint8_t>(addresses.size()));
  for (const std::string& a : addresses) w.put_string(a);
  return w.take();
}

Result<StreamGrant> StreamGrant::decode(std::span<const std::byte> bytes) {
  ByteReader r(bytes);
  StreamGrant g;
  if (r.get<std::uint32_t>() != kMagic) return corrupt("wrong magic");
  if (const auto v = r.get<std::uint16_t>(); v != kVersion) {
    return Error{ErrorCode::kUnsupported, text("grant: version ", v, ", this build reads 1")};
  }
  const auto copy16 = [&](std::array<std::byte, 16>& to) {
    const auto part = r.get_raw(16);
    if (part.size() == 16) std::memcpy(to.data(), part.data(), 16);
  };
  copy16(g.request_id.bytes);
  g.spec = get_spec(r);
  g.head_begin = r.get<std::int32_t>();
  g.layer_begin = r.get<std::int32_t>();
  g.class_id = r.get<std::uint32_t>();
  g.first_token = r.get<std::int64_t>();
  g.num_tokens = r.get<std::int64_t>();
  g.ttl_ns = r.get<std::int64_t>();
  copy16(g.host);
  g.grant.id = r.get<std::uint64_t>();
  g.grant.generation = r.get<std::uint64_t>();
  g.layer_stride_bytes = r.get<std::int64_t>();
  const auto num_pages = r.get<std::uint32_t>();
  if (num_pages > static_cast<std::uint32_t>(kMaxSlots)) return corrupt("too many pages");
  for (std::uint32_t i = 0; i < num_pages && r.ok(); ++i) {
    GrantPage p;
    p.page = r.get<std::int32_t>();
    p.generation = r.get<std::uint64_t>();
    p.offset_bytes = r.get<std::int64_t>();
    g.pages.push_back(p);
  }
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

Status check_layout(const pages::PageSpecOptions& local, const pages::PageSpecOptions& remote) {
  const auto layout_of = [](const pages::PageSpecOptions& o) {
    return o.latent ? "latent" : o.layout == LayoutId::kPacked ? "packed" : "canonical";
  };
  const struct {
    const char* name;
    std::string local, remote;
  } fields[] = {
      {"num_layers", text(local.num_layers), text(remote.num_layers)},
      {"num_kv_heads", text(local.num_kv_heads), text(remote.num_kv_heads)},
      {"head_dim_k", text(local.head_dim_k), text(remote.head_dim_k)},
      {"head_dim_v", text(local.head_dim_v), text(remote.head_dim_v)},
      {"page_size", text(local.page_size), text(remote.page_size)},
      {"format", pages::name_of(local.format), pages::name_of(remote.format)},
      {"layout", layout_of(local), layout_of(remote)},
  };
  for (const auto& f : fields) {
    if (f.local != f.remote) {
      return Error{ErrorCode::kUnsupported,
                   text("grant: the receiver's pages have ", f.name, "=", f.remote,
                        ", the sender's have ", f.local, "; both sides must be equal")};
    }
  }
  return {};
}

}  // namespace kvcore::stream
