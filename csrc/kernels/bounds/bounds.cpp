#include "kernels/bounds/bounds.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "base/block_arrays.h"
#include "base/check.h"
#include "base/text.h"
#include "kernels/bounds/rows.h"
#include "kernels/dispatch/table.h"
#include "kernels/layout/convert.h"
#include "kernels/layout/layout.h"

namespace kvcore::kernels {
namespace {

constexpr std::int32_t kChunk = 16;  // tokens decoded at a time

Status check_entry(const char* field, std::size_t i, std::int64_t value, std::int64_t high) {
  if (value >= 0 && value <= high) return {};
  return invalid_argument(
      text(field, "[", i, "]=", value, " is out of range: allowed 0 to ", high));
}

Status check_dim(const char* field, std::int64_t dim) {
  if (dim >= 16 && dim <= kMaxHeadDim && dim % 16 == 0) return {};
  return invalid_argument(
      text(field, "=", dim, " is not allowed: multiples of 16 from 16 to ", kMaxHeadDim));
}

Status check_pages(const PagesView& pages, const PageBoundsArgs& args) {
  KVCORE_RETURN_IF_ERROR(check_dim("head_dim_k", pages.head_dim_k));
  KVCORE_RETURN_IF_ERROR(check_range("layer", args.layer, 0, pages.num_layers - 1));
  if (args.page_ids.size() != args.valid_tokens.size())
    return invalid_argument(text("valid_tokens has ", args.valid_tokens.size(),
                                 " entries: expected one for each of ", args.page_ids.size(),
                                 " pages"));
  for (std::size_t i = 0; i < args.page_ids.size(); ++i) {
    const std::int32_t tokens = args.valid_tokens[i];
    KVCORE_RETURN_IF_ERROR(check_entry("valid_tokens", i, tokens, pages.page_size));
    if (tokens > 0)
      KVCORE_RETURN_IF_ERROR(check_entry("page_ids", i, args.page_ids[i], pages.num_pages - 1));
  }
  return {};
}

// int8 and fp8 have no bound per channel that is as close as their numbers.
void widen_decoded(const KernelTable& table, WidenBounds args) {
  alignas(64) float rows[kChunk * kMaxCodecDim];
  const std::int64_t row_bytes = args.dim * 4;
  const char* block = args.k;
  const Format format = args.format;
  const std::int32_t tokens = args.tokens;
  args.k = reinterpret_cast<const char*>(rows);
  args.format = Format::kF32;
  args.layout = LayoutId::kCanonical;
  args.row_bytes = row_bytes;
  for (std::int32_t first = 0; first < tokens; first += kChunk) {
    table.decode_block({block, format, Part::kK, args.page_size, args.dim, first, kChunk,
                        DType::kF32, reinterpret_cast<char*>(rows), row_bytes});
    args.tokens = std::min(kChunk, tokens - first);
    table.widen_bounds(args);
  }
}

void bound_page(const PagesView& pages, const KernelTable& table, std::int64_t page,
                std::int64_t layer, std::int32_t tokens, float* out) {
  const SliceRef slice = slice_of(pages, page, layer);
  for (std::int32_t h = 0; h < pages.num_kv_heads; ++h) {
    const HeadBlock& head = slice.layer->heads[h];
    WidenBounds args{};
    args.k = reinterpret_cast<const char*>(slice.data) + head.k_offset_bytes;
    args.format = head.k_format;
    args.layout = slice.cls->layout;
    args.row_bytes =
        head.k_row_bytes != 0 ? head.k_row_bytes : pages.head_dim_k * size_of(head.k_format);
    args.page_size = pages.page_size;
    args.tokens = tokens;
    args.dim = pages.head_dim_k;
    args.low = out + 2 * h * std::int64_t{args.dim};
    args.high = args.low + args.dim;
    if (holds_elements(args.format) || args.format == Format::kK4)
      table.widen_bounds(args);
    else
      widen_decoded(table, args);
  }
}

Status check_scores(const BoundScoresArgs& a) {
  KVCORE_RETURN_IF_ERROR(check_dim("head_dim", a.head_dim));
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  KVCORE_RETURN_IF_ERROR(check_range("rows", a.rows, 0, kMost));
  KVCORE_RETURN_IF_ERROR(check_range("pages", a.pages, 0, kMost));
  KVCORE_RETURN_IF_ERROR(check_range("num_kv_heads", a.num_kv_heads, 1, kMost));
  KVCORE_RETURN_IF_ERROR(check_range("num_q_heads", a.num_q_heads, 1, kMost));
  if (a.num_q_heads % a.num_kv_heads != 0)
    return invalid_argument(text("num_q_heads=", a.num_q_heads,
                                 " must be a multiple of num_kv_heads=", a.num_kv_heads));
  if (!(a.scale > 0) || a.scale > std::numeric_limits<float>::max())
    return invalid_argument(
        text("scale=", a.scale, " is out of range: allowed finite numbers above 0"));
  if (a.rows > 1 && a.q_stride < a.num_q_heads * a.head_dim)
    return invalid_argument(
        text("q has a row stride of ", a.q_stride,
             " elements: expected at least num_q_heads * head_dim = ", a.num_q_heads * a.head_dim));
  return {};
}

}  // namespace

Status page_bounds(const PagesView& pages, const PageBoundsArgs& args) {
  KVCORE_RETURN_IF_ERROR(check_pages(pages, args));
  KVCORE_ASSIGN_OR_RETURN(const KernelTable* table, kernel_table());
  const float inf = std::numeric_limits<float>::infinity();
  float* out = args.out;
  for (std::size_t i = 0; i < args.page_ids.size(); ++i) {
    const std::int64_t heads = 2 * std::int64_t{pages.num_kv_heads}, dim = pages.head_dim_k;
    for (std::int64_t part = 0; part < heads; ++part)
      std::fill_n(out + part * dim, dim, part % 2 == 0 ? inf : -inf);
    if (args.valid_tokens[i] > 0)
      bound_page(pages, *table, args.page_ids[i], args.layer, args.valid_tokens[i], out);
    out += heads * dim;
  }
  return {};
}

Status page_score_bounds(const BoundScoresArgs& args) {
  KVCORE_RETURN_IF_ERROR(check_scores(args));
  KVCORE_ASSIGN_OR_RETURN(const KernelTable* table, kernel_table());
  const std::int64_t width = args.num_q_heads * args.head_dim;
  std::vector<float> q(static_cast<std::size_t>(width));
  for (std::int64_t row = 0; row < args.rows; ++row) {
    convert_row(static_cast<const char*>(args.q) + row * args.q_stride * size_of(args.dtype),
                args.dtype, reinterpret_cast<char*>(q.data()), DType::kF32, width);
    table->score_bounds({q.data(), args.bounds, args.out + row * args.num_kv_heads * args.pages,
                         args.pages, static_cast<std::int32_t>(args.num_kv_heads),
                         static_cast<std::int32_t>(args.num_q_heads / args.num_kv_heads),
                         static_cast<std::int32_t>(args.head_dim), static_cast<float>(args.scale)});
  }
  return {};
}

}  // namespace kvcore::kernels
