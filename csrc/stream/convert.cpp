#include "stream/convert.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/text.h"
#include "compress/unpack.h"
#include "kernels/formats/formats.h"
#include "kernels/layout/convert.h"
#include "kernels/layout/head_layout.h"

namespace kvcore::stream {
namespace {

constexpr std::size_t kRowAlign = 64;

std::byte* aligned(std::vector<std::byte>& rows) {
  const auto at = reinterpret_cast<std::uintptr_t>(rows.data());
  return rows.data() + (kRowAlign - at % kRowAlign) % kRowAlign;
}

std::vector<std::byte> room_for(const pages::PageSpecOptions& o, std::int32_t page_size) {
  const std::int64_t dim = std::max(o.head_dim_k, o.head_dim_v);
  return std::vector<std::byte>(static_cast<std::size_t>(page_size * dim * 4) + kRowAlign);
}

float value_at(const std::byte* rows, DType type, std::int64_t i) {
  float out = 0;
  kernels::convert_row(reinterpret_cast<const char*>(rows) + i * size_of(type), type,
                       reinterpret_cast<char*>(&out), DType::kF32, 1);
  return out;
}

// The first value that was finite and no longer is, or -1.
std::int64_t first_overflow(const std::byte* from, DType from_type, const std::byte* to,
                            DType to_type, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    if (!std::isfinite(value_at(to, to_type, i)) && std::isfinite(value_at(from, from_type, i)))
      return i;
  }
  return -1;
}

}  // namespace

Converter::Converter(const pages::PageSpec& from, std::int32_t from_head, const pages::PageSpec& to,
                     std::int32_t to_head, std::int32_t num_heads)
    : from_(from),
      to_(to),
      from_head_(from_head),
      to_head_(to_head),
      num_heads_(num_heads),
      from_rows_(room_for(from.options(), to.options().page_size)),
      to_rows_(room_for(to.options(), to.options().page_size)) {}

std::int64_t Converter::dim_of(Part part) const noexcept {
  const pages::PageSpecOptions& o = from_.options();
  return part == Part::kK ? o.head_dim_k : o.head_dim_v;
}

Status Converter::convert(const SourceSlices& source, const HeadBlock* target,
                          std::span<std::byte> out) {
  const std::int64_t origin = target[to_head_].k_offset_bytes;
  for (std::int32_t i = 0; i < num_heads_; ++i) {
    const HeadBlock from = from_.head_block(from_head_ + i);
    const HeadBlock& to = target[to_head_ + i];
    const Blocks k{Part::kK, from.k_offset_bytes, to.k_format,
                   out.data() + (to.k_offset_bytes - origin)};
    const Blocks v{Part::kV, from.v_offset_bytes, to.v_format,
                   out.data() + (to.v_offset_bytes - origin)};
    const Status k_done = convert_blocks(source, k);
    if (!k_done)
      return Error{k_done.error().code,
                   text("head=", to_head_ + i, " K: ", k_done.error().message)};
    if (from_.options().latent) continue;  // V is a part of K
    const Status v_done = convert_blocks(source, v);
    if (!v_done)
      return Error{v_done.error().code,
                   text("head=", to_head_ + i, " V: ", v_done.error().message)};
  }
  return {};
}

Status Converter::convert_blocks(const SourceSlices& source, const Blocks& blocks) {
  const DType from_type = kernels::dtype_of(from_.options().format);
  const DType to_type = kernels::dtype_of(to_.options().format);
  const std::int64_t dim = dim_of(blocks.part), page = to_.options().page_size;
  std::byte* rows = aligned(from_rows_);
  read_rows(source, blocks, rows);
  const auto used = static_cast<std::size_t>(source.num_tokens * dim * size_of(from_type));
  std::memset(rows + used, 0, static_cast<std::size_t>(page * dim * size_of(from_type)) - used);
  if (from_type == to_type) return write_block(blocks, rows);
  std::byte* converted = aligned(to_rows_);
  kernels::convert_row(reinterpret_cast<const char*>(rows), from_type,
                       reinterpret_cast<char*>(converted), to_type, page * dim);
  const std::int64_t lost = first_overflow(rows, from_type, converted, to_type, page * dim);
  if (lost >= 0) {
    return invalid_argument(text("token=", lost / dim, " dim=", lost % dim, ": ",
                                 value_at(rows, from_type, lost), " is out of range of format ",
                                 pages::name_of(to_.options().format)));
  }
  return write_block(blocks, converted);
}

void Converter::read_rows(const SourceSlices& source, const Blocks& blocks, std::byte* rows) const {
  const pages::PageSpecOptions& o = from_.options();
  const std::int64_t dim = dim_of(blocks.part);
  const std::int64_t row_bytes = dim * kernels::size_of(o.format);
  const bool whole_page = source.first_token == 0 && source.num_tokens == o.page_size;
  if (whole_page && o.layout == LayoutId::kPacked) {
    const compress::OpenBlock block{source.slices[0] + blocks.from_offset, o.format, o.page_size,
                                    dim};
    blocks.part == Part::kK ? compress::unpack_k(block, rows) : compress::unpack_v(block, rows);
    return;
  }
  const kernels::BlockShape shape{o.page_size, dim, o.format, o.layout};
  std::int64_t first = source.first_token, left = source.num_tokens;
  for (const std::byte* slice : source.slices) {
    const std::int64_t count = std::min<std::int64_t>(left, o.page_size - first);
    kernels::move_rows<true>(blocks.part, shape, slice + blocks.from_offset, first, count,
                             kernels::Rows<std::byte>{rows, row_bytes});
    rows += count * row_bytes;
    left -= count;
    first = 0;
  }
}

Status Converter::write_block(const Blocks& blocks, const std::byte* rows) const {
  const pages::PageSpecOptions& o = to_.options();
  const std::int64_t dim = dim_of(blocks.part);
  const DType type = kernels::dtype_of(o.format);
  if (blocks.to_format == o.format) {
    const kernels::BlockShape shape{o.page_size, dim, o.format, o.layout};
    kernels::move_rows<false>(blocks.part, shape, blocks.to, 0, o.page_size,
                              kernels::Rows<const std::byte>{rows, dim * size_of(type)});
    return {};
  }
  const kernels::BlockSpec spec{blocks.to_format, blocks.part, o.page_size, dim};
  KVCORE_ASSIGN_OR_RETURN(const std::int64_t bytes, kernels::block_bytes(spec));
  return kernels::encode_page_block(spec, rows, dim, type,
                                    {blocks.to, static_cast<std::size_t>(bytes)});
}

}  // namespace kvcore::stream
