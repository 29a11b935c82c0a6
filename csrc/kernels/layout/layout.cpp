#include "kernels/layout/layout.h"

#include <cstring>

#include "base/block_arrays.h"
#include "base/check.h"
#include "base/text.h"
#include "kernels/dispatch/table.h"
#include "kernels/formats/formats.h"
#include "kernels/layout/convert.h"
#include "kernels/layout/head_layout.h"

namespace kvcore::kernels {
namespace {

constexpr std::int64_t kChunk = 16;  // tokens converted at a time

Status check_stride(const char* field, std::int64_t stride, std::int64_t width,
                    std::int64_t tokens) {
  if (tokens <= 1 || stride >= width) return {};
  return invalid_argument(text(field, " has a token stride of ", stride,
                               " elements: expected at least num_kv_heads * head_dim = ", width));
}

Status check_slice(const PagesView& p, std::int64_t page, std::int64_t layer, std::int64_t first,
                   std::int64_t count) {
  KVCORE_RETURN_IF_ERROR(check_range("page", page, 0, p.num_pages - 1));
  KVCORE_RETURN_IF_ERROR(check_range("layer", layer, 0, p.num_layers - 1));
  KVCORE_RETURN_IF_ERROR(check_range("first", first, 0, p.page_size));
  return check_range("count", count, 0, p.page_size - first);
}

Status check_head_dims(const PagesView& p) {
  KVCORE_RETURN_IF_ERROR(check_range("head_dim_k", p.head_dim_k, 16, kMaxHeadDim));
  return check_range("head_dim_v", p.head_dim_v, 16, kMaxHeadDim);
}

// One head's rows into its block, converting in small chunks where dtype and format differ.
void write_head(Part part, const BlockShape& shape, char* block, std::int64_t first,
                std::int64_t count, const char* rows, std::int64_t stride, DType dtype) {
  const std::int64_t stride_bytes = stride * size_of(dtype);
  if (dtype == dtype_of(shape.format)) {
    move_rows<false>(part, shape, block, first, count, Rows<const char>{rows, stride_bytes});
    return;
  }
  alignas(64) char converted[kChunk * kMaxHeadDim * 4];
  const std::int64_t row_bytes = shape.dim * size_of(shape.format);
  for (std::int64_t i = 0; i < count; i += kChunk) {
    const std::int64_t n = std::min(kChunk, count - i);
    for (std::int64_t j = 0; j < n; ++j)
      convert_row(rows + (i + j) * stride_bytes, dtype, converted + j * row_bytes,
                  dtype_of(shape.format), shape.dim);
    move_rows<false>(part, shape, block, first + i, n, Rows<const char>{converted, row_bytes});
  }
}

// Codes are decoded for 16 tokens at a time.
void decode_head(Part part, const BlockShape& shape, const char* block, std::int64_t first,
                 std::int64_t count, char* rows, std::int64_t stride_bytes, DType dtype,
                 const KernelTable& table) {
  alignas(64) char decoded[kChunk * kMaxCodecDim * 4];
  const std::int64_t row_bytes = shape.dim * size_of(dtype);
  for (std::int64_t i = 0, n; i < count; i += n) {
    const std::int64_t skip = (first + i) % kChunk;
    n = std::min(kChunk - skip, count - i);
    table.decode_block({block, shape.format, part, static_cast<std::int32_t>(shape.tokens),
                        static_cast<std::int32_t>(shape.dim),
                        static_cast<std::int32_t>(first + i - skip),
                        static_cast<std::int32_t>(kChunk), dtype, decoded, row_bytes});
    for (std::int64_t j = 0; j < n; ++j)
      std::memcpy(rows + (i + j) * stride_bytes, decoded + (skip + j) * row_bytes,
                  static_cast<std::size_t>(row_bytes));
  }
}

void read_head(Part part, const BlockShape& shape, const char* block, std::int64_t first,
               std::int64_t count, char* rows, std::int64_t stride, DType dtype,
               const KernelTable& table) {
  const std::int64_t stride_bytes = stride * size_of(dtype);
  if (!holds_elements(shape.format))
    return decode_head(part, shape, block, first, count, rows, stride_bytes, dtype, table);
  if (dtype == dtype_of(shape.format)) {
    move_rows<true>(part, shape, block, first, count, Rows<char>{rows, stride_bytes});
    return;
  }
  alignas(64) char raw[kChunk * kMaxHeadDim * 4];
  const std::int64_t row_bytes = shape.dim * size_of(shape.format);
  for (std::int64_t i = 0; i < count; i += kChunk) {
    const std::int64_t n = std::min(kChunk, count - i);
    move_rows<true>(part, shape, block, first + i, n, Rows<char>{raw, row_bytes});
    for (std::int64_t j = 0; j < n; ++j)
      convert_row(raw + j * row_bytes, dtype_of(shape.format), rows + (i + j) * stride_bytes, dtype,
                  shape.dim);
  }
}

void write_header(const SliceRef& slice, const PageRecord& record, std::int64_t layer) {
  SliceHeader header{};
  header.magic = kSliceMagic;
  header.class_id = static_cast<std::uint32_t>(record.class_id);
  header.layer = static_cast<std::uint16_t>(layer);
  header.format = slice.layer->heads[0].k_format;
  header.layout = slice.cls->layout;
  std::memcpy(slice.data, &header, sizeof header);
}

}  // namespace

bool is_latent(const PagesView& pages) noexcept {
  const ClassView& open = pages.classes[0];
  return open.has_headers && is_latent(open.layers[0].heads[0]);
}

Status check_v(const PagesView& pages, TokenRows v, std::int64_t tokens) {
  if (is_latent(pages)) return {};  // not read
  return check_stride("v", v.stride, pages.num_kv_heads * pages.head_dim_v, tokens);
}

Status check_writable(const PagesView& pages, std::int64_t page, std::int64_t layer) {
  const HeadBlock* heads = slice_of(pages, page, layer).layer->heads;
  for (std::int32_t h = 0; h < pages.num_kv_heads; ++h) {
    const HeadBlock& head = heads[h];
    if (holds_elements(head.k_format) && holds_elements(head.v_format)) continue;
    const bool k = !holds_elements(head.k_format);
    return Error{ErrorCode::kUnsupported,
                 text("page ", page, " is compressed (", k ? "K" : "V", " of layer ", layer,
                      ", KV head ", h, " is ", codec_name(k ? head.k_format : head.v_format),
                      "): single tokens cannot be written into it")};
  }
  return {};
}

void write_tokens(const PagesView& pages, std::int64_t page, std::int64_t layer, std::int64_t first,
                  std::int64_t count, TokenRows k, TokenRows v, DType dtype) {
  if (count == 0) return;
  const SliceRef slice = slice_of(pages, page, layer);
  if (first == 0 && slice.cls->has_headers) write_header(slice, pages.records[page], layer);
  char* data = reinterpret_cast<char*>(slice.data);
  const std::int64_t value = size_of(dtype);
  for (std::int32_t h = 0; h < pages.num_kv_heads; ++h) {
    const HeadBlock& head = slice.layer->heads[h];
    const LayoutId layout = slice.cls->layout;
    write_head(Part::kK,
               {pages.page_size, pages.head_dim_k, head.k_format, layout, head.k_row_bytes},
               data + head.k_offset_bytes, first, count, k.data + h * pages.head_dim_k * value,
               k.stride, dtype);
    if (slice.cls->has_headers && is_latent(head)) continue;
    write_head(Part::kV,
               {pages.page_size, pages.head_dim_v, head.v_format, layout, head.v_row_bytes},
               data + head.v_offset_bytes, first, count, v.data + h * pages.head_dim_v * value,
               v.stride, dtype);
  }
}

void pack_tokens(const char* k, const char* v, std::int64_t first, std::int64_t count,
                 std::int32_t head_dim_k, std::int32_t head_dim_v, const HeadBlock& head,
                 char* k_out, char* v_out) {
  const auto rows_of = [&](const char* block, std::int64_t row_bytes, std::int64_t dim, Format f) {
    const std::int64_t stride = row_bytes != 0 ? row_bytes : dim * size_of(f);
    return Rows<const char>{block + first * stride, stride};
  };
  move_rows<false>(Part::kK, {count, head_dim_k, head.k_format, LayoutId::kPacked}, k_out, 0, count,
                   rows_of(k, head.k_row_bytes, head_dim_k, head.k_format));
  move_rows<false>(Part::kV, {count, head_dim_v, head.v_format, LayoutId::kPacked}, v_out, 0, count,
                   rows_of(v, head.v_row_bytes, head_dim_v, head.v_format));
}

Status append_kv(const PagesView& pages, std::int64_t layer, TokenRows k, TokenRows v, DType dtype,
                 std::span<const std::int64_t> slot_mapping) {
  const std::int64_t slots = pages.num_pages * pages.page_size;
  const auto tokens = static_cast<std::int64_t>(slot_mapping.size());
  KVCORE_RETURN_IF_ERROR(check_head_dims(pages));
  KVCORE_RETURN_IF_ERROR(check_range("layer", layer, 0, pages.num_layers - 1));
  KVCORE_RETURN_IF_ERROR(
      check_stride("k", k.stride, pages.num_kv_heads * pages.head_dim_k, tokens));
  KVCORE_RETURN_IF_ERROR(check_v(pages, v, tokens));
  std::int64_t writable = -1;
  for (std::int64_t i = 0; i < tokens; ++i) {
    const std::int64_t slot = slot_mapping[static_cast<std::size_t>(i)];
    if (slot < -1 || slot >= slots)
      return invalid_argument(
          text("slot_mapping[", i, "]=", slot, " is out of range: allowed -1 to ", slots - 1));
    const std::int64_t page = slot / pages.page_size;
    if (slot < 0 || page == writable) continue;
    KVCORE_RETURN_IF_ERROR(check_writable(pages, page, layer));
    writable = page;
  }
  const std::int64_t bytes = size_of(dtype);
  for (std::int64_t i = 0; i < tokens;) {
    const std::int64_t slot = slot_mapping[static_cast<std::size_t>(i)];
    std::int64_t n = 1;  // tokens that follow each other in the same page go together
    while (slot >= 0 && i + n < tokens && (slot + n) % pages.page_size != 0 &&
           slot_mapping[static_cast<std::size_t>(i + n)] == slot + n)
      ++n;
    if (slot >= 0)
      write_tokens(pages, slot / pages.page_size, layer, slot % pages.page_size, n,
                   {k.data + i * k.stride * bytes, k.stride}, rows_after(v, i * v.stride * bytes),
                   dtype);
    i += n;
  }
  return {};
}

Status pack_slice(const PagesView& pages, std::int64_t page, std::int64_t layer, std::int64_t first,
                  std::int64_t count, TokenRows k, TokenRows v, DType dtype) {
  KVCORE_RETURN_IF_ERROR(check_head_dims(pages));
  KVCORE_RETURN_IF_ERROR(check_slice(pages, page, layer, first, count));
  KVCORE_RETURN_IF_ERROR(check_stride("k", k.stride, pages.num_kv_heads * pages.head_dim_k, count));
  KVCORE_RETURN_IF_ERROR(check_v(pages, v, count));
  KVCORE_RETURN_IF_ERROR(check_writable(pages, page, layer));
  write_tokens(pages, page, layer, first, count, k, v, dtype);
  return {};
}

Status unpack_slice(const PagesView& pages, std::int64_t page, std::int64_t layer,
                    std::int64_t first, std::int64_t count, MutableTokenRows k, MutableTokenRows v,
                    DType dtype) {
  KVCORE_RETURN_IF_ERROR(check_head_dims(pages));
  KVCORE_RETURN_IF_ERROR(check_slice(pages, page, layer, first, count));
  KVCORE_RETURN_IF_ERROR(check_stride("k", k.stride, pages.num_kv_heads * pages.head_dim_k, count));
  KVCORE_RETURN_IF_ERROR(check_stride("v", v.stride, pages.num_kv_heads * pages.head_dim_v, count));
  KVCORE_ASSIGN_OR_RETURN(const KernelTable* table, kernel_table());
  const SliceRef slice = slice_of(pages, page, layer);
  const char* data = reinterpret_cast<const char*>(slice.data);
  const std::int64_t value = size_of(dtype);
  for (std::int32_t h = 0; h < pages.num_kv_heads; ++h) {
    const HeadBlock& head = slice.layer->heads[h];
    const LayoutId layout = slice.cls->layout;
    read_head(Part::kK,
              {pages.page_size, pages.head_dim_k, head.k_format, layout, head.k_row_bytes},
              data + head.k_offset_bytes, first, count, k.data + h * pages.head_dim_k * value,
              k.stride, dtype, *table);
    read_head(Part::kV,
              {pages.page_size, pages.head_dim_v, head.v_format, layout, head.v_row_bytes},
              data + head.v_offset_bytes, first, count, v.data + h * pages.head_dim_v * value,
              v.stride, dtype, *table);
  }
  return {};
}

Status copy_pages(const PagesView& pages, std::span<const std::int64_t> from,
                  std::span<const std::int64_t> to) {
  if (from.size() != to.size())
    return invalid_argument(text("from has ", from.size(), " pages and to has ", to.size(),
                                 ": expected the same number"));
  for (std::size_t i = 0; i < from.size(); ++i) {
    KVCORE_RETURN_IF_ERROR(check_range("from", from[i], 0, pages.num_pages - 1));
    KVCORE_RETURN_IF_ERROR(check_range("to", to[i], 0, pages.num_pages - 1));
    if (pages.records[from[i]].class_id != pages.records[to[i]].class_id)
      return invalid_argument(
          text("page ", from[i], " is of class ", pages.records[from[i]].class_id, " and page ",
               to[i], " of class ", pages.records[to[i]].class_id, ": expected the same class"));
    if (!pages.classes[pages.records[from[i]].class_id].has_headers)
      return Error{ErrorCode::kUnsupported, "pages of another engine's tensors are not copied"};
  }
  for (std::size_t i = 0; i < from.size(); ++i) {
    if (from[i] == to[i]) continue;
    for (std::int64_t layer = 0; layer < pages.num_layers; ++layer) {
      const SliceRef a = slice_of(pages, from[i], layer), b = slice_of(pages, to[i], layer);
      std::memcpy(b.data, a.data, static_cast<std::size_t>(a.layer->slice_bytes));
    }
  }
  return {};
}

}  // namespace kvcore::kernels
