#include "pages/pool.h"

#include <gtest/gtest.h>

#include <set>
#include <thread>

#include "pages/test_pool.h"

namespace kvcore::pages {
namespace {

using Pages = std::vector<std::int32_t>;

TEST(Pool, ViewAndSliceAgree) {
  const auto pool = small_pool(3, 4);
  const PagesView& view = pool->view();
  std::set<const std::byte*> seen;
  for (std::int32_t page = 0; page < 12; ++page) {
    for (std::int32_t layer = 0; layer < 2; ++layer) {
      const std::byte* slice = view.arena + view.records[page].offset_bytes +
                               view.classes[view.records[page].class_id].layers[layer].run_bytes;
      EXPECT_EQ(slice, pool->slice(page, layer));
      EXPECT_TRUE(seen.insert(slice).second);
      EXPECT_LE(slice + pool->spec().slice_bytes(), view.arena + pool->arena()->bytes());
    }
  }
}

TEST(Pool, FreesAFrameOnceWhenItsLastRefGoes) {
  const auto pool = small_pool(2, 2);
  const Pages pages = pool->alloc(2).value();
  ASSERT_TRUE(pool->io_acquire(pages).ok());
  ASSERT_TRUE(pool->decref(pages).ok());
  EXPECT_EQ(pool->stats().free_frames, 1);
  EXPECT_FALSE(pool->incref(pages).ok());
  ASSERT_TRUE(pool->io_release(pages).ok());
  EXPECT_EQ(pool->stats().free_frames, 2);
  EXPECT_EQ(pool->generation(pages[0]).value(), 2u);
}

TEST(Pool, RefusedListsChangeNothing) {
  const auto pool = small_pool(2, 1);
  const Pages pages = pool->alloc(1).value();
  const Pages twice = {pages[0], pages[0]};
  EXPECT_EQ(pool->decref(twice).error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(pool->refs(pages[0]).value().owner, 1);
  ASSERT_TRUE(pool->incref(pages).ok());
  EXPECT_TRUE(pool->decref(twice).ok());
  EXPECT_EQ(pool->stats().free_frames, 2);
}

TEST(Pool, FaultPlanMakesAllocFail) {
  const auto pool = small_pool(2, 1);
  const auto plan = std::make_shared<FaultPlan>(1);
  pool->set_faults(plan);
  ASSERT_TRUE(plan->fail_nth("pool.alloc", 2).ok());
  EXPECT_TRUE(pool->alloc(1).ok());
  EXPECT_EQ(pool->alloc(1).error().code, ErrorCode::kOutOfPages);
  EXPECT_TRUE(pool->alloc(1).ok());
}

TEST(Pool, RefusesSizesThatCannotBe) {
  PageSpecOptions o;
  o.num_layers = 1;
  o.num_kv_heads = 1;
  o.head_dim_k = o.head_dim_v = 16;
  const PageSpec spec = PageSpec::make(o).value();
  for (const std::int64_t frames : {std::int64_t{0}, std::int64_t{-4}, std::int64_t{1} << 40})
    EXPECT_EQ(Pool::make(spec, frames, nullptr, false).error().code, ErrorCode::kInvalidArgument);
}

TEST(Pool, ThreadsNeverShareAPage) {
  const auto pool = small_pool(8, 2);
  std::vector<std::atomic<int>> owners(16);
  std::atomic<int> clashes{0};
  std::vector<std::jthread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 5000; ++i) {
        const auto pages = pool->alloc(3);
        if (!pages) continue;
        for (const std::int32_t p : *pages) clashes += owners[static_cast<std::size_t>(p)]++ != 0;
        for (const std::int32_t p : *pages) --owners[static_cast<std::size_t>(p)];
        if (!pool->decref(*pages)) ++clashes;
      }
    });
  }
  threads.clear();
  EXPECT_EQ(clashes, 0);
  EXPECT_EQ(pool->stats().free_frames, 8);
}

}  // namespace
}  // namespace kvcore::pages
