// Packing, appending, copying, merging, conversions and the instruction set switch.
#include <array>

#include "base/cpu_features.h"
#include "kernels/fixture.h"

namespace kvcore::kernels::test {
namespace {

const char* slice_at(const PagesView& p, std::int64_t page, std::int64_t layer) {
  return reinterpret_cast<const char*>(p.arena) + p.records[page].offset_bytes +
         p.classes[0].layers[layer].run_bytes;
}

// The layout as base/page_layout.h writes it down, index by index.
TEST(Layout, PackedBf16IsWhatTheHeaderSays) {
  for (const std::int32_t page : {16, 64, 128}) {
    const std::int32_t dim = 80, block = std::min(page, 64);
    const TestPages pages({1, dim, dim, page}, 1);
    const Tensor k = Tensor::random(page, dim, DType::kBf16, 1),
                 v = Tensor::random(page, dim, DType::kBf16, 2);
    ASSERT_TRUE(
        pack_slice(pages.view(), 0, 1, 0, page, k.rows_from(0), v.rows_from(0), DType::kBf16).ok());
    const HeadBlock& head = pages.view().classes[0].layers[1].heads[0];
    const char* kb = slice_at(pages.view(), 0, 1) + head.k_offset_bytes;
    const char* vb = slice_at(pages.view(), 0, 1) + head.v_offset_bytes;
    for (std::int64_t t = 0; t < page; ++t)
      for (std::int64_t d = 0; d < dim; ++d) {
        const std::int64_t at_k =
            t / block * block * dim + d / 2 * block * 2 + t % block * 2 + d % 2;
        const std::int64_t first = d / 64 * 64, width = std::min<std::int64_t>(dim - first, 64);
        const std::int64_t at_v = page * first + t / 2 * width * 2 + (d - first) * 2 + t % 2;
        ASSERT_EQ(std::memcmp(kb + 2 * at_k, k.row(t) + 2 * d, 2), 0) << t << " " << d;
        ASSERT_EQ(std::memcmp(vb + 2 * at_v, v.row(t) + 2 * d, 2), 0) << t << " " << d;
      }
    SliceHeader header;
    std::memcpy(&header, slice_at(pages.view(), 0, 1), sizeof header);
    EXPECT_EQ(header.magic, kSliceMagic);
    EXPECT_EQ(header.layer, 1);
  }
}

TEST(Layout, RangesRoundTripInEveryFormat) {
  for (const Format f : {Format::kBf16, Format::kF16, Format::kF32})
    for (const LayoutId layout : {LayoutId::kPacked, LayoutId::kCanonical})
      for (const std::int32_t page : {16, 32, 64, 128}) {
        const TestPages pages({3, 48, 112, page, f, f, layout}, 2);
        const DType t = dtype_of(f);
        const Tensor k = Tensor::random(page, 3 * 48, t, 1),
                     v = Tensor::random(page, 3 * 112, t, 2);
        std::int64_t first = 0;
        for (const std::int64_t n : {std::int64_t{1}, std::int64_t{4}, std::int64_t{page - 5}}) {
          ASSERT_TRUE(
              pack_slice(pages.view(), 1, 0, first, n, k.rows_from(first), v.rows_from(first), t)
                  .ok());
          first += n;
        }
        Tensor k2 = Tensor::zeros(page, 3 * 48, t), v2 = Tensor::zeros(page, 3 * 112, t);
        ASSERT_TRUE(unpack_slice(pages.view(), 1, 0, 0, page, {k2.bytes.data(), k2.width},
                                 {v2.bytes.data(), v2.width}, t)
                        .ok());
        EXPECT_EQ(k.bytes, k2.bytes);
        EXPECT_EQ(v.bytes, v2.bytes);
        ASSERT_TRUE(
            copy_pages(pages.view(), std::array<std::int64_t, 1>{1}, std::array<std::int64_t, 1>{0})
                .ok());
        Tensor k3 = Tensor::zeros(3, 3 * 48, t), v3 = Tensor::zeros(3, 3 * 112, t);
        ASSERT_TRUE(unpack_slice(pages.view(), 0, 0, 2, 3, {k3.bytes.data(), k3.width},
                                 {v3.bytes.data(), v3.width}, t)
                        .ok());
        EXPECT_EQ(slice(k, 2, 3).bytes, k3.bytes);
        EXPECT_EQ(slice(v, 2, 3).bytes, v3.bytes);
      }
}

TEST(Layout, AppendConvertsDtypes) {
  const TestPages pages({1, 16, 16, 16}, 1);
  const Tensor k = Tensor::random(2, 16, DType::kF32, 1);
  const std::int64_t slots[] = {5, 6};
  ASSERT_TRUE(append_kv(pages.view(), 0, k.rows_from(0), k.rows_from(0), DType::kF32, slots).ok());
  Tensor back = Tensor::zeros(2, 16, DType::kF32), v = back;
  ASSERT_TRUE(unpack_slice(pages.view(), 0, 0, 5, 2, {back.bytes.data(), 16}, {v.bytes.data(), 16},
                           DType::kF32)
                  .ok());
  for (std::int64_t i = 0; i < 32; ++i)
    EXPECT_EQ(back.at(i / 16, i % 16), bf16_to_float(float_to_bf16(k.at(i / 16, i % 16))));
  EXPECT_EQ(back.bytes, v.bytes);
}

TEST(Layout, ErrorsNameTheField) {
  const TestPages pages({1, 16, 16, 16}, 2);
  const Tensor k = Tensor::zeros(20, 16, DType::kBf16);
  const auto has = [](const Status& s, const char* what) {
    return !s.ok() && s.error().message.find(what) != std::string::npos;
  };
  const std::int64_t high[] = {32}, low[] = {-2}, skip[] = {-1};
  const TokenRows rows = k.rows_from(0);
  EXPECT_TRUE(
      has(append_kv(pages.view(), 0, rows, rows, DType::kBf16, high), "slot_mapping[0]=32"));
  EXPECT_TRUE(has(append_kv(pages.view(), 0, rows, rows, DType::kBf16, low), "slot_mapping[0]=-2"));
  EXPECT_TRUE(append_kv(pages.view(), 0, rows, rows, DType::kBf16, skip).ok());
  EXPECT_TRUE(has(pack_slice(pages.view(), 2, 0, 0, 1, rows, rows, DType::kBf16), "page=2"));
  EXPECT_TRUE(has(pack_slice(pages.view(), 0, 2, 0, 1, rows, rows, DType::kBf16), "layer=2"));
  EXPECT_TRUE(has(pack_slice(pages.view(), 0, 0, 10, 7, rows, rows, DType::kBf16), "count=7"));
  EXPECT_TRUE(has(pack_slice(pages.view(), 0, 0, 0, 2, {k.row(0), 8}, rows, DType::kBf16),
                  "k has a token stride"));
  EXPECT_TRUE(
      has(copy_pages(pages.view(), std::array<std::int64_t, 1>{0}, std::array<std::int64_t, 1>{9}),
          "to=9"));
}

TEST(Conversions, AllHalvesRoundTrip) {
  for (std::uint32_t h = 0; h < 65536; ++h) {
    const auto x = static_cast<std::uint16_t>(h);
    const bool nan16 = (h & 0x7fff) > 0x7c00, nan_b = (h & 0x7fff) > 0x7f80;
    ASSERT_TRUE(nan16 ? std::isnan(f16_to_float(float_to_f16(f16_to_float(x))))
                      : float_to_f16(f16_to_float(x)) == x);
    ASSERT_TRUE(nan_b ? std::isnan(bf16_to_float(float_to_bf16(bf16_to_float(x))))
                      : float_to_bf16(bf16_to_float(x)) == x);
  }
  EXPECT_EQ(float_to_f16(65519.9f), 0x7bff);
  EXPECT_EQ(float_to_f16(65520.f), 0x7c00);
  EXPECT_EQ(float_to_f16(0x1p-25f), 0);  // a tie, to even
  EXPECT_EQ(float_to_f16(0x1.8p-25f), 1);
  EXPECT_EQ(float_to_f16(1.f + 0x1p-11f), 0x3c00);  // a tie, to even
  EXPECT_EQ(float_to_bf16(1.f + 0x1p-8f), 0x3f80);
}

class Merge : public EveryIsa {};
KVCORE_EVERY_ISA(Merge);

TEST_P(Merge, EmptyIsNeutralBitForBit) {
  const float empty = -std::numeric_limits<float>::infinity();
  for (const DType t : {DType::kF32, DType::kF16, DType::kBf16}) {
    const Tensor a = Tensor::random(3, 48, t, 1), b = Tensor::random(3, 48, t, 2);
    const float lse_a[] = {0.3f, empty, empty}, lse_b[] = {empty, -1.7f, empty};
    Tensor out = Tensor::zeros(3, 48, t);
    float lse[3] = {9, 9, 9};
    ASSERT_TRUE(merge_states(
                    {a.bytes.data(), lse_a, b.bytes.data(), lse_b, out.bytes.data(), lse, 3, 48, t})
                    .ok());
    EXPECT_EQ(slice(out, 0, 1).bytes, slice(a, 0, 1).bytes);
    EXPECT_EQ(slice(out, 1, 1).bytes, slice(b, 1, 1).bytes);
    EXPECT_EQ(slice(out, 2, 1).bytes, Tensor::zeros(1, 48, t).bytes);
    EXPECT_EQ(lse[0], 0.3f);
    EXPECT_EQ(lse[1], -1.7f);
    EXPECT_EQ(lse[2], empty);
  }
}

TEST_P(Merge, WeightsByLse) {
  const Tensor a = Tensor::random(1, 16, DType::kF32, 1), b = Tensor::random(1, 16, DType::kF32, 2);
  const float la = 2.f, lb = 1.f;
  Tensor out = Tensor::zeros(1, 16, DType::kF32);
  float lse = 0;
  ASSERT_TRUE(
      merge_states({a.bytes.data(), &la, b.bytes.data(), &lb, out.bytes.data(), &lse, 1, 16}).ok());
  const double wa = std::exp(2.0), wb = std::exp(1.0);
  EXPECT_NEAR(lse, std::log(wa + wb), 1e-6);
  for (std::int64_t d = 0; d < 16; ++d)
    EXPECT_NEAR(out.at(0, d), (wa * a.at(0, d) + wb * b.at(0, d)) / (wa + wb), 1e-6);
  EXPECT_FALSE(
      merge_states({a.bytes.data(), &la, b.bytes.data(), &lb, out.bytes.data(), &lse, 1, 17}).ok());
}

TEST(Isa, UnknownLevelNamesTheAllowed) {
  const Status s = set_isa("sse9");
  ASSERT_FALSE(s.ok());
  EXPECT_NE(s.error().message.find("sse9"), std::string::npos);
  EXPECT_NE(s.error().message.find("scalar"), std::string::npos);
  for (const std::string& name : available_isas()) {
    ASSERT_TRUE(set_isa(name).ok());
    EXPECT_EQ((*kernel_table())->name, name);
  }
}

}  // namespace
}  // namespace kvcore::kernels::test
