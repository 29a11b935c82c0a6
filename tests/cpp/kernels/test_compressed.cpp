// Attention over compressed pages against a double-precision loop over the numbers they stand for.
#include "kernels/class_pages.h"

namespace kvcore::kernels::test {
namespace {

constexpr Format kBf16 = Format::kBf16, kInt8 = Format::kInt8, kFp8 = Format::kFp8,
                 kK4 = Format::kK4, kV4 = Format::kV4, kV3 = Format::kV3;
constexpr HeadFormats kPairs[] = {{kInt8, kInt8}, {kFp8, kFp8},  {kK4, kV4},   {kK4, kV3},
                                  {kInt8, kV4},   {kK4, kInt8},  {kBf16, kV4}, {kK4, kBf16},
                                  {kFp8, kV3},    {kBf16, kInt8}};

class Compressed : public EveryIsa {};
KVCORE_EVERY_ISA(Compressed);

TEST_P(Compressed, EveryPairAndPageSizeMatchesTheDecodedRows) {
  for (const HeadFormats& f : kPairs)
    for (const std::int32_t page : {16, 32, 64, 128}) {
      ClassPages pages({2, 80, 48, page}, {{f, f}}, 1200 / page + 5);
      const Sequence s = make_mixed(pages, 1090, 2, 10, {0});
      const std::vector<Item> items{{&s, 1, 1090},     {&s, 1, 0},    {&s, 1, 1},
                                    {&s, 1, page - 1}, {&s, 1, page}, {&s, 1, page + 1},
                                    {&s, 5, 3},        {&s, 3, 1026}, {&s, 30, page + 9}};
      expect_close(pages, 6, items, f, name_of(f) + ", page " + std::to_string(page));
    }
}

TEST_P(Compressed, GroupsAndHeadDims) {
  for (const HeadFormats& f : {HeadFormats{kInt8, kInt8}, {kK4, kV4}, {kK4, kV3}, {kFp8, kFp8}})
    for (const std::int32_t group : {1, 2, 4, 5, 7, 16})
      for (const std::int32_t dim : {16, 32, 64, 80, 96, 112, 128, 192, 256}) {
        if (group != 4 && dim != 64 && dim != 128) continue;
        ClassPages pages({1, dim, dim}, {{f}}, 3);
        const Sequence s = make_mixed(pages, 131, 0, 3, {0});
        expect_close(
            pages, group, {{&s, 3, 131}}, f,
            name_of(f) + ", group " + std::to_string(group) + ", head_dim " + std::to_string(dim));
      }
}

// Heads of different formats, pages of different classes in one sequence: the first and the last
// page open, as sequences have them.
TEST_P(Compressed, AnyMixInsideOneSequence) {
  for (const std::int32_t page : {16, 32, 64, 128}) {
    const std::vector<ClassFormats> classes{{{kBf16, kBf16}, {kBf16, kBf16}, {kBf16, kBf16}},
                                            {{kK4, kV4}, {kInt8, kInt8}, {kBf16, kV3}},
                                            {{kInt8, kV3}, {kK4, kBf16}, {kFp8, kV4}},
                                            {{kInt8, kBf16}, {kFp8, kV3}, {kK4, kInt8}}};
    ClassPages pages({3, 64, 96, page}, classes, 2400 / page + 8);
    const std::int64_t n = 2213 / page;
    std::vector<std::int32_t> class_of{0};
    for (std::int64_t i = 1; i < n; ++i) class_of.push_back(1 + static_cast<std::int32_t>(i % 3));
    class_of.push_back(0);
    const Sequence s = make_mixed(pages, 2213, 1, 10, class_of);
    expect_close(pages, 6, {{&s, 1, 2213}, {&s, 7, 1100}, {&s, 70, 400}}, {kK4, kV4},
                 "page " + std::to_string(page));
  }
}

// One key far above all others: its value must come out as it is stored.
TEST_P(Compressed, OneTokenOutweighsAllOthers) {
  for (const HeadFormats& f : kPairs) {
    ClassPages pages({1, 64, 64}, {{f}}, 20);
    const Sequence s = make_mixed(pages, 1200, 0, 3, {0});
    Tensor q = Tensor::zeros(1, 64, DType::kF32);
    for (std::int64_t d = 0; d < 64; ++d) q.set(d, short_float(40.f * s.k.at(700, d)));
    const Item item{&s, 1, 1200};
    const Errors e = compare(pages.view(), 1, item, q, attend(pages, 1, {item}, q));
    EXPECT_LT(e.out, f.v == kBf16 ? 1e-2 : 2e-2) << name_of(f);
  }
}

std::string message(const Status& s) { return s.ok() ? std::string() : s.error().message; }

TEST(CompressedPages, AreNotWrittenTokenByToken) {
  const ClassFormats open{{kBf16, kBf16}, {kBf16, kBf16}}, mixed{{kBf16, kBf16}, {kBf16, kV4}};
  ClassPages pages({2, 64, 64}, {open, mixed}, 4);
  const PagesView& p = pages.view();
  pages.set_class(2, 1);
  const Tensor rows = Tensor::random(64, 128, DType::kBf16, 1);
  const std::vector<std::int64_t> open_slots{0, 1, 64}, slots{0, 1, 2 * 64 + 5};
  EXPECT_TRUE(append_kv(p, 1, rows.rows_from(0), rows.rows_from(0), DType::kBf16, open_slots).ok());
  const Status appended =
      append_kv(p, 1, rows.rows_from(0), rows.rows_from(0), DType::kBf16, slots);
  ASSERT_FALSE(appended.ok());
  EXPECT_EQ(appended.error().code, ErrorCode::kUnsupported);
  EXPECT_NE(message(appended).find("page 2 is compressed (V of layer 1, KV head 0 is v4)"),
            std::string::npos)
      << message(appended);
  const Status packed =
      pack_slice(p, 2, 0, 0, 64, rows.rows_from(0), rows.rows_from(0), DType::kBf16);
  EXPECT_NE(message(packed).find("V of layer 0, KV head 1 is v4"), std::string::npos);

  auto plan = AttentionPlan::make(&p, 2);
  ASSERT_TRUE(plan.ok());
  const std::int32_t cu[] = {0, 1, 2}, lens[] = {70, 65}, table[] = {0, 1, 3, 2};
  ASSERT_TRUE((*plan)->prepare({2, cu, lens, table, 2, 2}).ok());
  const Status planned = (*plan)->append(1, rows.rows_from(0), rows.rows_from(0), DType::kBf16);
  ASSERT_FALSE(planned.ok());
  EXPECT_EQ(planned.error().code, ErrorCode::kUnsupported);
  EXPECT_NE(message(planned).find("page 2"), std::string::npos);
}

TEST_P(Compressed, UnpackedRowsAreTheDecodedOnes) {
  for (const HeadFormats& f : kPairs) {
    ClassPages pages({2, 80, 48, 32}, {{f, {kBf16, kBf16}}}, 2);
    const Sequence s = make_mixed(pages, 64, 0, 3, {0});
    for (const auto& [first, count] :
         {std::pair<std::int64_t, std::int64_t>{0, 32}, {5, 1}, {7, 22}}) {
      Tensor k = Tensor::zeros(count, 160, DType::kF32), v = Tensor::zeros(count, 96, DType::kF32);
      ASSERT_TRUE(unpack_slice(pages.view(), 1, 1, first, count, {k.bytes.data(), 160},
                               {v.bytes.data(), 96}, DType::kF32)
                      .ok());
      EXPECT_EQ(std::memcmp(k.row(0), s.k.row(32 + first), k.bytes.size()), 0) << name_of(f);
      EXPECT_EQ(std::memcmp(v.row(0), s.v.row(32 + first), v.bytes.size()), 0) << name_of(f);
    }
  }
}

TEST_P(Compressed, CopiesStayInTheirClass) {
  ClassPages pages({1, 64, 64}, {{{kBf16, kBf16}}, {{kK4, kV4}}}, 4);
  const Sequence s = make_mixed(pages, 128, 0, 3, {1});
  pages.set_class(2, 1);
  const std::vector<std::int64_t> from{1}, to{2}, open{3};
  ASSERT_TRUE(copy_pages(pages.view(), from, to).ok());
  EXPECT_FALSE(copy_pages(pages.view(), from, open).ok());
  Tensor k = Tensor::zeros(64, 64, DType::kF32), v = k;
  ASSERT_TRUE(unpack_slice(pages.view(), 2, 1, 0, 64, {k.bytes.data(), 64}, {v.bytes.data(), 64},
                           DType::kF32)
                  .ok());
  EXPECT_EQ(std::memcmp(k.row(0), s.k.row(64), k.bytes.size()), 0);
}

// A class that appears while a plan lives.
TEST_P(Compressed, ClassesMayBeAddedToALivingPlan) {
  ClassPages pages({1, 64, 64}, {{{kBf16, kBf16}}, {{kK4, kV4}}}, 4);
  const Sequence s = make_mixed(pages, 128, 0, 3, {0, 1});
  PagesView view = pages.view();
  view.num_classes = 1;
  auto plan = AttentionPlan::make(&view, 4);
  ASSERT_TRUE(plan.ok());
  const std::int32_t cu[] = {0, 1}, lens[] = {128}, table[] = {0, 1};
  ASSERT_TRUE((*plan)->prepare({1, cu, lens, table, 2, 2}).ok());
  view.num_classes = 2;
  const Tensor q = short_queries(1, 4 * 64, 5);
  Output got{Tensor::zeros(1, 4 * 64, DType::kF32), std::vector<float>(4), {}};
  ASSERT_TRUE((*plan)
                  ->attend(1, {q.bytes.data(), q.width, got.out.bytes.data(), got.out.width,
                               got.lse.data(), DType::kF32})
                  .ok());
  EXPECT_LT(compare(view, 4, {&s, 1, 128}, q, got).out, 3e-2);
}

}  // namespace
}  // namespace kvcore::kernels::test
