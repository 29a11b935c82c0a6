// A pool of small pages for tests: one layer, one head, 16 tokens a page.
#pragma once

#include <memory>

#include "pages/pool.h"

namespace kvcore::pages {

inline std::shared_ptr<Pool> small_pool(std::int64_t frames, std::int32_t extent_pages) {
  PageSpecOptions o;
  o.num_layers = 2;
  o.num_kv_heads = 1;
  o.head_dim_k = o.head_dim_v = 16;
  o.page_size = 16;
  o.extent_pages = extent_pages;
  return Pool::make(PageSpec::make(o).value(), frames, nullptr, false).value();
}

}  // namespace kvcore::pages
