#include "pages/page_spec.h"

#include <algorithm>
#include <limits>

#include "base/block_arrays.h"
#include "base/check.h"
#include "base/text.h"

namespace kvcore::pages {
namespace {

constexpr std::int64_t kWantedRunBytes = 128 << 10;

std::int64_t align_up(std::int64_t n, std::int64_t to) { return (n + to - 1) / to * to; }

std::int64_t element_bytes(Format f) { return f == Format::kF32 ? 4 : 2; }

Status check_head_dim(const char* field, std::int32_t value) {
  KVCORE_RETURN_IF_ERROR(check_range(field, value, 16, kMaxHeadDim));
  if (value % 16 != 0)
    return invalid_argument(text(field, "=", value, " must be a multiple of 16"));
  return {};
}

Status check_latent(const PageSpecOptions& o) {
  if (!o.latent) return {};
  if (o.num_kv_heads != 1)
    return invalid_argument(text("num_kv_heads=", o.num_kv_heads, ": latent pages have one"));
  if (o.head_dim_v > o.head_dim_k)
    return invalid_argument(text("head_dim_v=", o.head_dim_v, " of latent pages is out of range: ",
                                 "allowed up to head_dim_k=", o.head_dim_k));
  if (o.layout != LayoutId::kCanonical)
    return invalid_argument("layout='packed': latent pages are canonical");
  return {};
}

}  // namespace

const char* name_of(Format format) noexcept {
  constexpr const char* kNames[] = {"f32", "f16", "bf16", "fp8", "int8", "k4", "v4", "v3"};
  return kNames[static_cast<std::size_t>(format)];
}

Result<PageSpec> PageSpec::make(const PageSpecOptions& options) {
  PageSpecOptions o = options;
  KVCORE_RETURN_IF_ERROR(check_range("num_layers", o.num_layers, 1, 65535));
  KVCORE_RETURN_IF_ERROR(check_range("num_kv_heads", o.num_kv_heads, 1, 4096));
  KVCORE_RETURN_IF_ERROR(check_head_dim("head_dim_k", o.head_dim_k));
  KVCORE_RETURN_IF_ERROR(check_head_dim("head_dim_v", o.head_dim_v));
  if (o.page_size != 16 && o.page_size != 32 && o.page_size != 64 && o.page_size != 128)
    return invalid_argument(text("page_size=", o.page_size, " is not allowed: 16, 32, 64 or 128"));
  if (o.align_bytes != kFrameAlignBytes && o.align_bytes != kSliceHeaderBytes)
    return invalid_argument(text("align_bytes=", o.align_bytes, " is not allowed: 64 or 4096"));
  KVCORE_RETURN_IF_ERROR(check_latent(o));
  KVCORE_RETURN_IF_ERROR(check_range("extent_pages", o.extent_pages, 0, kMaxExtentPages));
  if (o.extent_pages == 0) {
    const std::int64_t slice = PageSpec(o).slice_bytes();
    o.extent_pages = 1;
    while (o.extent_pages < kMaxExtentPages && o.extent_pages * slice < kWantedRunBytes)
      o.extent_pages *= 2;
  }
  return PageSpec(o);
}

std::int64_t PageSpec::k_block_bytes() const noexcept {
  return std::int64_t{o_.page_size} * o_.head_dim_k * element_bytes(o_.format);
}
std::int64_t PageSpec::v_block_bytes() const noexcept {
  return std::int64_t{o_.page_size} * o_.head_dim_v * element_bytes(o_.format);
}
std::int64_t PageSpec::head_block_bytes() const noexcept {
  return k_block_bytes() + (o_.latent ? 0 : v_block_bytes());
}
std::int64_t PageSpec::slice_bytes() const noexcept {
  return align_up(kSliceHeaderBytes + o_.num_kv_heads * head_block_bytes(), 64);
}
std::int64_t PageSpec::layer_stride_bytes() const noexcept {
  return o_.extent_pages * slice_bytes();
}
std::int64_t PageSpec::frame_bytes() const noexcept {
  return align_up(o_.num_layers * layer_stride_bytes(), o_.align_bytes);
}
HeadBlock PageSpec::head_block(std::int32_t head) const noexcept {
  const std::int64_t k = kSliceHeaderBytes + head * head_block_bytes();
  if (o_.latent) return {k, k, o_.format, o_.format, 0, o_.head_dim_k * element_bytes(o_.format)};
  return {k, k + k_block_bytes(), o_.format, o_.format};
}
std::int64_t PageSpec::usable_prefix(std::int64_t num_tokens) const noexcept {
  return pages::usable_prefix(num_tokens, o_.page_size);
}

std::string PageSpec::describe() const {
  return text("layers=", o_.num_layers, " kv_heads=", o_.num_kv_heads,
              " head_dim_k=", o_.head_dim_k, " head_dim_v=", o_.head_dim_v,
              " page_size=", o_.page_size, " extent_pages=", o_.extent_pages,
              " format=", name_of(o_.format),
              " layout=", o_.layout == LayoutId::kPacked ? "packed" : "canonical",
              o_.align_bytes == kFrameAlignBytes ? "" : text(" align_bytes=", o_.align_bytes),
              o_.latent ? " latent" : "");
}

}  // namespace kvcore::pages
