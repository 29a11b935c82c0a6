// compact(): kept tokens of a sequence's pages, closed up in head pages.
#include <cstring>
#include <utility>

#include "base/dtype.h"
#include "base/text.h"
#include "compress/head_pages.h"
#include "compress/unpack.h"
#include "kernels/formats/formats.h"
#include "kernels/layout/layout.h"

namespace kvcore::compress {
namespace {

using pages::PageSpecOptions;
using pages::Pool;

DType dtype_of(Format f) {
  return f == Format::kF32 ? DType::kF32 : f == Format::kF16 ? DType::kF16 : DType::kBf16;
}

// K or V of one head of a page as canonical rows.
class PartRows {
 public:
  PartRows(const PageSpecOptions& o, Part part)
      : format_(o.format),
        layout_(o.layout),
        part_(part),
        tokens_(o.page_size),
        dim_(part == Part::kK ? o.head_dim_k : o.head_dim_v),
        row_bytes_(static_cast<std::size_t>(dim_ * size_of(dtype_of(format_)))),
        decoded_(static_cast<std::size_t>(tokens_) * row_bytes_) {}

  Status read(const std::byte* block, Format format) {
    rows_ = decoded_.data();
    if (format != format_) {
      const kernels::BlockSpec spec{format, part_, tokens_, dim_};
      KVCORE_ASSIGN_OR_RETURN(const std::int64_t bytes, kernels::block_bytes(spec));
      return kernels::decode_page_block(spec, {block, static_cast<std::size_t>(bytes)},
                                        decoded_.data(), dim_, dtype_of(format_));
    }
    const OpenBlock open{block, format, tokens_, dim_};
    if (layout_ == LayoutId::kCanonical)
      rows_ = block;
    else
      part_ == Part::kK ? unpack_k(open, decoded_.data()) : unpack_v(open, decoded_.data());
    return {};
  }
  void copy(std::int64_t token, std::byte* to) const {
    std::memcpy(to, rows_ + static_cast<std::size_t>(token) * row_bytes_, row_bytes_);
  }
  std::size_t row_bytes() const { return row_bytes_; }
  std::int64_t dim() const { return dim_; }

 private:
  const Format format_;
  const LayoutId layout_;
  const Part part_;
  const std::int64_t tokens_, dim_;
  const std::size_t row_bytes_;
  std::vector<std::byte> decoded_;
  const std::byte* rows_ = nullptr;
};

class Compactor {
 public:
  Compactor(const Pool& source, std::span<const std::int32_t> pages, const Pool& heads)
      : source_(source),
        pages_(pages),
        heads_(heads),
        k_(source.spec().options(), Part::kK),
        v_(source.spec().options(), Part::kV) {
    const auto tokens = static_cast<std::size_t>(heads.spec().options().page_size);
    staged_k_.resize(tokens * k_.row_bytes());
    staged_v_.resize(tokens * v_.row_bytes());
  }

  Status move(std::int32_t layer, std::int32_t head, std::span<const std::int32_t> kept,
              std::span<const std::int32_t> to) {
    const std::int32_t page_size = source_.spec().options().page_size;
    const auto room = static_cast<std::size_t>(heads_.spec().options().page_size);
    std::int32_t page = -1;
    std::size_t staged = 0, next = 0;
    for (const std::int32_t position : kept) {
      if (position / page_size != page) {
        page = position / page_size;
        KVCORE_RETURN_IF_ERROR(read(pages_[static_cast<std::size_t>(page)], layer, head));
      }
      k_.copy(position % page_size, staged_k_.data() + staged * k_.row_bytes());
      v_.copy(position % page_size, staged_v_.data() + staged * v_.row_bytes());
      if (++staged == room) flush(to[next++], std::exchange(staged, 0));
    }
    flush(staged == 0 ? 0 : to[next], staged);
    return {};
  }

 private:
  Status read(std::int32_t page, std::int32_t layer, std::int32_t head) {
    const PagesView& view = source_.view();
    const LayerView& at = view.classes[view.records[page].class_id].layers[layer];
    const std::byte* slice = source_.slice(page, layer);
    const HeadBlock& block = at.heads[head];
    KVCORE_RETURN_IF_ERROR(k_.read(slice + block.k_offset_bytes, block.k_format));
    return v_.read(slice + block.v_offset_bytes, block.v_format);
  }

