// Compressed head blocks of whole pages: sizes, encoding from and decoding to canonical rows,
// checks. Which formats exist for which part, and the bytes of each: base/block_arrays.h.
// Blocks are equal byte for byte at every instruction set level and equal kvcore.reference's.
// Thread rules: none, pure functions on caller memory.
#pragma once

#include <cstdint>
#include <span>

#include "base/dtype.h"
#include "base/page_layout.h"
#include "base/result.h"

namespace kvcore::kernels {

// One head's K or V of a page: tokens 16, 32, 64 or 128; dim a multiple of 8 from 8 to 256.
struct BlockSpec {
  Format format;
  Part part;
  std::int64_t tokens;
  std::int64_t dim;
};

// "int8", "fp8", "k4", "v4", "v3"; "elements" for a format that is none of them.
const char* codec_name(Format format) noexcept;

// Bytes of the block, metadata and padding counted; a multiple of 64.
Result<std::int64_t> block_bytes(const BlockSpec& spec);

// rows: [tokens][dim] of `dtype`, `stride` elements between tokens. Refuses numbers that are not
// finite or above 65504 in magnitude, naming token and dim; the block's bytes are undefined then.
Status encode_page_block(const BlockSpec& spec, const void* rows, std::int64_t stride, DType dtype,
                         std::span<std::byte> block);

// Several blocks of one spec, say the heads of a page: block i reads rows + i * steps.rows elements
// and is written at i * steps.block bytes behind `first`, which is the first block alone.
struct BlockSteps {
  std::int64_t count = 1;
  std::int64_t rows = 0;   // elements
  std::int64_t block = 0;  // bytes
};
Status encode_page_blocks(const BlockSpec& spec, const void* rows, std::int64_t stride, DType dtype,
                          std::span<std::byte> first, const BlockSteps& steps);

// The reverse. Does not look for damage: check_block() does.
Status decode_page_block(const BlockSpec& spec, std::span<const std::byte> block, void* rows,
                         std::int64_t stride, DType dtype);
Status decode_page_blocks(const BlockSpec& spec, std::span<const std::byte> first, void* rows,
                          std::int64_t stride, DType dtype, const BlockSteps& steps);

// kCorrupt for a block that no encoder writes: a scale, norm or grid that is not finite or not
// above 0, a mean that is not finite, an fp8 NaN.
Status check_block(const BlockSpec& spec, std::span<const std::byte> block);

}  // namespace kvcore::kernels
