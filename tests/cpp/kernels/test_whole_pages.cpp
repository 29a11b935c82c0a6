// Steps of whole pages, which have functions of their own (hot_step_impl.h, small_step_impl.h):
// the right numbers, the bits of the general way, and the same bits for every way to ask for them.
#include "kernels/class_pages.h"

namespace kvcore::kernels::test {
namespace {

constexpr Format kBf16 = Format::kBf16, kInt8 = Format::kInt8, kK4 = Format::kK4, kV4 = Format::kV4,
                 kV3 = Format::kV3;
constexpr HeadFormats kPairs[] = {{kInt8, kInt8}, {kK4, kV4},    {kK4, kV3},   {kInt8, kV4},
                                  {kInt8, kV3},   {kK4, kInt8},  {kBf16, kV4}, {kBf16, kInt8},
                                  {kK4, kBf16},   {kInt8, kBf16}};
constexpr std::int32_t kSizes[] = {16, 32, 64};

class WholePages : public EveryIsa {};
KVCORE_EVERY_ISA(WholePages);

std::string what(const HeadFormats& f, std::int32_t page) {
  return name_of(f) + ", page " + std::to_string(page);
}

// Contexts that end with a step, with a page inside one, and inside a page; chunks over both.
TEST_P(WholePages, MatchTheDecodedRows) {
  for (const HeadFormats& f : kPairs)
    for (const std::int32_t page : kSizes) {
      ClassPages pages({2, 80, 128, page}, {{f, f}}, 320 / page + 5);
      const Sequence s = make_mixed(pages, 320, 2, 10, {0});
      const std::vector<Item> items{{&s, 1, 320}, {&s, 1, 304}, {&s, 1, 290},
                                    {&s, 1, 64},  {&s, 1, 65},  {&s, 7, 131}};
      expect_close(pages, 6, items, f, what(f, page));
      expect_close(pages, 6, items, f, what(f, page) + ", soft cap", 0, 2.0);
      for (const std::int64_t window : {64, 100, 250})
        expect_close(pages, 6, {{&s, 1, 320}, {&s, 5, 290}}, f,
                     what(f, page) + ", window " + std::to_string(window), window, 3.0);
    }
}

TEST_P(WholePages, GroupsAndHeadDims) {
  for (const HeadFormats& f : {HeadFormats{kInt8, kInt8}, {kK4, kV4}, {kK4, kV3}, {kBf16, kV4}})
    for (const std::int32_t page : {16, 32})
      for (const std::int32_t group : {1, 2, 3, 4, 5, 6, 7, 13})
        for (const std::int32_t dim : {64, 128, 192, 256}) {
          if (group != 4 && dim != 64) continue;
          ClassPages pages({1, dim, dim, page}, {{f}}, 9);
          const Sequence s = make_mixed(pages, 131, 0, 3, {0});
          expect_close(pages, group, {{&s, 1, 128}, {&s, 3, 131}}, f,
                       what(f, page) + ", group " + std::to_string(group) + ", head_dim " +
                           std::to_string(dim));
        }
}

// Heads of one format beside heads of several, in pages of one step: which way a step goes differs
// from head to head. The first page and the last one are open, as sequences have them.
const std::vector<ClassFormats> kClasses{{{kBf16, kBf16}, {kBf16, kBf16}, {kBf16, kBf16}},
                                         {{kInt8, kInt8}, {kInt8, kInt8}, {kK4, kV4}},
                                         {{kInt8, kInt8}, {kK4, kV4}, {kK4, kV4}},
                                         {{kK4, kV3}, {kK4, kV4}, {kInt8, kV4}}};
const std::vector<std::vector<std::int32_t>> kOrders{
    {1}, {2}, {3}, {1, 2, 2, 2}, {2, 1, 1, 2}, {2, 2, 3, 3}, {3, 1, 2, 2, 1}};

std::vector<std::int32_t> with_open_ends(const std::vector<std::int32_t>& order,
                                         std::int64_t pages) {
  std::vector<std::int32_t> all;
  for (std::int64_t i = 0; i < pages; ++i)
    all.push_back(order[static_cast<std::size_t>(i) % order.size()]);
  all.front() = all.back() = 0;
  return all;
}

struct Scene {
  static constexpr std::int64_t kContext = 1090;
  static constexpr std::int32_t kQHeads = 12;

