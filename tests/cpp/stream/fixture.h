// What the stream tests share: small pools, stamped pages, random request ids.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "pages/pool.h"
#include "stream/core.h"
#include "stream/run.h"

namespace kvcore::stream::testing {

inline pages::PageSpecOptions small_spec(std::int32_t extent_pages = 2) {
  return {.num_layers = 3,
          .num_kv_heads = 1,
          .head_dim_k = 16,
          .head_dim_v = 16,
          .page_size = 16,
          .extent_pages = extent_pages};
}

inline std::shared_ptr<pages::Pool> make_pool(const pages::PageSpecOptions& spec,
                                              std::int64_t num_frames = 16) {
  auto made = pages::PageSpec::make(spec);
  EXPECT_TRUE(made.ok());
  auto pool = pages::Pool::make(*made, num_frames, nullptr, false);
  EXPECT_TRUE(pool.ok());
  return *pool;
}

inline RequestId make_id(std::mt19937_64& rng) {
  RequestId id;
  for (auto& b : id.bytes) b = static_cast<std::byte>(rng());
  return id;
}

// Fills everything behind the header with words that depend on (stamp, layer, slot, position).
inline std::uint64_t stamp_word(std::uint64_t stamp, std::int32_t layer, std::int32_t slot,
                                std::size_t i) {
  std::uint64_t x = stamp ^ (static_cast<std::uint64_t>(layer) << 40) ^
                    (static_cast<std::uint64_t>(slot) << 20) ^ i;
  x *= 0x9e3779b97f4a7c15u;
  return x ^ (x >> 29);
}

inline std::span<std::uint64_t> body(const pages::Pool& pool, std::int32_t page,
                                     std::int32_t layer) {
  const auto bytes = static_cast<std::size_t>(pool.spec().slice_bytes() - kSliceHeaderBytes);
  return {reinterpret_cast<std::uint64_t*>(pool.slice(page, layer) + kSliceHeaderBytes),
          bytes / sizeof(std::uint64_t)};
}

inline void stamp_slice(const pages::Pool& pool, std::int32_t page, std::int32_t layer,
                        std::int32_t slot, std::uint64_t stamp) {
  auto words = body(pool, page, layer);
  for (std::size_t i = 0; i < words.size(); ++i) words[i] = stamp_word(stamp, layer, slot, i);
}

inline void stamp_pages(const pages::Pool& pool, const std::vector<std::int32_t>& pages,
                        std::uint64_t stamp) {
  for (std::int32_t layer = 0; layer < pool.spec().options().num_layers; ++layer)
    for (std::size_t slot = 0; slot < pages.size(); ++slot)
      stamp_slice(pool, pages[slot], layer, static_cast<std::int32_t>(slot), stamp);
}

// Number of slices whose body is not what stamp_pages wrote.
inline int wrong_slices(const pages::Pool& pool, const std::vector<std::int32_t>& pages,
                        std::uint64_t stamp) {
  int wrong = 0;
  for (std::int32_t layer = 0; layer < pool.spec().options().num_layers; ++layer) {
    for (std::size_t slot = 0; slot < pages.size(); ++slot) {
      const auto words = body(pool, pages[slot], layer);
      bool same = true;
      for (std::size_t i = 0; i < words.size(); ++i)
        same &= words[i] == stamp_word(stamp, layer, static_cast<std::int32_t>(slot), i);
      wrong += !same;
    }
  }
  return wrong;
}

inline std::vector<std::int32_t> first_n(std::vector<std::int32_t> v, std::size_t n) {
  v.resize(n);
  return v;
}

inline std::vector<std::byte> as_payload(std::string_view s) {
  const auto b = std::as_bytes(std::span(s.data(), s.size()));
  return {b.begin(), b.end()};
}

}  // namespace kvcore::stream::testing
