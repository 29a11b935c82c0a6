// Pages built by hand for kernel tests: any formats per head, shuffled page order, every byte that
// is not written by a test holds poison. Reference attention in double precision.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "base/page_layout.h"
#include "base/thread_pool.h"
#include "kernels/attention/attention.h"
#include "kernels/dispatch/table.h"
#include "kernels/layout/convert.h"
#include "kernels/layout/layout.h"
#include "kernels/merge/merge.h"

namespace kvcore::kernels::test {

enum class Poison { kNan, kInf, kHuge, kZero };

struct Shape {
  std::int32_t kv_heads = 2, head_dim_k = 64, head_dim_v = 64, page_size = 64;
  Format k_format = Format::kBf16, v_format = Format::kBf16;
  LayoutId layout = LayoutId::kPacked;
  std::int32_t layers = 2;
};

class TestPages {
 public:
  TestPages(const Shape& s, std::int64_t num_pages, Poison poison = Poison::kNan, unsigned seed = 1)
      : shape_(s) {
    std::int64_t offset = kSliceHeaderBytes;
    for (std::int32_t h = 0; h < s.kv_heads; ++h) {
      const std::int64_t k = offset;
      offset += std::int64_t{s.page_size} * s.head_dim_k * size_of(s.k_format);
      heads_.push_back({k, offset, s.k_format, s.v_format});
      offset += std::int64_t{s.page_size} * s.head_dim_v * size_of(s.v_format);
    }
    const std::int64_t slice = (offset + 63) / 64 * 64;
    for (std::int32_t l = 0; l < s.layers; ++l)
      layers_.push_back({l * slice, slice, heads_.data()});
    class_ = {layers_.data(), s.layout, true};
    memory_.resize(static_cast<std::size_t>(slice * s.layers * num_pages + 64));
    base_ = memory_.data() + (64 - reinterpret_cast<std::uintptr_t>(memory_.data()) % 64) % 64;
    for (std::int64_t p = 0; p < num_pages; ++p) records_.push_back({p * slice * s.layers, 0, 0});
    std::shuffle(records_.begin(), records_.end(), std::mt19937(seed));
    view_ = {base_,    records_.data(), &class_,      num_pages,    1,
             s.layers, s.kv_heads,      s.head_dim_k, s.head_dim_v, s.page_size};
    fill(poison);
  }

  const PagesView& view() const { return view_; }

  void fill(Poison poison) {
    const float value = poison == Poison::kNan    ? std::numeric_limits<float>::quiet_NaN()
                        : poison == Poison::kInf  ? std::numeric_limits<float>::infinity()
                        : poison == Poison::kHuge ? 1e38f
                                                  : 0.f;
    for (const PageRecord& r : records_)
      for (std::int32_t layer = 0; layer < shape_.layers; ++layer)
        for (const HeadBlock& h : heads_) {
          char* slice = reinterpret_cast<char*>(base_) + r.offset_bytes +
                        layers_[static_cast<std::size_t>(layer)].run_bytes;
          fill_block(slice + h.k_offset_bytes, h.k_format, shape_.head_dim_k, value);
          fill_block(slice + h.v_offset_bytes, h.v_format, shape_.head_dim_v, value);
        }
  }

 private:
  void fill_block(char* p, Format f, std::int32_t dim, float value) const {
    for (std::int64_t i = 0; i < std::int64_t{shape_.page_size} * dim; ++i)
      visit_dtype(dtype_of(f), [&](auto t) { store_value<t>(p, i, value); });
  }

  Shape shape_;
  std::vector<HeadBlock> heads_;
  std::vector<LayerView> layers_;
  ClassView class_{};
  std::vector<std::byte> memory_;
  std::byte* base_ = nullptr;
  std::vector<PageRecord> records_;
  PagesView view_{};
};

// A tensor [rows][width] of some dtype, made from random normal values.
struct Tensor {
  std::int64_t rows = 0, width = 0;
  DType dtype = DType::kF32;
  std::vector<char> bytes;

