#include "pages/slice_io.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "base/text.h"

namespace kvcore::pages {
namespace {

std::int64_t element_bytes(Format f) { return f == Format::kF32 ? 4 : 2; }

Status check(const Pool& pool, std::int32_t page, std::int32_t layer, std::size_t k_bytes,
             std::size_t v_bytes) {
  const PageSpec& spec = pool.spec();
  const PageSpecOptions& o = spec.options();
  KVCORE_ASSIGN_OR_RETURN(const PageRefs refs, pool.refs(page));
  if (refs.owner == 0 && refs.io == 0)
    return invalid_argument(text("page=", page, " is free: only held pages have content"));
  KVCORE_ASSIGN_OR_RETURN(const PagePlace place, pool.place(page));
  if (place.class_number != 0)
    return Error{ErrorCode::kUnsupported, text("page=", page, " is compressed (class ",
                                               place.class_number, "): decode its blocks")};
  KVCORE_RETURN_IF_ERROR(check_range("layer", layer, 0, o.num_layers - 1));
  const std::int64_t k_want = o.num_kv_heads * spec.k_block_bytes();
  const std::int64_t v_want = o.num_kv_heads * spec.v_block_bytes();
  if (static_cast<std::int64_t>(k_bytes) != k_want)
    return invalid_argument(text("k has ", k_bytes, " bytes: allowed ", k_want));
  if (static_cast<std::int64_t>(v_bytes) != v_want)
    return invalid_argument(text("v has ", v_bytes, " bytes: allowed ", v_want));
  return {};
}

// Calls move(byte offset in canonical array, byte offset in the head's block) for each element.
template <class Index, class Move>
void for_each_element(const PageSpecOptions& o, std::int64_t head, std::int64_t dims, Index index,
                      Move move) {
  const std::int64_t size = element_bytes(o.format);
  for (std::int64_t token = 0; token < o.page_size; ++token) {
    for (std::int64_t dim = 0; dim < dims; ++dim)
      move(((token * o.num_kv_heads + head) * dims + dim) * size, index(o, token, dim) * size);
  }
}

// One of the two directions over both K and V: copy(canonical array, offset, slice bytes).
template <class Bytes, class Copy>
void for_each_head(const PageSpec& spec, std::byte* slice, Bytes k, Bytes v, bool with_v,
                   Copy copy) {
  const PageSpecOptions& o = spec.options();
  for (std::int32_t head = 0; head < o.num_kv_heads; ++head) {
    const HeadBlock block = spec.head_block(head);
    for_each_element(o, head, o.head_dim_k, k_element, [&](std::int64_t from, std::int64_t to) {
      copy(k.data() + from, slice + block.k_offset_bytes + to);
    });
    if (!with_v) continue;
    for_each_element(o, head, o.head_dim_v, v_element, [&](std::int64_t from, std::int64_t to) {
      copy(v.data() + from, slice + block.v_offset_bytes + to);
    });
  }
}

}  // namespace

std::int64_t k_element(const PageSpecOptions& o, std::int64_t token, std::int64_t dim) noexcept {
  if (o.layout == LayoutId::kCanonical) return token * o.head_dim_k + dim;
  const std::int64_t tokens = std::min<std::int64_t>(o.page_size, kTokenBlock);
  const std::int64_t block = token / tokens * tokens * o.head_dim_k;
  const std::int64_t lane = token % tokens;
  if (o.format == Format::kBf16) return block + (dim / 2 * tokens + lane) * 2 + dim % 2;
  return block + dim * tokens + lane;
}

std::int64_t v_element(const PageSpecOptions& o, std::int64_t token, std::int64_t dim) noexcept {
  if (o.layout == LayoutId::kCanonical)
    return token * (o.latent ? o.head_dim_k : o.head_dim_v) + dim;
  const std::int64_t first = dim / kDimBlock * kDimBlock;
  const std::int64_t dims = std::min<std::int64_t>(kDimBlock, o.head_dim_v - first);
  const std::int64_t block = first * o.page_size;
  const std::int64_t lane = dim - first;
  if (o.format == Format::kBf16) return block + (token / 2 * dims + lane) * 2 + token % 2;
  return block + token * dims + lane;
}

Status read_slice(const Pool& pool, std::int32_t page, std::int32_t layer, std::span<std::byte> k,
                  std::span<std::byte> v) {
  KVCORE_RETURN_IF_ERROR(check(pool, page, layer, k.size(), v.size()));
  const auto size = static_cast<std::size_t>(element_bytes(pool.spec().options().format));
  for_each_head(pool.spec(), pool.slice(page, layer), k, v, true,
                [&](std::byte* array, const std::byte* slice) { std::memcpy(array, slice, size); });
  return {};
}

Status write_slice(Pool& pool, std::int32_t page, std::int32_t layer, std::span<const std::byte> k,
                   std::span<const std::byte> v) {
  KVCORE_RETURN_IF_ERROR(check(pool, page, layer, k.size(), v.size()));
  KVCORE_ASSIGN_OR_RETURN(const bool sealed, pool.is_sealed(page));
  if (sealed)
    return invalid_argument(text("page=", page, " is sealed: sealed pages are immutable"));
  const PageSpecOptions& o = pool.spec().options();
  std::byte* slice = pool.slice(page, layer);
  SliceHeader header{};
  header.magic = kSliceMagic;
  header.layer = static_cast<std::uint16_t>(layer);
  header.valid_tokens = static_cast<std::uint16_t>(o.page_size);
  header.format = o.format;
  header.layout = o.layout;
  std::memcpy(slice, &header, sizeof(header));
  const auto size = static_cast<std::size_t>(element_bytes(o.format));
  for_each_head(pool.spec(), slice, k, v, !o.latent,
                [&](const std::byte* array, std::byte* to) { std::memcpy(to, array, size); });
  return {};
}

}  // namespace kvcore::pages