  void flush(std::int32_t page, std::size_t tokens) {
    const auto rows = [](const std::vector<std::byte>& staged, const PartRows& part) {
      return kernels::TokenRows{reinterpret_cast<const char*>(staged.data()), part.dim()};
    };
    kernels::write_tokens(heads_.view(), page, 0, 0, static_cast<std::int64_t>(tokens),
                          rows(staged_k_, k_), rows(staged_v_, v_),
                          dtype_of(heads_.spec().options().format));
  }

  const Pool& source_;
  const std::span<const std::int32_t> pages_;
  const Pool& heads_;
  PartRows k_, v_;
  std::vector<std::byte> staged_k_, staged_v_;
};

Status check_source(const Pool& source, std::span<const std::int32_t> pages,
                    std::int64_t num_tokens, const Pool& heads) {
  const PageSpecOptions &o = source.spec().options(), &h = heads.spec().options();
  if (o.head_dim_k != h.head_dim_k || o.head_dim_v != h.head_dim_v || o.format != h.format)
    return invalid_argument(text("head pages are ", heads.spec().describe(),
                                 ": allowed head_dims and format of ", source.spec().describe()));
  const std::int64_t most = static_cast<std::int64_t>(pages.size()) * o.page_size;
  if (num_tokens < 0 || num_tokens > most)
    return invalid_argument(text("num_tokens=", num_tokens, " is out of range: allowed 0 to ", most,
                                 " (", pages.size(), " pages of ", o.page_size, ")"));
  for (const std::int32_t page : pages) {
    KVCORE_ASSIGN_OR_RETURN(const pages::PageRefs refs, source.refs(page));
    if (refs.owner == 0)
      return invalid_argument(text("page=", page, " has no owner: only held pages can be read"));
  }
  return {};
}

Status check_kept(const KeptTokens& kept, std::size_t heads, std::int64_t num_tokens) {
  const auto total = static_cast<std::int64_t>(kept.positions.size());
  if (kept.offsets.size() != heads + 1)
    return invalid_argument(text("offsets has ", kept.offsets.size(),
                                 " entries: allowed num_layers * num_kv_heads + 1 = ", heads + 1));
  if (kept.offsets.front() != 0 || kept.offsets.back() != total)
    return invalid_argument(text("offsets go from ", kept.offsets.front(), " to ",
                                 kept.offsets.back(), ": allowed 0 to ", total, " (positions)"));
  for (std::size_t i = 0; i < heads; ++i) {
    if (kept.offsets[i + 1] < kept.offsets[i] || kept.offsets[i + 1] > total)
      return invalid_argument(text("offsets[", i + 1, "]=", kept.offsets[i + 1],
                                   " is out of range: allowed ", kept.offsets[i], " to ", total));
    std::int64_t least = 0;
    for (std::int64_t j = kept.offsets[i]; j < kept.offsets[i + 1]; ++j) {
      const std::int64_t position = kept.positions[static_cast<std::size_t>(j)];
      if (position < least || position >= num_tokens)
        return invalid_argument(text("position ", position, " (entry ", j - kept.offsets[i],
                                     ") of head ", i, " is out of order or range: allowed ", least,
                                     " to ", num_tokens - 1));
      least = position + 1;
    }
  }
  return {};
}

}  // namespace

Result<std::shared_ptr<HeadPages>> compact(const Pool& source, std::span<const std::int32_t> pages,
                                           std::int64_t num_tokens, const KeptTokens& kept,
                                           std::shared_ptr<Pool> head_pool) {
  const PageSpecOptions& o = source.spec().options();
  KVCORE_ASSIGN_OR_RETURN(std::shared_ptr<HeadPages> heads,
                          HeadPages::make(std::move(head_pool), o.num_layers, o.num_kv_heads));
  KVCORE_RETURN_IF_ERROR(check_source(source, pages, num_tokens, *heads->pool()));
  KVCORE_RETURN_IF_ERROR(check_kept(kept, heads->num_heads(), num_tokens));
  std::vector<std::int64_t> counts(heads->num_heads());
  for (std::size_t i = 0; i < counts.size(); ++i) counts[i] = kept.offsets[i + 1] - kept.offsets[i];
  KVCORE_RETURN_IF_ERROR(heads->grow(counts));
  Compactor compactor(source, pages, *heads->pool());
  for (std::size_t i = 0; i < counts.size(); ++i) {
    const auto head = static_cast<std::int32_t>(i);
    KVCORE_RETURN_IF_ERROR(
        compactor.move(head / o.num_kv_heads, head % o.num_kv_heads,
                       kept.positions.subspan(static_cast<std::size_t>(kept.offsets[i]),
                                              static_cast<std::size_t>(counts[i])),
                       heads->pages(i)));
  }
  return heads;
}

}  // namespace kvcore::compress