  Scene(const std::vector<std::int32_t>& order, std::int32_t page)
      : pages({3, 64, 128, page}, kClasses, kContext / page + 2),
        sequence(
            make_mixed(pages, kContext, 0, 7, with_open_ends(order, (kContext + page - 1) / page))),
        q(short_queries(kContext, kQHeads * 64, 8)) {}
  Output run(std::int64_t first, std::int64_t n, const PlanOptions& options = {},
             ThreadPool* threads = nullptr) const {
    return attend(pages, kQHeads, {{&sequence, n, first + n}}, slice(q, first, n), threads,
                  options);
  }
  ClassPages pages;
  Sequence sequence;
  Tensor q;
};

TEST_P(WholePages, MixesOfClassesMatchTheDecodedRows) {
  for (const auto& order : kOrders)
    for (const std::int32_t page : {16, 32}) {
      const Scene s(order, page);
      expect_close(s.pages, Scene::kQHeads, {{&s.sequence, 1, 450}}, {kK4, kV3},
                   "page " + std::to_string(page));
    }
}

void expect_rows(const Output& whole, std::int64_t first, const Output& part, const char* how) {
  for (std::int64_t i = 0; i < part.out.rows; ++i)
    ASSERT_TRUE(whole.same_row(first + i, part, i, Scene::kQHeads))
        << how << ", token " << first + i;
}

TEST_P(WholePages, DecodeChunksAndThreadsEqualOnePrefill) {
  auto threads = ThreadPool::make(3);
  ASSERT_TRUE(threads.ok());
  for (const std::vector<std::int32_t>& order : {kOrders[6]})
    for (const std::int32_t page : {16, 32})
      for (const PlanOptions& options : {PlanOptions{}, PlanOptions{{100}, 3.0}}) {
        const Scene s(order, page);
        const Output whole = s.run(0, Scene::kContext, options);
        for (const std::int64_t t : {0, 15, 16, 62, 63, 64, 127, 500, 1023, 1024, 1089})
          expect_rows(whole, t, s.run(t, 1, options), "decode");
        expect_rows(whole, 1000, s.run(1000, 43, options), "chunk");
        expect_rows(whole, 1089, s.run(1089, 1, options, threads->get()), "decode by segments");
        expect_rows(whole, 1010, s.run(1010, 70, options, threads->get()), "chunk by threads");
      }
}

// --- the bits of the general way ---------------------------------------------------------------
// A window that begins with token 1 sends the first step the general way. Where the score of token
// 0 is so low that its probability is 0, that must not change a bit of anything.

// Queries that are alike, so that one key can be far from all of them.
Tensor alike_queries(std::int32_t heads, std::int32_t dim) {
  const Tensor base = short_queries(1, dim, 5);
  Tensor q = short_queries(1, std::int64_t{heads} * dim, 6);
  for (std::int64_t i = 0; i < q.width; ++i)
    q.set(i, short_float(base.at(0, i % dim) + 0.25f * q.at(0, i)));
  return q;
}

void hide_first_token(ClassPages& pages, const Sequence& s, const Tensor& q) {
  const PagesView& p = pages.view();
  const std::int64_t dim = p.head_dim_k;
  for (std::int32_t h = 0; h < p.num_kv_heads; ++h) {
    std::vector<float> rows(static_cast<std::size_t>(p.page_size * dim));
    for (std::int64_t t = 0; t < p.page_size; ++t)
      for (std::int64_t d = 0; d < dim; ++d)
        rows[static_cast<std::size_t>(t * dim + d)] =
            t == 0 ? -40.f * q.at(0, d) : s.k.at(t, h * dim + d);
    pages.write(s.pages[0], h, Part::kK, p.page_size, rows.data());
  }
}

TEST_P(WholePages, DoTheOperationsOfTheGeneralWay) {
  for (const HeadFormats& f : kPairs)
    for (const std::int32_t page : kSizes)
      for (const std::int32_t group : {1, 2, 3, 4, 5, 6, 7}) {
        ClassPages pages({2, 64, 128, page}, {{f, f}}, 200 / page + 2);
        const Sequence s = make_mixed(pages, 192, 0, 10, {0});
        const std::int32_t heads = 2 * group;
        const Tensor q = alike_queries(heads, 64);
        hide_first_token(pages, s, q);
        for (const std::int64_t context : {64, 130}) {
          const std::vector<Item> items{{&s, 1, context}};
          const Output fast = attend(pages, heads, items, q, nullptr, {}, true);
          const Output general = attend(pages, heads, items, q, nullptr, {{context - 1}, 0}, true);
          ASSERT_TRUE(fast.same_row(0, general, 0, heads))
              << what(f, page) << ", group " << group << ", context " << context;
          ASSERT_EQ(fast.page_scores, general.page_scores) << what(f, page) << ", group " << group;
        }
      }
}

// --- page scores -------------------------------------------------------------------------------

// The probability mass of each page in double precision, summed over q heads.
std::vector<double> masses(const PagesView& p, std::int32_t q_heads, const Sequence& s,
                           std::int64_t context, const Tensor& q) {
  std::vector<double> mass(s.pages.size(), 0.0);
  const std::int64_t dk = p.head_dim_k, group = q_heads / p.num_kv_heads;
  for (std::int64_t h = 0; h < q_heads; ++h) {
    std::vector<double> weight;
    for (std::int64_t t = 0; t < context; ++t) {
      double dot = 0;
      for (std::int64_t d = 0; d < dk; ++d)
        dot += double{q.at(0, h * dk + d)} * double{s.k.at(t, h / group * dk + d)};
      weight.push_back(std::exp(dot / std::sqrt(static_cast<double>(dk))));
    }
    const double total = std::accumulate(weight.begin(), weight.end(), 0.0);
    for (std::size_t t = 0; t < weight.size(); ++t)
      mass[t / static_cast<std::size_t>(p.page_size)] += weight[t] / total;
  }
  return mass;
}

TEST_P(WholePages, PageScoresAreTheMassesOfPages) {
  for (const HeadFormats& f : kPairs)
    for (const std::int32_t page : kSizes) {
      ClassPages pages({2, 64, 64, page}, {{f, f}}, 600 / page + 2);
      const Sequence s = make_mixed(pages, 530, 0, 10, {0});
      const Tensor q = short_queries(1, 8 * 64, 5);
      const std::vector<double> want = masses(pages.view(), 8, s, 530, q);
      const Output got = attend(pages, 8, {{&s, 1, 530}}, q, nullptr, {}, true);
      const double loose = f.k == kK4 ? 0.08 : 1e-3;  // of a score, as for the lse
      for (std::size_t i = 0; i < want.size(); ++i)
        EXPECT_NEAR(got.page_scores[i], want[i], 2 * loose * want[i])
            << what(f, page) << ", page " << i;
      EXPECT_NEAR(std::accumulate(got.page_scores.begin(), got.page_scores.end(), 0.0), 8, 1e-3);
    }
}

}  // namespace
}  // namespace kvcore::kernels::test
