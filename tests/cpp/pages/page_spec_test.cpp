#include "pages/page_spec.h"

#include <gtest/gtest.h>

#include "pages/block_table.h"

namespace kvcore::pages {
namespace {

PageSpecOptions smollm2() {
  PageSpecOptions o;
  o.num_layers = 30;
  o.num_kv_heads = 3;
  o.head_dim_k = o.head_dim_v = 64;
  return o;
}

TEST(PageSpec, SizesFollowFromTheFields) {
  const PageSpec spec = PageSpec::make(smollm2()).value();
  EXPECT_EQ(spec.slice_bytes(), 64 + 3 * 2 * 64 * 64 * 2);
  EXPECT_EQ(spec.options().extent_pages, 4);  // 4 * 48 KiB >= 128 KiB
  EXPECT_EQ(spec.layer_stride_bytes(), 4 * spec.slice_bytes());
  EXPECT_EQ(spec.frame_bytes() % kFrameAlignBytes, 0);
  EXPECT_GE(spec.frame_bytes(), 30 * spec.layer_stride_bytes());
  const HeadBlock last = spec.head_block(2);
  EXPECT_EQ(last.v_offset_bytes + spec.v_block_bytes(), 64 + 3 * spec.head_block_bytes());
}

TEST(PageSpec, RefusesFieldsByName) {
  PageSpecOptions o = smollm2();
  o.head_dim_k = 72;
  EXPECT_EQ(PageSpec::make(o).error().message, "head_dim_k=72 must be a multiple of 16");
  o = smollm2();
  o.page_size = 48;
  EXPECT_EQ(PageSpec::make(o).error().message, "page_size=48 is not allowed: 16, 32, 64 or 128");
  o = smollm2();
  o.extent_pages = 17;
  EXPECT_FALSE(PageSpec::make(o).ok());
}

TEST(PageSpec, UsablePrefixLeavesATokenToCompute) {
  for (std::int64_t n = -1; n < 300; ++n) {
    const std::int64_t usable = usable_prefix(n, 64);
    EXPECT_EQ(usable % 64, 0);
    EXPECT_TRUE(n <= 0 ? usable == 0 : usable < n && n - usable <= 64) << n;
  }
}

TEST(PageSpec, SmallPagesOfOneProcessAreNotRoundedUp) {
  PageSpecOptions o{.num_layers = 1, .num_kv_heads = 1, .head_dim_k = 64, .head_dim_v = 64};
  o.extent_pages = 1;
  EXPECT_EQ(PageSpec::make(o)->frame_bytes(), 20480);
  EXPECT_EQ(PageSpec::make(o)->describe().find("align"), std::string::npos);
  o.align_bytes = 64;
  EXPECT_EQ(PageSpec::make(o)->frame_bytes(), 16384 + 64);
  EXPECT_NE(PageSpec::make(o)->describe().find("align_bytes=64"), std::string::npos);
  o.align_bytes = 512;
  EXPECT_FALSE(PageSpec::make(o).ok());
}

TEST(BlockTable, FillsRowsAndRefusesLongOnes) {
  const std::vector<std::vector<std::int32_t>> rows = {{4, 5}, {6}};
  std::vector<std::int32_t> table(6, 99);
  ASSERT_TRUE(fill_block_table(rows, 3, table).ok());
  EXPECT_EQ(table, (std::vector<std::int32_t>{4, 5, -1, 6, -1, -1}));
  std::vector<std::int32_t> narrow(2, 99);
  EXPECT_FALSE(fill_block_table(rows, 1, narrow).ok());
  EXPECT_EQ(narrow, (std::vector<std::int32_t>{99, 99}));
}

TEST(SlotMapping, FollowsThePages) {
  const std::vector<std::int32_t> pages = {7, 2};
  std::vector<std::int64_t> slots(3);
  ASSERT_TRUE(fill_slot_mapping(pages, 16, 15, slots).ok());
  EXPECT_EQ(slots, (std::vector<std::int64_t>{7 * 16 + 15, 32, 33}));
  EXPECT_FALSE(fill_slot_mapping(pages, 16, 30, slots).ok());
  EXPECT_FALSE(fill_slot_mapping(pages, 16, -1, slots).ok());
}

}  // namespace
}  // namespace kvcore::pages
