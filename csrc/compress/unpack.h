// Whole packed blocks of open pages as canonical rows [page_size][head_dim], elements as they are.
// Sealing reads every block once, so unlike kernels/layout this moves tiles, not single values.
// Thread rules: none, pure functions on caller memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/page_layout.h"

namespace kvcore::compress {

struct OpenBlock {
  const std::byte* data;
  Format format;  // f32, f16 or bf16
  std::int64_t tokens;
  std::int64_t dim;
};

void unpack_k(const OpenBlock& block, std::byte* rows);
void unpack_v(const OpenBlock& block, std::byte* rows);

}  // namespace kvcore::compress
