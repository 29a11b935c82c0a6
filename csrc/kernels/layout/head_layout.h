// Where the values of one head's K or V block lie (base/page_layout.h), and moving rows in and out.
// Rows are in the page's own element type; dtype conversion is the caller's.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "base/page_layout.h"
#include "kernels/layout/convert.h"

namespace kvcore::kernels {

struct BlockShape {
  std::int64_t tokens;  // of the whole block: the page size
  std::int64_t dim;
  Format format;
  LayoutId layout;
  std::int64_t row_bytes = 0;  // canonical: between tokens; 0: dim values
};

// A block of rows: token i at data + i * stride_bytes.
template <class Char>
struct Rows {
  Char* data;
  std::int64_t stride_bytes;
};

namespace detail {

// Moves values between rows[i][d] and block[d * pitch + i]; kOut: out of the block.
template <class T, bool kOut, class RowsT, class BlockT>
void transpose(RowsT rows, BlockT* block, std::int64_t pitch, std::int64_t count,
               std::int64_t dims) {
  const auto cell = [&](std::int64_t d, std::int64_t i) {
    auto* in_row = rows.data + i * rows.stride_bytes + d * static_cast<std::int64_t>(sizeof(T));
    auto* in_block = block + (d * pitch + i) * static_cast<std::int64_t>(sizeof(T));
    if constexpr (kOut)
      std::memcpy(in_row, in_block, sizeof(T));
    else
      std::memcpy(in_block, in_row, sizeof(T));
  };
  if (count == 1) {
    for (std::int64_t d = 0; d < dims; ++d) cell(d, 0);
    return;
  }
  for (std::int64_t d = 0; d < dims; ++d)
    for (std::int64_t i = 0; i < count; ++i) cell(d, i);
}

template <bool kOut, class A, class B>
void copy(A* row, B* block, std::int64_t bytes) {
  if constexpr (kOut)
    std::memcpy(row, block, static_cast<std::size_t>(bytes));
  else
    std::memcpy(block, row, static_cast<std::size_t>(bytes));
}

template <bool kOut, class RowsT, class BlockT>
void move_canonical(const BlockShape& s, BlockT* block, std::int64_t first, std::int64_t count,
                    RowsT rows) {
  const std::int64_t bytes = s.dim * size_of(s.format);
  const std::int64_t pitch = s.row_bytes != 0 ? s.row_bytes : bytes;
  for (std::int64_t i = 0; i < count; ++i)
    copy<kOut>(rows.data + i * rows.stride_bytes, block + (first + i) * pitch, bytes);
}

template <bool kOut, class RowsT, class BlockT>
void move_k(const BlockShape& s, BlockT* block, std::int64_t first, std::int64_t count,
            RowsT rows) {
  const std::int64_t lanes = std::min(s.tokens, kTokenBlock);
  for (std::int64_t i = 0; i < count;) {
    const std::int64_t lane = (first + i) % lanes, n = std::min(count - i, lanes - lane);
    BlockT* base = block + (first + i - lane) * s.dim * size_of(s.format);
    const RowsT part{rows.data + i * rows.stride_bytes, rows.stride_bytes};
    if (s.format == Format::kF16)
      transpose<std::uint16_t, kOut>(part, base + 2 * lane, lanes, n, s.dim);
    else  // f32 values, or bf16 pairs of dims
      transpose<std::uint32_t, kOut>(part, base + 4 * lane, lanes, n,
                                     s.format == Format::kBf16 ? s.dim / 2 : s.dim);
    i += n;
  }
}

template <bool kOut, class RowsT, class BlockT>
void move_v(const BlockShape& s, BlockT* block, std::int64_t first, std::int64_t count,
            RowsT rows) {
  const std::int64_t bytes = size_of(s.format);
  for (std::int64_t d = 0; d < s.dim; d += kDimBlock) {
    const std::int64_t dims = std::min(s.dim - d, kDimBlock);
    BlockT* base = block + s.tokens * d * bytes;
    for (std::int64_t i = 0; i < count; ++i) {
      auto* row = rows.data + i * rows.stride_bytes + d * bytes;
      const std::int64_t t = first + i;
      if (s.format != Format::kBf16) {
        copy<kOut>(row, base + t * dims * bytes, dims * bytes);
        continue;
      }
      BlockT* pair = base + (t / 2 * dims * 2 + t % 2) * 2;
      for (std::int64_t x = 0; x < dims; ++x) copy<kOut>(row + 2 * x, pair + 4 * x, 2);
    }
  }
}

}  // namespace detail

template <bool kOut, class RowsT, class BlockT>
void move_rows(Part part, const BlockShape& s, BlockT* block, std::int64_t first,
               std::int64_t count, RowsT rows) {
  if (s.layout == LayoutId::kCanonical)
    detail::move_canonical<kOut>(s, block, first, count, rows);
  else if (part == Part::kK)
    detail::move_k<kOut>(s, block, first, count, rows);
  else
    detail::move_v<kOut>(s, block, first, count, rows);
}

}  // namespace kvcore::kernels
