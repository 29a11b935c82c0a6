#include "compress/seal.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/dtype.h"
#include "base/text.h"
#include "base/xxh3.h"
#include "compress/unpack.h"
#include "kernels/formats/formats.h"

namespace kvcore::compress {
namespace {

using pages::Pool;
using pages::SealJob;

constexpr std::size_t kRowAlign = 64;

DType dtype_of(Format f) {
  return f == Format::kF32 ? DType::kF32 : f == Format::kF16 ? DType::kF16 : DType::kBf16;
}

// One page's way from open slices to slices of its new run.
class PageEncoder {
 public:
  explicit PageEncoder(Pool& pool) : pool_(pool), o_(pool.spec().options()) {
    const std::int64_t dim = std::max(o_.head_dim_k, o_.head_dim_v);
    rows_.resize(static_cast<std::size_t>(o_.page_size * dim * 4) + kRowAlign);
  }

  Status encode(const SealJob& job) {
    for (std::int32_t layer = 0; layer < o_.num_layers; ++layer)
      KVCORE_RETURN_IF_ERROR(encode_slice(job, layer));
    return {};
  }

 private:
  Status encode_slice(const SealJob& job, std::int32_t layer) {
    const PagesView& view = pool_.view();
    const ClassView& to_class = view.classes[job.class_id];
    const LayerView& to = to_class.layers[layer];
    const std::byte* open = pool_.slice(job.page, layer);
    const HeadBlock* open_heads = view.classes[view.records[job.page].class_id].layers[layer].heads;
    std::byte* slice = view.arena + job.offset_bytes + to.run_bytes;
    std::int64_t end = kSliceHeaderBytes;
    for (std::int32_t head = 0; head < o_.num_kv_heads; ++head) {
      const HeadBlock& from = open_heads[head];
      const HeadBlock& block = to.heads[head];
      for (const Part part : {Part::kK, Part::kV}) {
        const bool k = part == Part::kK;
        const std::int64_t offset = k ? block.k_offset_bytes : block.v_offset_bytes;
        std::memset(slice + end, 0, static_cast<std::size_t>(offset - end));
        const auto bytes =
            encode_block(part, k ? block.k_format : block.v_format,
                         open + (k ? from.k_offset_bytes : from.v_offset_bytes), slice + offset);
        if (!bytes)
          return Error{bytes.error().code, text("page=", job.page, " layer=", layer, " head=", head,
                                                k ? " K: " : " V: ", bytes.error().message)};
        end = offset + *bytes;
      }
    }
    std::memset(slice + end, 0, static_cast<std::size_t>(to.slice_bytes - end));
    write_header(job, layer, to, to_class.layout, slice);
    return {};
  }

  // Bytes written. A block that keeps the page's own format is copied.
  Result<std::int64_t> encode_block(Part part, Format format, const std::byte* from,
                                    std::byte* to) {
    const std::int64_t dim = part == Part::kK ? o_.head_dim_k : o_.head_dim_v;
    const DType dtype = dtype_of(o_.format);
    if (format == o_.format) {
      const std::int64_t bytes = o_.page_size * dim * size_of(dtype);
      std::memcpy(to, from, static_cast<std::size_t>(bytes));
      return bytes;
    }
    const OpenBlock block{from, o_.format, o_.page_size, dim};
    std::byte* rows = rows_.data();
    rows += (kRowAlign - reinterpret_cast<std::uintptr_t>(rows) % kRowAlign) % kRowAlign;
    part == Part::kK ? unpack_k(block, rows) : unpack_v(block, rows);
    const kernels::BlockSpec spec{format, part, o_.page_size, dim};
    KVCORE_ASSIGN_OR_RETURN(const std::int64_t bytes, kernels::block_bytes(spec));
    KVCORE_RETURN_IF_ERROR(
        kernels::encode_page_block(spec, rows, dim, dtype, {to, static_cast<std::size_t>(bytes)}));
    return bytes;
  }

  void write_header(const SealJob& job, std::int32_t layer, const LayerView& to, LayoutId layout,
                    std::byte* slice) const {
    SliceHeader header{};
    header.magic = kSliceMagic;
    header.class_id = static_cast<std::uint32_t>(job.class_number);
    header.layer = static_cast<std::uint16_t>(layer);
    header.valid_tokens = static_cast<std::uint16_t>(o_.page_size);
    header.format = to.heads[0].k_format;
    header.layout = layout;
    std::memcpy(slice, &header, sizeof header);
    const std::uint64_t sum = xxh3_64(slice, static_cast<std::size_t>(to.slice_bytes));
    header.checksum = sum == 0 ? 1 : sum;
    std::memcpy(slice, &header, sizeof header);
  }

  Pool& pool_;
  const pages::PageSpecOptions& o_;
  std::vector<std::byte> rows_;
};

Status check(const Pool& pool, std::span<const std::int32_t> pages) {
  std::vector<std::int32_t> sorted(pages.begin(), pages.end());
  std::sort(sorted.begin(), sorted.end());
  const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
  if (twice != sorted.end()) return invalid_argument(text("page=", *twice, " is named twice"));
  for (const std::int32_t page : pages) {
    KVCORE_ASSIGN_OR_RETURN(const pages::PageRefs refs, pool.refs(page));
    KVCORE_ASSIGN_OR_RETURN(const pages::PagePlace place, pool.place(page));
    if (refs.owner == 0)
      return invalid_argument(text("page=", page, " has no owner: only held pages can be sealed"));
    if (place.class_number != 0)
      return invalid_argument(text("page=", page, " is of class ", place.class_number,
                                   " already: only open pages can be sealed"));
  }
  return {};
}

}  // namespace

Status seal_pages(Pool& pool, std::span<const std::int32_t> pages, std::int32_t class_number) {
  KVCORE_RETURN_IF_ERROR(check(pool, pages));
  PageEncoder encoder(pool);
  for (const std::int32_t page : pages) {
    KVCORE_ASSIGN_OR_RETURN(const SealJob job, pool.begin_seal(page, class_number));
    const Status encoded = encoder.encode(job);
    const Status ended = pool.end_seal(job, encoded.ok());
    KVCORE_RETURN_IF_ERROR(encoded);
    KVCORE_RETURN_IF_ERROR(ended);
  }
  return {};
}

}  // namespace kvcore::compress
