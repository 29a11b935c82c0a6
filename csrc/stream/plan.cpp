#include "stream/plan.h"

#include <algorithm>
#include <string>

#include "base/text.h"

namespace kvcore::stream {
namespace {

Error unsupported(const std::string& why) { return {ErrorCode::kUnsupported, why}; }

const char* name_of(LayoutId layout) {
  return layout == LayoutId::kPacked ? "packed" : "canonical";
}

// For every KV head of the receiver the index of its sender in one layer.
Result<std::vector<std::int32_t>> senders_of_layer(std::span<const Side> senders,
                                                   const Side& receiver, std::int32_t layer,
                                                   std::uint32_t spread) {
  std::vector<std::int32_t> out;
  for (std::int32_t head = receiver.heads().begin; head < receiver.heads().end(); ++head) {
    std::vector<std::int32_t> holders;
    for (std::size_t i = 0; i < senders.size(); ++i) {
      if (senders[i].layers().contains({layer, 1}) && senders[i].heads().contains({head, 1}))
        holders.push_back(static_cast<std::int32_t>(i));
    }
    if (holders.empty()) {
      return unsupported(text("plan: the receiver holds layer ", layer, ", KV head ", head,
                              ", none of the ", senders.size(), " senders does; allowed: senders ",
                              "that hold layers [", receiver.layers().begin, ", ",
                              receiver.layers().end(), ") and KV heads [", receiver.heads().begin,
                              ", ", receiver.heads().end(), ") together"));
    }
    out.push_back(holders[spread % holders.size()]);
  }
  return out;
}

}  // namespace

Result<Range32> heads_of_rank(std::int32_t num_kv_heads, std::int32_t degree, std::int32_t rank) {
  if (num_kv_heads < 1) {
    return invalid_argument(text("num_kv_heads=", num_kv_heads, " must be > 0"));
  }
  if (degree < 1 || rank < 0 || rank >= degree) {
    return invalid_argument(
        text("tp_rank=", rank, ", tp_degree=", degree, ": allowed 0 <= tp_rank < tp_degree"));
  }
  if (num_kv_heads % degree == 0) {
    const std::int32_t each = num_kv_heads / degree;
    return Range32{rank * each, each};
  }
  if (degree % num_kv_heads == 0) return Range32{rank / (degree / num_kv_heads), 1};
  return unsupported(text("tp_degree=", degree, " does not share num_kv_heads=", num_kv_heads,
                          " evenly: allowed are divisors and multiples of it"));
}

Status check_convertible(const pages::PageSpecOptions& sender,
                         const pages::PageSpecOptions& receiver) {
  const struct {
    const char* name;
    std::int32_t sender, receiver;
  } fields[] = {
      {"latent", sender.latent, receiver.latent},
      {"head_dim_k", sender.head_dim_k, receiver.head_dim_k},
      {"head_dim_v", sender.head_dim_v, receiver.head_dim_v},
  };
  for (const auto& f : fields) {
    if (f.sender != f.receiver) {
      return unsupported(text("the receiver's pages have ", f.name, "=", f.receiver,
                              ", the sender's have ", f.name, "=", f.sender,
                              "; allowed: both sides equal"));
    }
  }
  for (const auto& [side, spec] :
       {std::pair("sender", &sender), std::pair("receiver", &receiver)}) {
    if (spec->format > Format::kBf16) {
      return unsupported(text("the ", side, "'s open pages have format=",
                              pages::name_of(spec->format), "; allowed: f32, f16, bf16"));
    }
    if (spec->layout > LayoutId::kPacked) {
      return unsupported(text("the ", side, "'s pages have layout=", static_cast<int>(spec->layout),
                              "; allowed: ", name_of(LayoutId::kCanonical), ", ",
                              name_of(LayoutId::kPacked)));
    }
  }
  return {};
}

Result<std::vector<PlannedShare>> plan_shares(std::span<const Side> senders, const Side& receiver,
                                              std::uint32_t spread) {
  if (senders.empty()) return invalid_argument("plan: senders is empty: allowed 1 and more");
  for (const Side& sender : senders)
    KVCORE_RETURN_IF_ERROR(check_convertible(sender.spec, receiver.spec));
  std::vector<PlannedShare> out;
  std::vector<std::int32_t> before;  // of the previous layer
  std::size_t block = 0;             // shares of the layers with the same senders
  for (std::int32_t layer = receiver.layers().begin; layer < receiver.layers().end(); ++layer) {
    KVCORE_ASSIGN_OR_RETURN(const auto now, senders_of_layer(senders, receiver, layer, spread));
    if (now == before) {
      for (std::size_t i = block; i < out.size(); ++i) ++out[i].share.layers.count;
      continue;
    }
    block = out.size();
    for (std::size_t i = 0; i < now.size(); ++i) {
      const auto head = receiver.heads().begin + static_cast<std::int32_t>(i);
      if (out.size() > block && out.back().sender == now[i])
        ++out.back().share.heads.count;
      else
        out.push_back({now[i], {{layer, 1}, {head, 1}}});
    }
    before = now;
  }
  return out;
}

Status check_cover(std::span<const Share> shares, const Side& receiver) {
  const auto heads = static_cast<std::size_t>(receiver.heads().count);
  std::vector<std::uint8_t> covered(static_cast<std::size_t>(receiver.layers().count) * heads);
  for (const Share& share : shares) {
    if (share.layers.count < 1 || share.heads.count < 1 ||
        !receiver.layers().contains(share.layers) || !receiver.heads().contains(share.heads)) {
      return invalid_argument(text("shares: layers ", share.layers.begin, " + ", share.layers.count,
                                   ", KV heads ", share.heads.begin, " + ", share.heads.count,
                                   "; allowed: inside layers [", receiver.layers().begin, ", ",
                                   receiver.layers().end(), ") and KV heads [",
                                   receiver.heads().begin, ", ", receiver.heads().end(), ")"));
    }
    for (std::int32_t layer = share.layers.begin; layer < share.layers.end(); ++layer) {
      for (std::int32_t head = share.heads.begin; head < share.heads.end(); ++head) {
        auto& cell = covered[static_cast<std::size_t>(layer - receiver.layer_begin) * heads +
                             static_cast<std::size_t>(head - receiver.head_begin)];
        if (cell++ > 0) {
          return invalid_argument(text("shares: layer ", layer, ", KV head ", head,
                                       " is in two of them; allowed: each exactly once"));
        }
      }
    }
  }
  const auto gap = std::find(covered.begin(), covered.end(), 0);
  if (gap == covered.end()) return {};
  const auto i = static_cast<std::size_t>(gap - covered.begin());
  return invalid_argument(text("shares: layer ", receiver.layer_begin + static_cast<int>(i / heads),
                               ", KV head ", receiver.head_begin + static_cast<int>(i % heads),
                               " is in none of them; allowed: each exactly once"));
}

Way way_of(const Side& sender, const Side& receiver, const Share& share, bool with_header) {
  const auto& from = sender.spec;
  const auto& to = receiver.spec;
  const bool alike =
      from.page_size == to.page_size && from.format == to.format && from.layout == to.layout;
  if (!alike) return Way::kConvert;
  if (!with_header) return Way::kHeads;
  // A header names the layer and stands before all heads: both sides must count them alike.
  const bool same = sender.layer_begin == receiver.layer_begin &&
                    sender.heads() == receiver.heads() && share.heads == receiver.heads();
  return same ? Way::kWhole : Way::kConvert;
}

std::int64_t PageMap::num_source_pages() const noexcept {
  const std::int64_t skipped = first_token % from_page_size;
  return (skipped + num_tokens + from_page_size - 1) / from_page_size;
}

SlotSource PageMap::source_of(std::int32_t slot) const noexcept {
  const std::int64_t begin = first_token % from_page_size + std::int64_t{slot} * to_page_size;
  const std::int64_t count =
      std::min<std::int64_t>(to_page_size, num_tokens - std::int64_t{slot} * to_page_size);
  const std::int64_t first = begin / from_page_size;
  const std::int64_t last = (begin + count - 1) / from_page_size;
  return {static_cast<std::int32_t>(first), static_cast<std::int32_t>(last - first + 1),
          static_cast<std::int32_t>(begin % from_page_size), static_cast<std::int32_t>(count)};
}

}  // namespace kvcore::stream
