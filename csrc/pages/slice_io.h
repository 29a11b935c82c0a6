// Reads and writes one slice as canonical arrays: the slow, obvious path for tests and tools. The
// fast copies are in csrc/kernels. Bits are moved, never converted. Shapes: k [page_size,
// num_kv_heads, head_dim_k], v [page_size, num_kv_heads, head_dim_v], row-major, elements of the
// page's format. Thread rules: as the pool's; the caller holds a ref on the page.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/result.h"
#include "pages/page_spec.h"
#include "pages/pool.h"

namespace kvcore::pages {

// Position of (token, dim) inside a head's K or V block, in elements (base/page_layout.h).
std::int64_t k_element(const PageSpecOptions& spec, std::int64_t token, std::int64_t dim) noexcept;
std::int64_t v_element(const PageSpecOptions& spec, std::int64_t token, std::int64_t dim) noexcept;

Status read_slice(const Pool& pool, std::int32_t page, std::int32_t layer, std::span<std::byte> k,
                  std::span<std::byte> v);
// Also writes the slice's header with valid_tokens = page_size. A sealed or free page is refused.
Status write_slice(Pool& pool, std::int32_t page, std::int32_t layer, std::span<const std::byte> k,
                   std::span<const std::byte> v);

}  // namespace kvcore::pages
