#include "pages/block_table.h"

#include <algorithm>

#include "base/text.h"

namespace kvcore::pages {

Status fill_block_table(std::span<const std::vector<std::int32_t>> rows, std::int64_t max_pages,
                        std::span<std::int32_t> table) {
  const auto width = static_cast<std::size_t>(std::max<std::int64_t>(max_pages, 0));
  if (max_pages < 0 || table.size() != rows.size() * width)
    return invalid_argument(text("table has ", table.size(),
                                 " entries: allowed num_seqs * max_pages = ", rows.size(), " * ",
                                 max_pages));
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (rows[i].size() > width)
      return invalid_argument(
          text("row ", i, " has ", rows[i].size(), " pages: allowed max_pages = ", max_pages));
  }
  std::fill(table.begin(), table.end(), kNoPage);
  for (std::size_t i = 0; i < rows.size(); ++i)
    std::copy(rows[i].begin(), rows[i].end(),
              table.begin() + static_cast<std::ptrdiff_t>(i * width));
  return {};
}

Status fill_slot_mapping(std::span<const std::int32_t> pages, std::int64_t page_size,
                         std::int64_t first_token, std::span<std::int64_t> slots) {
  if (page_size < 1)
    return invalid_argument(text("page_size=", page_size, " is out of range: allowed 1 and up"));
  const std::int64_t capacity = static_cast<std::int64_t>(pages.size()) * page_size;
  const auto count = static_cast<std::int64_t>(slots.size());
  if (first_token < 0 || first_token > capacity || count > capacity - first_token)
    return invalid_argument(text("tokens ", first_token, " to ", first_token + count,
                                 " do not lie in ", pages.size(), " pages of ", page_size));
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t token = first_token + i;
    slots[static_cast<std::size_t>(i)] =
        std::int64_t{pages[static_cast<std::size_t>(token / page_size)]} * page_size +
        token % page_size;
  }
  return {};
}

}  // namespace kvcore::pages
