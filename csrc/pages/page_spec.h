// PageSpec: the geometry of one layer group's pages; every byte offset follows from it.
// A frame = extent_pages consecutive pages of one sequence, layer-major inside:
//   frame_bytes  = align(num_layers * extent_pages * slice_bytes, align_bytes)
//   slice(p, l)  = frame + l * layer_stride_bytes + p * slice_bytes,  layer_stride = extent_pages *
//   slice_bytes
// Invariants: immutable after make(); all sizes int64 bytes. Thread rules: a plain value.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "base/page_layout.h"
#include "base/result.h"

namespace kvcore::pages {

constexpr std::int32_t kMaxExtentPages = 16;

// "bf16", "k4", ...: one table for messages, bindings and tests.
const char* name_of(Format format) noexcept;

struct PageSpecOptions {
  std::int32_t num_layers = 0;
  std::int32_t num_kv_heads = 0;
  std::int32_t head_dim_k = 0;
  std::int32_t head_dim_v = 0;
  std::int32_t page_size = 64;  // tokens; 16, 32, 64 or 128
  std::int32_t extent_pages =
      0;  // 0 = smallest power of two whose run per layer is >= 128 KiB, at most 16
  Format format = Format::kBf16;
  LayoutId layout = LayoutId::kPacked;
  // Of frames and of compressed runs: 4096, what files and peers want, or 64 for pages that never
  // leave the process and are so small that rounding up would cost a part of them.
  std::int32_t align_bytes = static_cast<std::int32_t>(kFrameAlignBytes);
  // Multi-head latent attention: V is the first head_dim_v dims of K and has no bytes of its own.
  // One KV head, canonical layout, no codecs.
  bool latent = false;
};

class PageSpec {
 public:
  static Result<PageSpec> make(const PageSpecOptions& options);

  const PageSpecOptions& options() const noexcept { return o_; }
  std::int64_t head_block_bytes() const noexcept;  // K and V of one head of one slice
  std::int64_t k_block_bytes() const noexcept;
  std::int64_t v_block_bytes() const noexcept;  // of latent pages as well, where they lie in K
  std::int64_t slice_bytes() const noexcept;         // header + all heads, 64 B aligned
  std::int64_t layer_stride_bytes() const noexcept;  // extent_pages * slice_bytes
  std::int64_t frame_bytes() const noexcept;
  std::int64_t page_bytes() const noexcept { return slice_bytes() * o_.num_layers; }
  HeadBlock head_block(std::int32_t head) const noexcept;
  // Tokens of a prompt of n that may come from a cache: whole pages, at least one token left to
  // compute.
  std::int64_t usable_prefix(std::int64_t num_tokens) const noexcept;
  // Canonical text of every field, e.g. for handshakes and error messages.
  std::string describe() const;

 private:
  explicit PageSpec(const PageSpecOptions& options) : o_(options) {}
  PageSpecOptions o_;
};

// floor((n - 1) / page) * page, 0 for n <= 0: the one rule for all users of prefixes.
constexpr std::int64_t usable_prefix(std::int64_t num_tokens, std::int64_t page_size) noexcept {
  return num_tokens <= 0 ? 0 : (num_tokens - 1) / page_size * page_size;
}

}  // namespace kvcore::pages
