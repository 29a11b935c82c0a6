// Pages of several classes for kernel tests: any format for K and V of each head, any class for
// each page of a sequence. What no encoder writes, padding and slots of open pages behind the last
// token, holds poison.
#pragma once

#include <utility>

#include "base/block_arrays.h"
#include "kernels/fixture.h"
#include "kernels/formats/formats.h"
#include "kernels/layout/head_layout.h"

namespace kvcore::kernels::test {

struct HeadFormats {
  Format k, v;
};
using ClassFormats = std::vector<HeadFormats>;  // of layer 1, by KV head; layer 0 has them reversed

inline std::int64_t head_block_bytes(Format f, Part part, std::int64_t tokens, std::int64_t dim) {
  return holds_elements(f) ? tokens * dim * size_of(f) : block_arrays(f, part, tokens, dim).bytes;
}

class ClassPages {
 public:
  // The formats in `s` are not used.
  ClassPages(const Shape& s, std::vector<ClassFormats> classes, std::int64_t num_pages,
             unsigned seed = 1, std::byte poison = std::byte{0xff})
      : shape_(s), poison_(poison) {
    heads_.resize(classes.size() * 2);
    std::int64_t page_bytes = 0;
    for (std::size_t c = 0; c < classes.size(); ++c) {
      std::int64_t first = 0;
      for (std::size_t l = 0; l < 2; ++l) {
        if (l == 1) std::reverse(classes[c].begin(), classes[c].end());
        first += add_layer(c, l, classes[c], first);
      }
      page_bytes = std::max(page_bytes, first);
    }
    for (std::size_t c = 0; c < classes.size(); ++c)
      views_.push_back({layers_.data() + 2 * c, LayoutId::kPacked, true});
    memory_.assign(static_cast<std::size_t>(page_bytes * num_pages + 64), poison);
    base_ = memory_.data() + (64 - reinterpret_cast<std::uintptr_t>(memory_.data()) % 64) % 64;
    for (std::int64_t p = 0; p < num_pages; ++p) records_.push_back({p * page_bytes, 0, 0});
    std::shuffle(records_.begin(), records_.end(), std::mt19937(seed));
    view_ = {base_,
             records_.data(),
             views_.data(),
             num_pages,
             static_cast<std::int32_t>(views_.size()),
             2,
             s.kv_heads,
             s.head_dim_k,
             s.head_dim_v,
             s.page_size};
  }

  const PagesView& view() const { return view_; }
  void set_class(std::int64_t page, std::int32_t class_id) {
    records_[static_cast<std::size_t>(page)].class_id = class_id;
  }

  // One head's part of layer 1 of a page from float rows, of which the first `count` are tokens;
  // `rows` become what the page then holds.
  void write(std::int64_t page, std::int32_t head, Part part, std::int64_t count, float* rows) {
    const HeadBlock& h = view_.classes[view_.records[page].class_id].layers[1].heads[head];
    const bool k = part == Part::kK;
    const Format f = k ? h.k_format : h.v_format;
    const std::int64_t dim = k ? shape_.head_dim_k : shape_.head_dim_v, tokens = shape_.page_size;
    std::byte* block = slice(page) + (k ? h.k_offset_bytes : h.v_offset_bytes);
    if (holds_elements(f)) {
      std::vector<char> row(static_cast<std::size_t>(dim * size_of(f)));
      for (std::int64_t t = 0; t < count; ++t) {
        convert_row(reinterpret_cast<const char*>(rows + t * dim), DType::kF32, row.data(),
                    dtype_of(f), dim);
        move_rows<false>(part, {tokens, dim, f, LayoutId::kPacked}, reinterpret_cast<char*>(block),
                         t, 1, Rows<const char>{row.data(), dim * size_of(f)});
        convert_row(row.data(), dtype_of(f), reinterpret_cast<char*>(rows + t * dim), DType::kF32,
                    dim);
      }
      return;
    }
    const BlockSpec spec{f, part, tokens, dim};
    const auto bytes = static_cast<std::size_t>(block_arrays(f, part, tokens, dim).bytes);
    const Status made = encode_page_block(spec, rows, dim, DType::kF32, {block, bytes});
    EXPECT_TRUE(made.ok()) << made.error().message;
    EXPECT_TRUE(decode_page_block(spec, {block, bytes}, rows, dim, DType::kF32).ok());
    poison_padding(spec, block);
  }

 private:
  std::int64_t add_layer(std::size_t c, std::size_t layer, const ClassFormats& formats,
                         std::int64_t first) {
    std::int64_t at = kSliceHeaderBytes;
    std::vector<HeadBlock>& heads = heads_[2 * c + layer];
    for (const HeadFormats& f : formats) {
      const std::int64_t v =
          at + head_block_bytes(f.k, Part::kK, shape_.page_size, shape_.head_dim_k);
      heads.push_back({at, v, f.k, f.v});
      at = v + head_block_bytes(f.v, Part::kV, shape_.page_size, shape_.head_dim_v);
    }
    at = (at + 63) / 64 * 64;
    layers_.push_back({first, at, heads.data()});
    return at;
  }

  std::byte* slice(std::int64_t page) {
    const PageRecord& r = view_.records[page];
    return base_ + r.offset_bytes + view_.classes[r.class_id].layers[1].run_bytes;
  }

