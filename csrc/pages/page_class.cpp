#include "pages/page_class.h"

#include <algorithm>

#include "base/block_arrays.h"
#include "base/text.h"

namespace kvcore::pages {
namespace {

std::int64_t align_up(std::int64_t n, std::int64_t to) { return (n + to - 1) / to * to; }

std::int64_t block_bytes(const PageSpecOptions& o, Part part, Format f) {
  const std::int64_t dim = part == Part::kK ? o.head_dim_k : o.head_dim_v;
  if (f == o.format) return o.page_size * dim * (f == Format::kF32 ? 4 : 2);
  return block_arrays(f, part, o.page_size, dim).bytes;
}

Status check(const PageSpecOptions& o, std::size_t i, Part part, Format f) {
  if (f == o.format) return {};
  const auto heads = static_cast<std::size_t>(o.num_kv_heads);
  const auto refuse = [&](auto... why) {
    return invalid_argument(text("format '", name_of(f), "' of layer ", i / heads, ", KV head ",
                                 i % heads, ", ", part == Part::kK ? "K" : "V", ": ", why...));
  };
  const bool both = f == Format::kInt8 || f == Format::kFp8;
  if (!both && !(part == Part::kK ? f == Format::kK4 : f == Format::kV4 || f == Format::kV3))
    return refuse("allowed ", name_of(o.format), ", int8, fp8, ", part == Part::kK ? "k4" : "v4, v3");
  if (o.latent)
    return Error{ErrorCode::kUnsupported,
                 text("format '", name_of(f), "': latent pages hold elements only; allowed ",
                      name_of(o.format))};
  if (o.layout != LayoutId::kPacked)
    return refuse("pages of layout canonical hold elements only; allowed ", name_of(o.format));
  const std::int32_t dim = part == Part::kK ? o.head_dim_k : o.head_dim_v;
  if (dim > kMaxCodecDim)
    return refuse("head_dim ", dim, " is out of range: allowed up to ", kMaxCodecDim);
  return {};
}

}  // namespace

Result<PageClass> PageClass::make(const PageSpec& spec, std::span<const HeadFormats> formats) {
  const PageSpecOptions& o = spec.options();
  const std::int64_t want = std::int64_t{o.num_layers} * o.num_kv_heads;
  if (static_cast<std::int64_t>(formats.size()) != want)
    return invalid_argument(text("formats has ", formats.size(), " entries: allowed ", want, " (",
                                 o.num_layers, " layers of ", o.num_kv_heads, " KV heads)"));
  for (std::size_t i = 0; i < formats.size(); ++i) {
    KVCORE_RETURN_IF_ERROR(check(o, i, Part::kK, formats[i].k));
    KVCORE_RETURN_IF_ERROR(check(o, i, Part::kV, formats[i].v));
  }
  return PageClass(spec, formats);
}

PageClass PageClass::open(const PageSpec& spec) {
  const PageSpecOptions& o = spec.options();
  const std::vector<HeadFormats> formats(
      static_cast<std::size_t>(o.num_layers) * static_cast<std::size_t>(o.num_kv_heads),
      {o.format, o.format});
  return PageClass(spec, formats);
}

PageClass::PageClass(const PageSpec& spec, std::span<const HeadFormats> formats)
    : spec_(spec), formats_(formats.begin(), formats.end()) {
  const PageSpecOptions& o = spec_.options();
  std::int64_t end = 0;
  for (std::size_t i = 0; i < formats_.size();) {
    std::int64_t at = kSliceHeaderBytes;
    for (std::int32_t head = 0; head < o.num_kv_heads; ++head, ++i) {
      if (o.latent) {  // one head; nothing but its own format
        heads_.push_back(spec_.head_block(head));
        at += spec_.head_block_bytes();
        continue;
      }
      const std::int64_t v = at + block_bytes(o, Part::kK, formats_[i].k);
      heads_.push_back({at, v, formats_[i].k, formats_[i].v});
      at = v + block_bytes(o, Part::kV, formats_[i].v);
    }
    slice_ends_.push_back(end += align_up(at, 64));
  }
}

bool PageClass::is_open() const noexcept {
  const Format own = spec_.options().format;
  return std::all_of(formats_.begin(), formats_.end(),
                     [own](const HeadFormats& f) { return f.k == own && f.v == own; });
}

std::int64_t PageClass::slice_bytes(std::int32_t layer) const noexcept {
  const auto i = static_cast<std::size_t>(layer);
  return slice_ends_[i] - (i == 0 ? 0 : slice_ends_[i - 1]);
}

std::int64_t PageClass::page_bytes() const noexcept { return slice_ends_.back(); }

std::int64_t PageClass::run_bytes(std::int32_t num_pages) const noexcept {
  return align_up(num_pages * page_bytes(), spec_.options().align_bytes);
}

std::vector<LayerView> PageClass::layers(std::int32_t num_pages) const {
  const auto heads = static_cast<std::size_t>(spec_.options().num_kv_heads);
  std::vector<LayerView> out;
  for (std::size_t i = 0; i < slice_ends_.size(); ++i) {
    const std::int64_t bytes = slice_bytes(static_cast<std::int32_t>(i));
    out.push_back({num_pages * (slice_ends_[i] - bytes), bytes, heads_.data() + i * heads});
  }
  return out;
}

std::string PageClass::describe() const {
  std::string out = spec_.describe() + " formats=";
  const auto heads = static_cast<std::size_t>(spec_.options().num_kv_heads);
  for (std::size_t i = 0; i < formats_.size(); ++i) {
    if (i != 0) out += i % heads == 0 ? ";" : ",";
    out += text(name_of(formats_[i].k), "/", name_of(formats_[i].v));
  }
  return out;
}

Digest32 PageClass::digest() const {
  const std::string all = describe();
  return blake2b_256(std::as_bytes(std::span(all))).value();  // without a key it cannot fail
}

}  // namespace kvcore::pages
