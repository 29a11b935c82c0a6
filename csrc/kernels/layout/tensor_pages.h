// Pages in the KV tensors of another engine: every block of a tensor is a page, read and written in
// place by the same kernels.
// K and V of a layer are [num_blocks][block][heads][dim] or [num_blocks][heads][block][dim], halves of
// one tensor or two tensors; only the last dimension has to be dense. Thread rules: immutable after
// make(); the tensors must outlive it.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/page_layout.h"
#include "base/result.h"

namespace kvcore::kernels {

struct TensorPart {                    // K, or V
  std::vector<std::uintptr_t> layers;  // address of block 0 of each layer
  std::int64_t block_bytes, head_bytes, token_bytes;  // strides
  std::int64_t dim;
};

class TensorPages {
 public:
  // page_size: tokens of a block; 16, 32, 64 or 128. Both parts have the same block stride.
  static Result<std::unique_ptr<TensorPages>> make(TensorPart k, TensorPart v,
                                                   std::int64_t num_blocks,
                                                   std::int64_t num_kv_heads,
                                                   std::int64_t page_size, Format format);
  TensorPages(const TensorPages&) = delete;
  TensorPages& operator=(const TensorPages&) = delete;

  const PagesView& view() const noexcept { return view_; }

 private:
  TensorPages() = default;

  std::vector<PageRecord> records_;
  std::vector<HeadBlock> heads_;
  std::vector<LayerView> layers_;
  ClassView class_{};
  PagesView view_{};
};

}  // namespace kvcore::kernels
