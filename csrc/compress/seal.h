// Sealing: full open pages become pages of a compressed class, in place of their ids.
// Every K and V block is encoded from the page's own elements into the page's new run; the header
// of each slice says class number, layer, page_size valid tokens, the format of head 0's K, and the
// checksum: xxh3-64 over the slice with this field as 0 (1 where that is 0).
// Thread rules: any thread; the caller makes sure that the pages are full, owned by it, and that no
// kernel reads or writes them meanwhile. Transfers may: the bytes they read stay until they end.
#pragma once

#include <cstdint>
#include <span>

#include "base/result.h"
#include "pages/pool.h"

namespace kvcore::compress {

// Seals the pages in order. Wrong arguments (a page twice, not open, not owned) are refused before
// anything changes. Where bytes run out (OutOfPages) or a number cannot be encoded
// (InvalidArgument: it is not finite, or too large), that page and those behind it stay open and as
// they were.
Status seal_pages(pages::Pool& pool, std::span<const std::int32_t> pages,
                  std::int32_t class_number);

}  // namespace kvcore::compress
