// Block tables: the int32 [num_seqs, max_pages] page ids kernels read, and slot mappings derived
// from them. Thread rules: pure functions. Units: pages, tokens.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/result.h"

namespace kvcore::pages {

// Unused entries; kernels never read them, and any code that does is out of range at once.
constexpr std::int32_t kNoPage = -1;

// Writes rows[i] into table[i, :] and fills the rest of each row with kNoPage. table is row-major
// [rows.size(), max_pages]. A row longer than max_pages is refused before anything is written.
Status fill_block_table(std::span<const std::vector<std::int32_t>> rows, std::int64_t max_pages,
                        std::span<std::int32_t> table);

// slots[i] = page * page_size + offset of the token at position first_token + i of a sequence whose
// pages are `pages` in order. Positions past the last page are refused.
Status fill_slot_mapping(std::span<const std::int32_t> pages, std::int64_t page_size,
                         std::int64_t first_token, std::span<std::int64_t> slots);

}  // namespace kvcore::pages