  void poison_padding(const BlockSpec& s, std::byte* block) const {
    const BlockArrays at = block_arrays(s.format, s.part, s.tokens, s.dim);
    const bool k4 = s.format == Format::kK4, mean = s.part == Part::kK && !k4;
    const auto fill = [&](std::int64_t from, std::int64_t to) {
      std::fill(block + from, block + to, poison_);
    };
    fill(mean ? 2 * s.dim : 0, at.grid);
    fill(at.grid + (k4 ? 4 : 0), at.scale);
    fill(at.scale + (k4 ? s.dim : s.format == Format::kFp8 ? 2 : 2 * s.tokens), at.minimum);
    fill(at.minimum + (k4 ? s.dim : 0), at.codes);
    fill(at.codes + code_bytes(s.format, s.tokens, s.dim), at.bytes);
  }

  Shape shape_;
  std::byte poison_;
  std::vector<std::vector<HeadBlock>> heads_;  // [class][layer]
  std::vector<LayerView> layers_;
  std::vector<ClassView> views_;
  std::vector<std::byte> memory_;
  std::byte* base_ = nullptr;
  std::vector<PageRecord> records_;
  PagesView view_{};
};

// Floats with a few bits, so that bf16 holds them exactly.
inline float short_float(float x) { return bf16_to_float(float_to_bf16(x)); }

// A sequence of `context` tokens on pages from first_page on; page i is of class
// class_of[i % size]. K and V are what the pages hold. Keys have a few channels far from 0.
inline Sequence make_mixed(ClassPages& pages, std::int64_t context, std::int64_t first_page,
                           unsigned seed, const std::vector<std::int32_t>& class_of) {
  const PagesView& p = pages.view();
  const std::int64_t page = p.page_size, num_pages = (context + page - 1) / page;
  Sequence s{
      Tensor::zeros(num_pages * page, std::int64_t{p.num_kv_heads} * p.head_dim_k, DType::kF32),
      Tensor::zeros(num_pages * page, std::int64_t{p.num_kv_heads} * p.head_dim_v, DType::kF32),
      {}};
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal;
  for (std::int64_t i = 0; i < num_pages; ++i) {
    s.pages.push_back(static_cast<std::int32_t>(first_page + i));
    pages.set_class(first_page + i, class_of[static_cast<std::size_t>(i) % class_of.size()]);
    for (std::int32_t h = 0; h < p.num_kv_heads; ++h)
      for (const Part part : {Part::kK, Part::kV}) {
        const std::int64_t dim = part == Part::kK ? p.head_dim_k : p.head_dim_v;
        std::vector<float> rows(static_cast<std::size_t>(page * dim));
        for (std::size_t x = 0; x < rows.size(); ++x)
          rows[x] = normal(rng) + (part == Part::kK && x % 37 == 5 ? 6.f : 0.f);
        pages.write(first_page + i, h, part, std::min(page, context - i * page), rows.data());
        Tensor& to = part == Part::kK ? s.k : s.v;
        for (std::int64_t t = 0; t < page; ++t)
          for (std::int64_t d = 0; d < dim; ++d)
            to.set((i * page + t) * to.width + h * dim + d,
                   rows[static_cast<std::size_t>(t * dim + d)]);
      }
  }
  return s;
}

inline Tensor short_queries(std::int64_t rows, std::int64_t width, unsigned seed) {
  Tensor q = Tensor::random(rows, width, DType::kF32, seed);
  for (std::int64_t i = 0; i < rows; ++i)
    for (std::int64_t x = 0; x < width; ++x) q.set(i * width + x, short_float(q.at(i, x)));
  return q;
}

// Largest errors, for q, K and V of size 1. K: of lse, that is of a score, by the integers that
// stand for the query: 14 bits for int8, 7 for k4 (whose own error is 0.1). V: bf16 rounds each
// probability; codes have them as bytes on the step's scale (7 bits on AVX2), so that the error is
// large where few tokens share the weight. fp8 is multiplied as f32.
struct Tolerance {
  double out, lse;
};
inline Tolerance tolerance(const HeadFormats& f, std::int64_t context) {
  const double lse = f.k == Format::kK4 ? 8e-2 : f.k == Format::kInt8 ? 3e-4 : 2e-5;
  const double p = f.v == Format::kFp8 ? 0 : 4e-2;
  return {(2e-5 + p + lse / 4) / (context > 1000 ? 3 : 1), lse};
}

// Attends and compares with the loop in double precision.
inline void expect_close(const ClassPages& pages, std::int32_t q_heads,
                         const std::vector<Item>& items, const HeadFormats& worst,
                         const std::string& what, std::int64_t window = 0, double cap = 0) {
  std::int64_t tokens = 0;
  for (const Item& i : items) tokens += i.q_len;
  const Tensor q = short_queries(tokens, std::int64_t{q_heads} * pages.view().head_dim_k, 5);
  const Output got = attend(pages, q_heads, items, q, nullptr, {{window}, cap});
  std::int64_t row = 0;
  for (const Item& i : items) {
    const Errors e = compare(pages.view(), q_heads, i, q, got, row, window, cap);
    const Tolerance most = tolerance(worst, i.context);
    EXPECT_LT(e.out, most.out) << what << ", q_len " << i.q_len << ", context " << i.context;
    EXPECT_LT(e.lse, most.lse) << what << ", q_len " << i.q_len << ", context " << i.context;
    row += i.q_len;
  }
}

inline std::string name_of(const HeadFormats& f) {
  const auto name = [](Format x) {
    return std::string(x == Format::kBf16 ? "bf16" : codec_name(x));
  };
  return name(f.k) + "/" + name(f.v);
}

}  // namespace kvcore::kernels::test
