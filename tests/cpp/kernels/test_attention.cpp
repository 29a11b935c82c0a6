// Attention against a double-precision loop: every level, format, layout, page size and odd shapes.
#include <tuple>

#include "kernels/fixture.h"

namespace kvcore::kernels::test {
namespace {

double tolerance(Format f) { return f == Format::kF32 ? 5e-6 : f == Format::kF16 ? 4e-3 : 3e-2; }

using Case = std::tuple<Format, LayoutId, std::int32_t>;

class Attention : public ::testing::TestWithParam<std::tuple<std::string, Case>> {};

TEST_P(Attention, MixedBatchMatchesReference) {
  const auto& [isa, parameters] = GetParam();
  const auto& [format, layout, page] = parameters;
  ASSERT_TRUE(set_isa(isa).ok());
  const Shape shape{2, 80, 48, page, format, format, layout, 2};
  const TestPages pages(shape, 2 + 3 * (1100 / page + 2));
  const DType dtype = dtype_of(format);
  const Sequence a = make_sequence(pages, page + 1, 0, 10, dtype);
  const Sequence b = make_sequence(pages, 200, 3, 20, dtype);
  const Sequence c = make_sequence(pages, 1090, 3 + 200 / page + 1, 30, dtype);
  const std::vector<Item> items{{&a, 1, page + 1}, {&a, 5, 3},       {&b, 0, 7},    {&a, 0, 0},
                                {&a, 3, 0},        {&b, 70, 200},    {&c, 1, 1090}, {&c, 2, 1024},
                                {&a, 1, 1},        {&b, 2, page - 1}};
  std::int64_t tokens = 0;
  for (const Item& i : items) tokens += i.q_len;
  const Tensor q = Tensor::random(tokens, 6 * 80, dtype, 5);
  const Output got = attend(pages, 6, items, q);
  std::int64_t row = 0;
  for (const Item& i : items) {
    const Errors e = compare(pages.view(), 6, i, q, got, row);
    EXPECT_LT(e.out, tolerance(format)) << "q_len " << i.q_len << " context " << i.context;
    EXPECT_LT(e.lse, 1e-5) << "q_len " << i.q_len << " context " << i.context;
    row += i.q_len;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, Attention,
    ::testing::Combine(
        ::testing::ValuesIn(available_isas()),
        ::testing::Combine(::testing::Values(Format::kBf16, Format::kF16, Format::kF32),
                           ::testing::Values(LayoutId::kPacked, LayoutId::kCanonical),
                           ::testing::Values(16, 32, 64, 128))));

class AttentionShapes : public EveryIsa {};
KVCORE_EVERY_ISA(AttentionShapes);

TEST_P(AttentionShapes, GroupsAndHeadDims) {
  for (const std::int32_t group : {1, 2, 5, 6, 7, 8, 16, 71})
    for (const std::int32_t dim : {16, 64, 80, 96, 112, 128, 256}) {
      if (group > 8 && dim != 64) continue;
      const TestPages pages({1, dim, dim}, 4);
      const Sequence s = make_sequence(pages, 131, 0, 3, DType::kBf16);
      const Tensor q = Tensor::random(4, group * dim, DType::kBf16, 4);
      const Item item{&s, 4, 131};
      const Errors e = compare(pages.view(), group, item, q, attend(pages, group, {item}, q));
      EXPECT_LT(e.out, 2e-2) << "group " << group << " head_dim " << dim;
    }
}

TEST_P(AttentionShapes, KAndVFormatsMayDiffer) {
  for (const Format k : {Format::kBf16, Format::kF16, Format::kF32})
    for (const Format v : {Format::kBf16, Format::kF16, Format::kF32}) {
      const TestPages pages({2, 64, 128, 32, k, v}, 8);
      const Sequence s =
          make_sequence(pages, 77, 0, 3, DType::kBf16);  // exact in f32, nearly in f16
      const Tensor q = Tensor::random(9, 4 * 64, DType::kBf16, 4);
      const Item item{&s, 9, 77};
      const Errors e = compare(pages.view(), 4, item, q, attend(pages, 4, {item}, q));
      EXPECT_LT(e.out, 2e-2);
    }
}

TEST_P(AttentionShapes, TensorDtypeIsIndependentOfPageFormat) {
  const TestPages pages({2, 64, 64, 64, Format::kF32, Format::kF32}, 4);
  const Sequence s = make_sequence(pages, 100, 0, 3, DType::kF32);
  for (const DType t : {DType::kF32, DType::kF16, DType::kBf16}) {
    const Tensor q = Tensor::random(3, 4 * 64, t, 4);
    const Item item{&s, 3, 100};
    const Errors e = compare(pages.view(), 4, item, q, attend(pages, 4, {item}, q));
    EXPECT_LT(e.out, t == DType::kF32 ? 5e-6 : t == DType::kF16 ? 1e-3 : 8e-3);
  }
}

TEST_P(AttentionShapes, ExtremeScoresStayFinite) {
  const TestPages pages({1, 16, 16, 16, Format::kF32, Format::kF32}, 130);
  Sequence s = make_sequence(pages, 2050, 0, 3, DType::kF32);
  for (std::int64_t i = 0; i < 16; ++i) s.k.set(i, 3000.f);  // one token outweighs all others
  std::vector<std::int64_t> slot{0};
  ASSERT_TRUE(
      append_kv(pages.view(), 1, s.k.rows_from(0), s.v.rows_from(0), DType::kF32, slot).ok());
  Tensor q = Tensor::zeros(1, 16, DType::kF32);
  for (std::int64_t i = 0; i < 16; ++i) q.set(i, 1.f);
  const Output got = attend(pages, 1, {{&s, 1, 2050}}, q);
  for (std::int64_t d = 0; d < 16; ++d) EXPECT_FLOAT_EQ(got.out.at(0, d), s.v.at(0, d));
}

TEST(AttentionErrors, NameTheDimension) {
  const TestPages pages({2, 64, 64}, 4);
  const auto message = [](const Status& s) { return s ? std::string() : s.error().message; };
  const auto bad = AttentionPlan::make(&pages.view(), 5);
  ASSERT_FALSE(bad.ok());
  EXPECT_NE(bad.error().message.find("num_q_heads=5"), std::string::npos);
  auto plan = AttentionPlan::make(&pages.view(), 4);
  ASSERT_TRUE(plan.ok());
  const std::int32_t cu[] = {0, 1, 3}, falling[] = {0, 2, 1}, from1[] = {1, 2, 3};
  const std::int32_t lens[] = {5, 65}, high[] = {5, 129}, negative[] = {-1, 65};
  const std::int32_t table[] = {0, 1, 2, 3}, unknown[] = {0, 1, 2, 4};
  const auto prepare = [&](const std::int32_t* c, const std::int32_t* l, const std::int32_t* t) {
    return message((*plan)->prepare({2, c, l, t, 2, 2}));
  };
  EXPECT_EQ(prepare(cu, lens, table), "");
  EXPECT_NE(prepare(falling, lens, table).find("cu_seqlens_q[2]=1"), std::string::npos);
  EXPECT_NE(prepare(from1, lens, table).find("cu_seqlens_q[0]=1"), std::string::npos);
  EXPECT_NE(prepare(cu, high, table).find("context_lens[1]=129"), std::string::npos);
  EXPECT_NE(prepare(cu, negative, table).find("context_lens[0]=-1"), std::string::npos);
  EXPECT_NE(prepare(cu, lens, unknown).find("block_table[1, 1]=4"), std::string::npos);
  const std::int32_t more_than_context[] = {0, 6, 8};
  EXPECT_EQ(prepare(more_than_context, lens, table), "");
  std::vector<char> rows(8 * 2 * 64 * 2);
  EXPECT_NE(message((*plan)->append(0, {rows.data(), 128}, {rows.data(), 128}, DType::kBf16))
                .find("q_len=6"),
            std::string::npos);
  EXPECT_NE(message((*plan)->attend(2, {})).find("layer=2"), std::string::npos);
  EXPECT_NE(message((*plan)->attend(0, {rows.data(), 100, rows.data(), 256})).find("q=100"),
            std::string::npos);
}

}  // namespace
}  // namespace kvcore::kernels::test
