#include "pages/page_class.h"

#include <gtest/gtest.h>

#include "base/block_arrays.h"

namespace kvcore::pages {
namespace {

PageSpec spec(std::int32_t dim, LayoutId layout = LayoutId::kPacked) {
  PageSpecOptions o;
  o.num_layers = 3;
  o.num_kv_heads = 2;
  o.head_dim_k = o.head_dim_v = dim;
  o.layout = layout;
  return PageSpec::make(o).value();
}

constexpr HeadFormats kOpen{Format::kBf16, Format::kBf16}, kSmall{Format::kK4, Format::kV3};

TEST(PageClass, OpenPagesLieAsTheSpecSays) {
  const PageSpec s = spec(64);
  const PageClass open = PageClass::open(s);
  EXPECT_TRUE(open.is_open());
  EXPECT_EQ(open.page_bytes(), s.page_bytes());
  EXPECT_EQ(open.run_bytes(s.options().extent_pages), s.frame_bytes());
  const auto layers = open.layers(s.options().extent_pages);
  EXPECT_EQ(layers[2].run_bytes, 2 * s.layer_stride_bytes());
  EXPECT_EQ(layers[2].heads[1].v_offset_bytes, s.head_block(1).v_offset_bytes);
}

TEST(PageClass, LayersDifferAndNothingOverlaps) {
  const PageSpec s = spec(128);
  const std::vector<HeadFormats> table = {kOpen, kSmall, kSmall, kSmall, {Format::kInt8, Format::kV4},
                                          kSmall};
  const PageClass c = PageClass::make(s, table).value();
  EXPECT_FALSE(c.is_open());
  std::int64_t end = 0;
  const auto layers = c.layers(5);
  for (std::int32_t l = 0; l < 3; ++l) {
    const LayerView& layer = layers[static_cast<std::size_t>(l)];
    EXPECT_EQ(layer.run_bytes, end);
    EXPECT_EQ(layer.slice_bytes % 64, 0);
    std::int64_t at = kSliceHeaderBytes;
    for (std::int32_t h = 0; h < 2; ++h) {
      EXPECT_EQ(layer.heads[h].k_offset_bytes, at);
      EXPECT_EQ(layer.heads[h].v_offset_bytes % 64, 0);
      at = layer.heads[h].v_offset_bytes;
      const Format v = layer.heads[h].v_format;
      at += v == Format::kBf16 ? 64 * 128 * 2 : block_arrays(v, Part::kV, 64, 128).bytes;
    }
    EXPECT_EQ(layer.slice_bytes, at);
    end += 5 * layer.slice_bytes;
  }
  EXPECT_EQ(c.page_bytes() * 5, end);
  EXPECT_EQ(c.run_bytes(5) % kFrameAlignBytes, 0);
  EXPECT_EQ(c.describe().substr(s.describe().size()),
            " formats=bf16/bf16,k4/v3;k4/v3,k4/v3;int8/v4,k4/v3");
  EXPECT_NE(c.digest(), PageClass::open(s).digest());
}

// The sizes that docs/formats.md and the README state, headers counted.
TEST(PageClass, SizesAreHonest) {
  PageSpecOptions o;
  o.num_layers = 4;
  o.num_kv_heads = 8;
  o.head_dim_k = o.head_dim_v = 128;
  const PageSpec s = PageSpec::make(o).value();
  const auto percent = [&](Format k, Format v) {
    const std::vector<HeadFormats> table(32, {k, v});
    return 100.0 * static_cast<double>(PageClass::make(s, table).value().page_bytes()) /
           static_cast<double>(s.page_bytes());
  };
  EXPECT_LE(percent(Format::kK4, Format::kV4), 27.5);
  EXPECT_LE(percent(Format::kK4, Format::kV3), 24.5);
  EXPECT_NEAR(percent(Format::kFp8, Format::kFp8), 51, 1);
  EXPECT_NEAR(percent(Format::kInt8, Format::kInt8), 52, 1);
}

TEST(PageClass, RefusesByNameAndPlace) {
  const auto error = [](const PageSpec& s, std::vector<HeadFormats> table) {
    table.resize(table.size() == 5 ? 5 : 6, kOpen);
    return PageClass::make(s, table).error().message;
  };
  const PageSpec s = spec(64);
  EXPECT_NE(error(s, std::vector<HeadFormats>(5, kOpen)).find("formats has 5 entries: allowed 6"),
            std::string::npos);
  EXPECT_NE(error(s, {kOpen, kOpen, kOpen, {Format::kV4, Format::kV4}})
                .find("format 'v4' of layer 1, KV head 1, K: allowed bf16, int8, fp8, k4"),
            std::string::npos);
  EXPECT_NE(error(s, {{Format::kBf16, Format::kF16}}).find("format 'f16' of layer 0, KV head 0, V"),
            std::string::npos);
  EXPECT_NE(error(spec(272), {kSmall}).find("head_dim 272"), std::string::npos);
  EXPECT_NE(error(spec(64, LayoutId::kCanonical), {kSmall}).find("canonical"), std::string::npos);
}

}  // namespace
}  // namespace kvcore::pages
