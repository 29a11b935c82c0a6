// Sliding windows and soft caps: the right numbers, and bits that depend on the tokens seen alone.
#include "kernels/class_pages.h"

namespace kvcore::kernels::test {
namespace {

class Window : public EveryIsa {};
KVCORE_EVERY_ISA(Window);

constexpr std::int32_t kQHeads = 6;
constexpr std::int64_t kContext = 1500;

const std::vector<ClassFormats> kClasses{
    {{Format::kBf16, Format::kBf16}, {Format::kBf16, Format::kBf16}},
    {{Format::kInt8, Format::kInt8}, {Format::kK4, Format::kV4}},
    {{Format::kFp8, Format::kFp8}, {Format::kK4, Format::kV3}},
    {{Format::kBf16, Format::kV4}, {Format::kInt8, Format::kV3}}};

template <class Pages>
struct Scene {
  Pages& pages;
  const Sequence& sequence;
  Tensor q;
  PlanOptions options;

  Output run(std::int64_t first, std::int64_t n, ThreadPool* threads = nullptr) const {
    return attend(pages, kQHeads, {{&sequence, n, first + n}}, slice(q, first, n), threads,
                  options);
  }
};

void expect_rows(const Output& whole, std::int64_t first, const Output& part, const char* what) {
  for (std::int64_t i = 0; i < part.out.rows; ++i)
    ASSERT_TRUE(whole.same_row(first + i, part, i, kQHeads)) << what << ", token " << first + i;
}

// One prefill of everything against decoding, chunks and threads.
template <class Pages>
void expect_invariance(const Scene<Pages>& s) {
  const Output whole = s.run(0, kContext);
  for (const std::int64_t t : {0,   1,   15,  16,   63,   64,   65,   99,   100,  101,
                               127, 511, 700, 1023, 1024, 1087, 1123, 1124, 1298, 1499})
    expect_rows(whole, t, s.run(t, 1), "decode");
  for (const std::int64_t n : {3, 43})
    for (std::int64_t t = n == 3 ? 1000 : 900; t < (n == 3 ? 1060 : kContext); t += n)
      expect_rows(whole, t, s.run(t, std::min(n, kContext - t)), "chunk");
  auto threads = ThreadPool::make(3);
  ASSERT_TRUE(threads.ok());
  expect_rows(whole, 0, s.run(0, kContext, threads->get()), "prefill");
  expect_rows(whole, 1499, s.run(1499, 1, threads->get()), "decode by segments");
  expect_rows(whole, 1010, s.run(1010, 30, threads->get()), "a chunk over two segments");
}

TEST_P(Window, MatchesDoublePrecision) {
  for (const Format f : {Format::kBf16, Format::kF16, Format::kF32})
    for (const std::int32_t page : {16, 32, 64, 128})
      for (const std::int64_t window : {1, 2, 16, 63, 64, 100, 1024, 1100, 5000})
        for (const double cap : {0.0, 2.0}) {
          const TestPages pages({2, 64, 96, page, f, f}, kContext / page + 1);
          const Sequence s = make_sequence(pages, kContext, 0, 7, dtype_of(f));
          const Tensor q = Tensor::random(3, kQHeads * 64, dtype_of(f), 8);
          const Output got = attend(pages, kQHeads, {{&s, 3, 1420}}, q, nullptr, {{window}, cap});
          const Errors e = compare(pages.view(), kQHeads, {&s, 3, 1420}, q, got, 0, window, cap);
          const double loose = f == Format::kBf16 ? 0.02 : f == Format::kF16 ? 2e-3 : 1e-5;
          EXPECT_LT(e.out, loose) << "window " << window << ", page " << page << ", cap " << cap;
          EXPECT_LT(e.lse, 1e-5) << "window " << window << ", page " << page << ", cap " << cap;
        }
}

TEST_P(Window, RowsOfNumbersAreInvariant) {
  for (const Format f : {Format::kBf16, Format::kF16, Format::kF32})
    for (const std::int32_t page : {16, 64, 128})
      for (const std::int64_t window : {5, 100, 1100}) {
        const TestPages pages({2, 64, 96, page, f, f}, kContext / page + 1);
        const Sequence s = make_sequence(pages, kContext, 0, 7, dtype_of(f));
        expect_invariance<const TestPages>(
            {pages, s, Tensor::random(kContext, kQHeads * 64, dtype_of(f), 8), {{window}, 0}});
      }
}

TEST_P(Window, RowsOfCodesAreInvariant) {
  const std::vector<std::vector<std::int32_t>> orders{{1}, {2}, {3}, {0, 1, 2, 3, 3, 1}};
  for (const auto& order : orders)
    for (const std::int32_t page : {16, 128})
      for (const std::int64_t window : {100, 1100}) {
        ClassPages pages({2, 64, 96, page}, kClasses, kContext / page + 1);
        const Sequence s = make_mixed(pages, kContext, 0, 7, order);
        expect_invariance<ClassPages>(
            {pages, s, short_queries(kContext, kQHeads * 64, 8), {{window}, 3.0}});
      }
}

TEST_P(Window, OneThatHidesNothingChangesNoBit) {
  const TestPages pages({2, 64, 96, 64}, kContext / 64 + 1);
  const Sequence s = make_sequence(pages, kContext, 0, 7, DType::kBf16);
  const Tensor q = Tensor::random(70, kQHeads * 64, DType::kBf16, 8);
  const Output want = attend(pages, kQHeads, {{&s, 70, kContext}}, q);
  const Output got = attend(pages, kQHeads, {{&s, 70, kContext}}, q, nullptr, {{kContext}, 0});
  expect_rows(want, 0, got, "window of the whole context");
}

// Pages that several sequences have in common, which the windows of some have left behind.
TEST_P(Window, SharedPrefixesDoNotMatter) {
  const TestPages pages({2, 64, 96, 64}, 128);
  const Sequence root = make_sequence(pages, 3200, 0, 7, DType::kBf16);
  const Item items[] = {{&root, 1, 3200}, {&root, 1, 2300}, {&root, 1, 2200},
                        {&root, 1, 2100}, {&root, 5, 2600}, {&root, 1, 1024}};
  const Tensor q = Tensor::random(10, kQHeads * 64, DType::kBf16, 8);
  for (const std::int64_t window : {100, 2250, 4000})
    for (const int n : {1, 3}) {
      auto threads = ThreadPool::make(n);
      ASSERT_TRUE(threads.ok());
      const Output together = attend(pages, kQHeads, {std::begin(items), std::end(items)}, q,
                                     threads->get(), {{window}, 0});
      std::int64_t row = 0;
      for (const Item& i : items) {
        const Output alone =
            attend(pages, kQHeads, {i}, slice(q, row, i.q_len), nullptr, {{window}, 0});
        expect_rows(together, row, alone, "alone");
        row += i.q_len;
      }
    }
}

TEST(WindowOptions, AreChecked) {
  const TestPages pages({2, 64, 96, 64}, 4);
  const auto make = [&](PlanOptions options) {
    return AttentionPlan::make(&pages.view(), kQHeads, 0, nullptr, std::move(options)).ok();
  };
  EXPECT_TRUE(make({{}, 0}));
  EXPECT_TRUE(make({{0, 5}, 30}));
  EXPECT_FALSE(make({{1, 2, 3}, 0}));
  EXPECT_FALSE(make({{-1}, 0}));
  EXPECT_FALSE(make({{}, -1}));
  EXPECT_FALSE(make({{}, 1e-4}));
}

}  // namespace
}  // namespace kvcore::kernels::test
