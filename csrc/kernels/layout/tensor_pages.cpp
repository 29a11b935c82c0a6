#include "kernels/layout/tensor_pages.h"

#include <limits>

#include "base/check.h"
#include "base/text.h"

namespace kvcore::kernels {
namespace {

Status check_part(const char* name, const TensorPart& part, std::int64_t num_layers,
                  std::int64_t row_bytes) {
  if (static_cast<std::int64_t>(part.layers.size()) != num_layers)
    return invalid_argument(
        text(name, " has ", part.layers.size(), " layers: expected ", num_layers));
  for (const std::uintptr_t address : part.layers)
    if (address == 0) return invalid_argument(text(name, " has a null pointer"));
  if (part.token_bytes < row_bytes || part.head_bytes < row_bytes || part.block_bytes < row_bytes)
    return invalid_argument(text(name, " has strides of ", part.block_bytes, ", ", part.head_bytes,
                                 " and ", part.token_bytes,
                                 " bytes (block, head, token): expected at least ", row_bytes));
  return {};
}

}  // namespace

Result<std::unique_ptr<TensorPages>> TensorPages::make(TensorPart k, TensorPart v,
                                                       std::int64_t num_blocks,
                                                       std::int64_t num_kv_heads,
                                                       std::int64_t page_size, Format format) {
  const auto num_layers = static_cast<std::int64_t>(k.layers.size());
  constexpr std::int64_t kMax = std::numeric_limits<std::int32_t>::max();
  if (num_layers < 1) return invalid_argument("k has no layers: expected 1 or more");
  KVCORE_RETURN_IF_ERROR(check_range("num_blocks", num_blocks, 1, kMax));
  KVCORE_RETURN_IF_ERROR(check_range("num_kv_heads", num_kv_heads, 1, 4096));
  const std::int64_t bytes = format == Format::kF32 ? 4 : 2;
  KVCORE_RETURN_IF_ERROR(check_part("k", k, num_layers, k.dim * bytes));
  KVCORE_RETURN_IF_ERROR(check_part("v", v, num_layers, v.dim * bytes));
  if (k.block_bytes != v.block_bytes)
    return Error{ErrorCode::kUnsupported,
                 text("k and v have block strides of ", k.block_bytes, " and ", v.block_bytes,
                      " bytes: expected the same")};
  std::unique_ptr<TensorPages> made(new TensorPages);
  for (std::int64_t b = 0; b < num_blocks; ++b) made->records_.push_back({b * k.block_bytes, 0, 0});
  const std::uintptr_t base = k.layers[0];
  for (std::size_t i = 0; i < k.layers.size(); ++i)
    for (std::int64_t h = 0; h < num_kv_heads; ++h)
      made->heads_.push_back({static_cast<std::int64_t>(k.layers[i] - base) + h * k.head_bytes,
                              static_cast<std::int64_t>(v.layers[i] - base) + h * v.head_bytes,
                              format, format, k.token_bytes, v.token_bytes});
  for (std::int64_t i = 0; i < num_layers; ++i)
    made->layers_.push_back({0, 0, made->heads_.data() + i * num_kv_heads});
  made->class_ = {made->layers_.data(), LayoutId::kCanonical, false};
  made->view_ = {reinterpret_cast<std::byte*>(base),
                 made->records_.data(),
                 &made->class_,
                 num_blocks,
                 1,
                 static_cast<std::int32_t>(num_layers),
                 static_cast<std::int32_t>(num_kv_heads),
                 static_cast<std::int32_t>(k.dim),
                 static_cast<std::int32_t>(v.dim),
                 static_cast<std::int32_t>(page_size)};
  return made;
}

}  // namespace kvcore::kernels
