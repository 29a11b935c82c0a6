// A row's bits depend only on its query and its pages.
#include "kernels/fixture.h"

namespace kvcore::kernels::test {
namespace {

class Invariance : public EveryIsa {
 protected:
  static constexpr std::int64_t kContext = 1300;  // two segments, an odd last page
};
KVCORE_EVERY_ISA(Invariance);

constexpr std::int32_t kQHeads = 6;

struct Scene {
  explicit Scene(Format f, std::int32_t page = 64, Poison poison = Poison::kNan, unsigned seed = 1)
      : pages({2, 64, 96, page, f, f}, 3 * (1300 / page + 1), poison, seed),
        sequence(make_sequence(pages, 1300, 0, 7, dtype_of(f))),
        q(Tensor::random(1300, kQHeads * 64, dtype_of(f), 8)) {}
  Output run(std::int64_t first, std::int64_t n, ThreadPool* threads = nullptr) const {
    return attend(pages, kQHeads, {{&sequence, n, first + n}}, slice(q, first, n), threads);
  }
  TestPages pages;
  Sequence sequence;
  Tensor q;
};

void expect_rows(const Output& whole, std::int64_t first, const Output& part, const char* what) {
  for (std::int64_t i = 0; i < part.out.rows; ++i)
    ASSERT_TRUE(whole.same_row(first + i, part, i, kQHeads)) << what << ", token " << first + i;
}

TEST_P(Invariance, DecodeAndChunksEqualOnePrefill) {
  for (const Format f : {Format::kBf16, Format::kF16, Format::kF32}) {
    const Scene s(f);
    const Output whole = s.run(0, kContext);
    for (const std::int64_t t :
         {0, 1, 2, 15, 62, 63, 64, 65, 127, 511, 1022, 1023, 1024, 1025, 1298, 1299})
      expect_rows(whole, t, s.run(t, 1), "decode");
    for (const std::int64_t n : {3, 17, 40, 43, 64, 100, 512})
      for (std::int64_t t = n == 3 ? 1000 : 0; t < (n == 3 ? 1060 : kContext); t += n)
        expect_rows(whole, t, s.run(t, std::min(n, kContext - t)), "chunk");
  }
}

TEST_P(Invariance, ThreadsDoNotMatter) {
  const Scene s(Format::kBf16);
  const Output whole = s.run(0, kContext);
  for (const int n : {2, 3}) {
    auto threads = ThreadPool::make(n);
    ASSERT_TRUE(threads.ok());
    expect_rows(whole, 0, s.run(0, kContext, threads->get()), "prefill");
    expect_rows(whole, 1299, s.run(1299, 1, threads->get()), "decode by segments");
    expect_rows(whole, 700, s.run(700, 1, threads->get()), "decode by heads");
    expect_rows(whole, 1280, s.run(1280, 20, threads->get()), "short chunk");
  }
}

TEST_P(Invariance, BatchDoesNotMatter) {
  const Scene s(Format::kBf16);
  const Sequence other = make_sequence(s.pages, 333, 25, 50, DType::kBf16);
  Tensor q = slice(s.q, 900, 100);
  q.bytes.insert(q.bytes.begin(), s.q.row(100), s.q.row(133));
  const Output both = attend(s.pages, kQHeads, {{&other, 33, 333}, {&s.sequence, 100, 1000}}, q);
  const Output alone = s.run(900, 100);
  for (std::int64_t i = 0; i < 100; ++i) ASSERT_TRUE(both.same_row(33 + i, alone, i, kQHeads));
}

TEST_P(Invariance, PoisonAndPlaceDoNotMatter) {
  for (const Format f : {Format::kBf16, Format::kF16, Format::kF32})
    for (const std::int64_t context : {1, 2, 63, 64, 65, 1024, 1027}) {
      const Scene clean(f, 64, Poison::kZero);
      const Output want = clean.run(context - 1, 1);
      for (const Poison poison : {Poison::kNan, Poison::kInf, Poison::kHuge}) {
        Scene s(f, 64, poison, 99);  // other physical places, too
        s.pages.fill(poison);        // keep only the first tokens, with nothing behind them
        std::vector<std::int64_t> slots(static_cast<std::size_t>(context));
        std::iota(slots.begin(), slots.end(), 0);
        ASSERT_TRUE(append_kv(s.pages.view(), 1, s.sequence.k.rows_from(0),
                              s.sequence.v.rows_from(0), dtype_of(f), slots)
                        .ok());
        const Output got =
            attend(s.pages, kQHeads, {{&s.sequence, 1, context}}, slice(s.q, context - 1, 1));
        ASSERT_TRUE(want.same_row(0, got, 0, kQHeads)) << "context " << context;
      }
    }
}

TEST_P(Invariance, LaterTokensOfTheChunkDoNotMatter) {
  Scene s(Format::kBf16);
  const Output want = s.run(1200, 100);
  Tensor bad = Tensor::zeros(1, 2 * 96, DType::kBf16);
  for (std::int64_t i = 0; i < bad.width; ++i) bad.set(i, std::numeric_limits<float>::quiet_NaN());
  const std::int64_t slot[] = {1250};
  ASSERT_TRUE(
      append_kv(s.pages.view(), 1, bad.rows_from(0), bad.rows_from(0), DType::kBf16, slot).ok());
  const Output got = s.run(1200, 100);
  for (std::int64_t i = 0; i < 50; ++i) ASSERT_TRUE(want.same_row(i, got, i, kQHeads)) << i;
  for (std::int64_t i = 50; i < 100; ++i) ASSERT_FALSE(want.same_row(i, got, i, kQHeads)) << i;
}

TEST_P(Invariance, PageSizeAndLayoutDoNotMatter) {
  for (const Format f : {Format::kBf16, Format::kF16, Format::kF32}) {
    const Output want = Scene(f).run(1100, 200);
    for (const std::int32_t page : {16, 32, 128})
      expect_rows(want, 0, Scene(f, page).run(1100, 200), "page");
    const TestPages canonical({2, 64, 96, 64, f, f, LayoutId::kCanonical}, 21);
    const Sequence sequence = make_sequence(canonical, kContext, 0, 7, dtype_of(f));
    const Tensor q = slice(Tensor::random(1300, kQHeads * 64, dtype_of(f), 8), 1100, 200);
    expect_rows(want, 0, attend(canonical, kQHeads, {{&sequence, 200, 1300}}, q), "canonical");
  }
}

// A sequence that goes on from the first `shared` tokens of `from` with `tail` tokens of its own.
Sequence branch(const TestPages& pages, const Sequence& from, std::int64_t shared,
                std::int64_t tail, std::int64_t first_page, unsigned seed) {
  Sequence own = make_sequence(pages, tail, first_page, seed, DType::kBf16);
  own.pages.insert(own.pages.begin(), from.pages.begin(),
                   from.pages.begin() + shared / pages.view().page_size);
  return own;
}

// Decoding over common pages together gives the bits of decoding alone: common to all, to some, to
// the whole of a sequence, ending inside a segment, in any order, beside a prefill.
TEST_P(Invariance, SharedPrefixesDoNotMatter) {
  for (const std::int32_t page : {64, 128}) {
    const std::int64_t unit = page;
    const TestPages pages({2, 64, 96, page, Format::kBf16, Format::kBf16}, 8192 / page, Poison::kNan,
                          1);
    const auto at = [&](std::int64_t token) { return token / unit; };
    const Sequence root = make_sequence(pages, 3200, 0, 7, DType::kBf16);
    const Sequence two = branch(pages, root, 2048, 700, at(3328), 9);
    const Sequence one = branch(pages, root, 1024, 1100, at(4096), 10);
    const Sequence none = make_sequence(pages, 1300, at(5376), 11, DType::kBf16);
    const Sequence part = branch(pages, root, 1536, 300, at(6784), 12);
    const Item items[] = {{&two, 1, 2748}, {&none, 1, 1300}, {&root, 1, 3200}, {&root, 5, 2600},
                          {&one, 1, 2124}, {&root, 1, 1024}, {&part, 1, 1836}, {&root, 1, 3000},
                          {&none, 1, 70}};
    std::int64_t rows = 0;
    for (const Item& i : items) rows += i.q_len;
    const Tensor q = Tensor::random(rows, kQHeads * 64, DType::kBf16, 8);
    for (const int n : {1, 2, 3}) {
      auto threads = ThreadPool::make(n);
      ASSERT_TRUE(threads.ok());
      const Output together =
          attend(pages, kQHeads, {std::begin(items), std::end(items)}, q, threads->get());
      std::int64_t row = 0;
      for (const Item& i : items) {
        const Output alone = attend(pages, kQHeads, {i}, slice(q, row, i.q_len));
        for (std::int64_t t = 0; t < i.q_len; ++t, ++row)
          ASSERT_TRUE(together.same_row(row, alone, t, kQHeads))
              << "page " << page << ", threads " << n << ", row " << row;
      }
    }
  }
}

// Partial results over page ranges that start at segment boundaries merge to the same bits.
TEST_P(Invariance, MergedPartialsEqualTheWhole) {
  const Scene s(Format::kF32);
  const Tensor q = slice(s.q, 1299, 1);
  const Output whole = s.run(1299, 1);
  Sequence tail = s.sequence;
  tail.pages.erase(tail.pages.begin(), tail.pages.begin() + 16);
  Output a = attend(s.pages, kQHeads, {{&s.sequence, 1, 1024}}, q);
  const Output b = attend(s.pages, kQHeads, {{&tail, 1, 1300 - 1024}}, q);
  ASSERT_TRUE(merge_states({a.out.bytes.data(), a.lse.data(), b.out.bytes.data(), b.lse.data(),
                            a.out.bytes.data(), a.lse.data(), kQHeads, 96, DType::kF32})
                  .ok());
  EXPECT_TRUE(whole.same_row(0, a, 0, kQHeads));
}

}  // namespace
}  // namespace kvcore::kernels::test