  static Tensor zeros(std::int64_t rows, std::int64_t width, DType dtype) {
    return {rows, width, dtype,
            std::vector<char>(static_cast<std::size_t>(rows * width * size_of(dtype)))};
  }
  static Tensor random(std::int64_t rows, std::int64_t width, DType dtype, unsigned seed) {
    Tensor t = zeros(rows, width, dtype);
    std::mt19937 rng(seed);
    std::normal_distribution<float> normal;
    for (std::int64_t i = 0; i < rows * width; ++i) t.set(i, normal(rng));
    return t;
  }
  void set(std::int64_t i, float value) {
    visit_dtype(dtype, [&](auto t) { store_value<t>(bytes.data(), i, value); });
  }
  float at(std::int64_t row, std::int64_t i) const {
    float value = 0;
    visit_dtype(dtype, [&](auto t) { value = load_value<t>(bytes.data(), row * width + i); });
    return value;
  }
  const char* row(std::int64_t r) const { return bytes.data() + r * width * size_of(dtype); }
  TokenRows rows_from(std::int64_t r) const { return {row(r), width}; }
};

// One sequence: its K and V in the pages, its block table.
struct Sequence {
  Tensor k, v;
  std::vector<std::int32_t> pages;
};

struct Output {
  Tensor out;
  std::vector<float> lse;
  std::vector<float> page_scores;  // [items][max_pages], where they were asked for
  bool same_row(std::int64_t row, const Output& o, std::int64_t other, std::int64_t heads) const {
    return std::memcmp(out.row(row), o.out.row(other),
                       static_cast<std::size_t>(out.width * size_of(out.dtype))) == 0 &&
           std::memcmp(lse.data() + row * heads, o.lse.data() + other * heads,
                       static_cast<std::size_t>(heads) * 4) == 0;
  }
};

// Writes tokens [0, context) of K and V into the given pages, at layer 1.
inline Sequence make_sequence(const TestPages& pages, std::int64_t context, std::int64_t first_page,
                              unsigned seed, DType dtype) {
  const PagesView& p = pages.view();
  Sequence s{Tensor::random(context, std::int64_t{p.num_kv_heads} * p.head_dim_k, dtype, seed),
             Tensor::random(context, std::int64_t{p.num_kv_heads} * p.head_dim_v, dtype, seed + 1),
             {}};
  std::vector<std::int64_t> slots;
  for (std::int64_t i = 0; i < context; ++i) {
    const std::int64_t page = first_page + i / p.page_size;
    if (i % p.page_size == 0) s.pages.push_back(static_cast<std::int32_t>(page));
    slots.push_back(page * p.page_size + i % p.page_size);
  }
  const Status status = append_kv(p, 1, s.k.rows_from(0), s.v.rows_from(0), dtype, slots);
  EXPECT_TRUE(status.ok()) << status.error().message;
  return s;
}

struct Item {
  const Sequence* sequence;
  std::int64_t q_len, context;
};

// Attends a batch at layer 1; q rows are the items' in order. The block table has no pages for what
// the window leaves behind.
template <class Pages>
Output attend(const Pages& pages, std::int32_t q_heads, const std::vector<Item>& items,
              const Tensor& q, ThreadPool* threads = nullptr, const PlanOptions& options = {},
              bool page_scores = false) {
  const PagesView& p = pages.view();
  std::vector<std::int32_t> cu{0}, contexts;
  std::size_t max_pages = 1;
  for (const Item& i : items) max_pages = std::max(max_pages, i.sequence->pages.size());
  std::vector<std::int32_t> table(items.size() * max_pages, -5);
  for (std::size_t i = 0; i < items.size(); ++i) {
    cu.push_back(cu.back() + static_cast<std::int32_t>(items[i].q_len));
    contexts.push_back(static_cast<std::int32_t>(items[i].context));
    std::copy(items[i].sequence->pages.begin(), items[i].sequence->pages.end(),
              table.begin() + static_cast<std::ptrdiff_t>(i * max_pages));
    const std::int64_t window = options.windows.empty() ? 0 : options.windows[0];
    const std::int64_t gone =
        window == 0 ? 0 : std::max<std::int64_t>(0, items[i].context - items[i].q_len + 1 - window);
    std::fill_n(table.begin() + static_cast<std::ptrdiff_t>(i * max_pages), gone / p.page_size, -1);
  }
  auto plan = AttentionPlan::make(&p, q_heads, 0, threads, options);
  EXPECT_TRUE(plan.ok()) << plan.error().message;
  const auto width = static_cast<std::int64_t>(max_pages);
  Status status = (*plan)->prepare({static_cast<std::int64_t>(items.size()), cu.data(),
                                    contexts.data(), table.data(), width, width});
  EXPECT_TRUE(status.ok()) << status.error().message;
  Output o{Tensor::zeros(cu.back(), std::int64_t{q_heads} * p.head_dim_v, q.dtype),
           std::vector<float>(static_cast<std::size_t>(cu.back() * q_heads), 77.f),
           std::vector<float>(page_scores ? table.size() : 0, 77.f)};
  status =
      (*plan)->attend(1, {q.bytes.data(), q.width, o.out.bytes.data(), o.out.width, o.lse.data(),
                          q.dtype, page_scores ? o.page_scores.data() : nullptr});
  EXPECT_TRUE(status.ok()) << status.error().message;
  return o;
}

// Rows [first, first + n) of a tensor.
inline Tensor slice(const Tensor& t, std::int64_t first, std::int64_t n) {
  Tensor r{n, t.width, t.dtype, {}};
  r.bytes.assign(t.row(first), t.row(first + n));
  return r;
}

struct Errors {
  double out = 0, lse = 0;
};

// Largest differences from a plain double-precision loop over the values as stored.
inline Errors compare(const PagesView& p, std::int32_t q_heads, const Item& item, const Tensor& q,
                      const Output& got, std::int64_t first_row = 0, std::int64_t window = 0,
                      double cap = 0) {
  Errors e;
  const std::int64_t group = q_heads / p.num_kv_heads, dk = p.head_dim_k, dv = p.head_dim_v;
  for (std::int64_t i = 0; i < item.q_len; ++i)
    for (std::int64_t h = 0; h < q_heads; ++h) {
      const std::int64_t row = first_row + i, visible = item.context - item.q_len + i + 1;
      const float lse = got.lse[static_cast<std::size_t>(row * q_heads + h)];
      std::vector<double> score, sum(static_cast<std::size_t>(dv), 0.0);
      const std::int64_t first = window == 0 ? 0 : std::max<std::int64_t>(0, visible - window);
      for (std::int64_t t = first; t < visible; ++t) {
        double dot = 0;
        for (std::int64_t d = 0; d < dk; ++d)
          dot += double{q.at(row, h * dk + d)} * double{item.sequence->k.at(t, h / group * dk + d)};
        const double scaled = dot / std::sqrt(static_cast<double>(dk));
        score.push_back(cap == 0 ? scaled : cap * std::tanh(scaled / cap));
      }
      if (score.empty()) {
        EXPECT_EQ(lse, -std::numeric_limits<float>::infinity());
        for (std::int64_t d = 0; d < dv; ++d) EXPECT_EQ(got.out.at(row, h * dv + d), 0.f);
        continue;
      }
      const double top = *std::max_element(score.begin(), score.end());
      double total = 0;
      for (std::int64_t t = first; t < visible; ++t) {
        const double w = std::exp(score[static_cast<std::size_t>(t - first)] - top);
        total += w;
        for (std::int64_t d = 0; d < dv; ++d)
          sum[static_cast<std::size_t>(d)] +=
              w * double{item.sequence->v.at(t, h / group * dv + d)};
      }
      e.lse = std::max(e.lse, std::abs(double{lse} - (top + std::log(total))));
      for (std::int64_t d = 0; d < dv; ++d) {
        const double x = sum[static_cast<std::size_t>(d)] / total, y = got.out.at(row, h * dv + d);
        e.out = std::isnan(y) ? 1e9 : std::max(e.out, std::abs(x - y));
      }
    }
  return e;
}

// Runs a test at every instruction set level of this machine.
class EveryIsa : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { ASSERT_TRUE(set_isa(GetParam()).ok()); }
  void TearDown() override { ASSERT_TRUE(set_isa(available_isas().back()).ok()); }
};
#define KVCORE_EVERY_ISA(suite)                                                  \
  INSTANTIATE_TEST_SUITE_P(Levels, suite, ::testing::ValuesIn(available_isas()), \
                           [](const auto& info) { return info.param; })

}  // namespace kvcore::kernels::test
