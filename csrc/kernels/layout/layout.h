// Moving K and V rows between tensors [tokens][KV heads][head_dim] and pages, in either layout.
// A tensor's dtype may differ from the page's format: values are converted, round to nearest even.
// Compressed pages are read as the numbers they stand for, and never written: kUnsupported.
// Arguments are validated before any byte moves. Thread rules: writes to different pages may run in
// parallel; nothing here locks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/dtype.h"
#include "base/page_layout.h"
#include "base/result.h"

namespace kvcore::kernels {

struct TokenRows {  // [tokens][KV heads][head_dim], the last two dimensions contiguous
  const char* data;
  std::int64_t stride;  // elements between tokens
};
struct MutableTokenRows {
  char* data;
  std::int64_t stride;
};

// One page of one layer; unchecked.
struct SliceRef {
  std::byte* data;
  const ClassView* cls;
  const LayerView* layer;
};
inline SliceRef slice_of(const PagesView& pages, std::int64_t page, std::int64_t layer) noexcept {
  const PageRecord& record = pages.records[page];
  const ClassView& cls = pages.classes[record.class_id];
  const LayerView& view = cls.layers[layer];
  return {pages.arena + record.offset_bytes + view.run_bytes + record.index * view.slice_bytes,
          &cls, &view};
}

// V is the first dims of K (PageSpec's latent): what is written is K alone, and v may be null.
inline bool is_latent(const HeadBlock& head) noexcept {
  return head.v_offset_bytes == head.k_offset_bytes;
}
bool is_latent(const PagesView& pages) noexcept;
inline TokenRows rows_after(TokenRows rows, std::int64_t bytes) noexcept {
  return {rows.data == nullptr ? nullptr : rows.data + bytes, rows.stride};
}

// Whether v's stride fits: see pack_slice.
Status check_v(const PagesView& pages, TokenRows v, std::int64_t tokens);

// Token i goes to page slot_mapping[i] / page_size, slot slot_mapping[i] % page_size; -1 skips it.
Status append_kv(const PagesView& pages, std::int64_t layer, TokenRows k, TokenRows v, DType dtype,
                 std::span<const std::int64_t> slot_mapping);

// `count` tokens from slot `first` of one slice, from or to canonical tensors of `count` tokens.
Status pack_slice(const PagesView& pages, std::int64_t page, std::int64_t layer, std::int64_t first,
                  std::int64_t count, TokenRows k, TokenRows v, DType dtype);
Status unpack_slice(const PagesView& pages, std::int64_t page, std::int64_t layer,
                    std::int64_t first, std::int64_t count, MutableTokenRows k, MutableTokenRows v,
                    DType dtype);

// Copies all layers of from[i] to to[i]; classes must match. Ids must be distinct within `to`.
Status copy_pages(const PagesView& pages, std::span<const std::int64_t> from,
                  std::span<const std::int64_t> to);

// kUnsupported where the page holds codes in this layer, naming page, KV head and format.
Status check_writable(const PagesView& pages, std::int64_t page, std::int64_t layer);

// Unchecked: the write behind append_kv, pack_slice and AttentionPlan::append. Tokens
// [first, first + count) of one page; writing slot 0 also writes the slice's header.
void write_tokens(const PagesView& pages, std::int64_t page, std::int64_t layer, std::int64_t first,
                  std::int64_t count, TokenRows k, TokenRows v, DType dtype);

// Unchecked: see PackTokens in attention/unit.h.
void pack_tokens(const char* k, const char* v, std::int64_t first, std::int64_t count,
                 std::int32_t head_dim_k, std::int32_t head_dim_v, const HeadBlock& head,
                 char* k_out, char* v_out);

}  // namespace kvcore::kernels
