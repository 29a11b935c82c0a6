// A row's bits depend only on its query and its pages, whatever formats these have.
#include "kernels/class_pages.h"

namespace kvcore::kernels::test {
namespace {

class CompressedRows : public EveryIsa {};
KVCORE_EVERY_ISA(CompressedRows);

constexpr std::int32_t kQHeads = 6;
constexpr std::int64_t kContext = 1300;  // two segments, an odd last page

// Every format at least once as K and as V; open pages are of class 0.
const std::vector<ClassFormats> kClasses{
    {{Format::kBf16, Format::kBf16}, {Format::kBf16, Format::kBf16}},
    {{Format::kInt8, Format::kInt8}, {Format::kK4, Format::kV4}},
    {{Format::kFp8, Format::kFp8}, {Format::kK4, Format::kV3}},
    {{Format::kBf16, Format::kV4}, {Format::kInt8, Format::kV3}}};

struct Scene {
  explicit Scene(const std::vector<std::int32_t>& class_of, std::int32_t page = 64,
                 unsigned place = 1, std::byte poison = std::byte{0xff})
      : pages({2, 64, 96, page}, kClasses, 2 * (kContext / page + 2), place, poison),
        sequence(make_mixed(pages, kContext, 0, 7, class_of)),
        q(short_queries(kContext, kQHeads * 64, 8)) {}
  Output run(std::int64_t first, std::int64_t n, ThreadPool* threads = nullptr) const {
    return attend(pages, kQHeads, {{&sequence, n, first + n}}, slice(q, first, n), threads);
  }
  ClassPages pages;
  Sequence sequence;
  Tensor q;
};

// One class all along, and a mix.
const std::vector<std::vector<std::int32_t>> kOrders{{1}, {2}, {3}, {0, 1, 2, 3, 3, 1}};

void expect_rows(const Output& whole, std::int64_t first, const Output& part, const char* what) {
  for (std::int64_t i = 0; i < part.out.rows; ++i)
    ASSERT_TRUE(whole.same_row(first + i, part, i, kQHeads)) << what << ", token " << first + i;
}

TEST_P(CompressedRows, DecodeAndChunksEqualOnePrefill) {
  for (const auto& order : kOrders)
    for (const std::int32_t page : {16, 64, 128}) {
      const Scene s(order, page);
      const Output whole = s.run(0, kContext);
      for (const std::int64_t t : {0, 1, 15, 16, 63, 64, 65, 127, 511, 1023, 1024, 1298, 1299})
        expect_rows(whole, t, s.run(t, 1), "decode");
      for (const std::int64_t n : {3, 43, 64, 512})
        for (std::int64_t t = n == 3 ? 1000 : 0; t < (n == 3 ? 1060 : kContext); t += n)
          expect_rows(whole, t, s.run(t, std::min(n, kContext - t)), "chunk");
    }
}

TEST_P(CompressedRows, ThreadsAndBatchDoNotMatter) {
  for (const auto& order : kOrders) {
    Scene s(order);
    const Sequence other = make_mixed(s.pages, 333, 21, 50, {0, 2, 1});
    const Output whole = s.run(0, kContext);
    for (const int n : {2, 3}) {
      auto threads = ThreadPool::make(n);
      ASSERT_TRUE(threads.ok());
      expect_rows(whole, 0, s.run(0, kContext, threads->get()), "prefill");
      expect_rows(whole, 1299, s.run(1299, 1, threads->get()), "decode by segments");
      expect_rows(whole, 700, s.run(700, 1, threads->get()), "decode by heads");
    }
    Tensor q = slice(s.q, 900, 100);
    q.bytes.insert(q.bytes.begin(), s.q.row(100), s.q.row(133));
    const Output both = attend(s.pages, kQHeads, {{&other, 33, 333}, {&s.sequence, 100, 1000}}, q);
    for (std::int64_t i = 0; i < 100; ++i)
      ASSERT_TRUE(both.same_row(33 + i, whole, 900 + i, kQHeads)) << i;
  }
}

TEST_P(CompressedRows, PlaceAndPoisonDoNotMatter) {
  for (const auto& order : kOrders) {
    const Output want = Scene(order).run(1200, 100);
    for (const int poison : {0, 0x7f, 0x3c})
      expect_rows(want, 0, Scene(order, 64, 99, static_cast<std::byte>(poison)).run(1200, 100),
                  "poison");
  }
}

// What a row cannot see of its page does not matter: the same tokens with others behind them.
TEST_P(CompressedRows, LaterTokensOfThePageDoNotMatter) {
  for (const HeadFormats& f : {HeadFormats{Format::kInt8, Format::kInt8},
                               {Format::kInt8, Format::kV4},
                               {Format::kInt8, Format::kV3}}) {
    ClassPages pages({1, 64, 64}, {{f}}, 2);
    Sequence s = make_mixed(pages, 128, 0, 3, {0});
    const Tensor q = short_queries(1, 4 * 64, 5);
    const Output want = attend(pages, 4, {{&s, 1, 100}}, q);
    std::vector<float> k(64 * 64), v(64 * 64);
    for (std::int64_t t = 0; t < 64; ++t)
      for (std::int64_t d = 0; d < 64; ++d) {
        const auto i = static_cast<std::size_t>(t * 64 + d);
        k[i] = s.k.at(64 + t, d);
        v[i] = s.v.at(64 + t, d) * (t < 36 ? 1.f : 3.f);
      }
    pages.write(1, 0, Part::kV, 64, v.data());
    const Output got = attend(pages, 4, {{&s, 1, 100}}, q);
    // Decoding and encoding again may move the tokens that are seen by an ulp.
    for (std::int64_t d = 0; d < 4 * 64; ++d)
      ASSERT_NEAR(want.out.at(0, d), got.out.at(0, d), 2e-3) << codec_name(f.v);
  }
}

// Decoding over common pages together gives the bits of decoding alone.
TEST_P(CompressedRows, SharedPrefixesDoNotMatter) {
  ClassPages pages({2, 64, 96}, kClasses, 128);
  const Sequence root = make_mixed(pages, 3200, 0, 7, {0, 1, 2, 3});
  const auto branch = [&](std::int64_t shared, std::int64_t tail, std::int64_t first_page) {
    Sequence own = make_mixed(pages, tail, first_page, 9, {2, 1});
    own.pages.insert(own.pages.begin(), root.pages.begin(), root.pages.begin() + shared / 64);
    return own;
  };
  const Sequence two = branch(2048, 700, 52), one = branch(1024, 1100, 64);
  const Item items[] = {
      {&two, 1, 2748}, {&root, 1, 3200}, {&root, 5, 2600}, {&one, 1, 2124}, {&root, 1, 1024}};
  std::int64_t rows = 0;
  for (const Item& i : items) rows += i.q_len;
  const Tensor q = short_queries(rows, kQHeads * 64, 8);
  for (const int n : {1, 3}) {
    auto threads = ThreadPool::make(n);
    ASSERT_TRUE(threads.ok());
    const Output together =
        attend(pages, kQHeads, {std::begin(items), std::end(items)}, q, threads->get());
    std::int64_t row = 0;
    for (const Item& i : items) {
      const Output alone = attend(pages, kQHeads, {i}, slice(q, row, i.q_len));
      for (std::int64_t t = 0; t < i.q_len; ++t, ++row)
        ASSERT_TRUE(together.same_row(row, alone, t, kQHeads))
            << "threads " << n << ", row " << row;
    }
  }
}

}  // namespace
}  // namespace kvcore::kernels::test
