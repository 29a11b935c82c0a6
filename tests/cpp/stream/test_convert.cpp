// Conversion against a plain reference: pages written and read value by value through
// pages::write_slice and read_slice, encoded pages against compress::seal_pages.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "compress/seal.h"
#include "fixture.h"
#include "kernels/layout/convert.h"
#include "pages/slice_io.h"
#include "stream/convert.h"

namespace kvcore::stream {
namespace {

struct Case {
  pages::PageSpecOptions from, to;
  std::int32_t from_head, to_head, num_heads;
};

pages::PageSpecOptions spec(std::int32_t heads, std::int32_t page_size, Format format,
                            LayoutId layout, bool latent = false) {
  return {.num_layers = 1,
          .num_kv_heads = latent ? 1 : heads,
          .head_dim_k = 32,
          .head_dim_v = 16,
          .page_size = page_size,
          .extent_pages = 1,
          .format = format,
          .layout = latent ? LayoutId::kCanonical : layout,
          .latent = latent};
}

// A value that f16, bf16 and f32 all hold, and that names its place.
float value(std::int64_t token, std::int64_t head, std::int64_t dim, bool v) {
  return static_cast<float>((token * 7 + head * 31 + dim * 3 + (v ? 5 : 0)) % 251 - 125) / 4;
}

std::vector<std::byte> rows_of(const pages::PageSpecOptions& o, std::int64_t first_token, bool v) {
  const std::int64_t dim = v ? o.head_dim_v : o.head_dim_k;
  const DType type = kernels::dtype_of(o.format);
  std::vector<std::byte> out(
      static_cast<std::size_t>(o.page_size * o.num_kv_heads * dim * size_of(type)));
  for (std::int64_t i = 0; i < o.page_size * o.num_kv_heads * dim; ++i) {
    const float x = value(first_token + i / dim / o.num_kv_heads, i / dim % o.num_kv_heads, i % dim,
                          v && !o.latent);
    kernels::convert_row(reinterpret_cast<const char*>(&x), DType::kF32,
                         reinterpret_cast<char*>(out.data()) + i * size_of(type), type, 1);
  }
  return out;
}

float at(const std::vector<std::byte>& rows, const pages::PageSpecOptions& o, std::int64_t token,
         std::int64_t head, std::int64_t dim, bool v) {
  const std::int64_t dims = v ? o.head_dim_v : o.head_dim_k;
  const DType type = kernels::dtype_of(o.format);
  const std::int64_t i = (token * o.num_kv_heads + head) * dims + dim;
  float x = 0;
  kernels::convert_row(reinterpret_cast<const char*>(rows.data()) + i * size_of(type), type,
                       reinterpret_cast<char*>(&x), DType::kF32, 1);
  return x;
}

struct Pages {
  std::shared_ptr<pages::Pool> pool;
  std::vector<std::int32_t> pages;
  std::vector<const std::byte*> slices;
};

Pages filled(const pages::PageSpecOptions& o, std::int64_t num_pages) {
  Pages out;
  out.pool = testing::make_pool(o, num_pages + 4);
  out.pages = *out.pool->alloc(num_pages);
  for (std::int64_t i = 0; i < num_pages; ++i) {
    const auto page = out.pages[static_cast<std::size_t>(i)];
    EXPECT_TRUE(pages::write_slice(*out.pool, page, 0, rows_of(o, i * o.page_size, false),
                                   rows_of(o, i * o.page_size, true))
                    .ok());
    out.slices.push_back(out.pool->slice(page, 0));
  }
  return out;
}

// Converts tokens [first, first + count) and compares value by value; what is outside the part or
// beyond the tokens must stay as it was, or be 0.
void expect_converted(const Case& c, std::int64_t first, std::int64_t count) {
  const Pages from = filled(c.from, 10);
  const auto to = testing::make_pool(c.to, 1);
  const std::int32_t page = (*to->alloc(1))[0];
  std::byte* slice = to->slice(page, 0);
  std::memset(slice, 0x55, static_cast<std::size_t>(to->spec().slice_bytes()));
  const auto head_bytes = static_cast<std::size_t>(to->spec().head_block_bytes());
  const auto open_class = pages::PageClass::open(to->spec());
  const auto views = open_class.layers(1);
  Converter converter(from.pool->spec(), c.from_head, to->spec(), c.to_head, c.num_heads);
  const PageMap map{c.from.page_size, c.to.page_size, first, count};
  const SlotSource source = map.source_of(0);
  const auto begin = static_cast<std::size_t>(first / c.from.page_size);
  const std::span slices =
      std::span(from.slices).subspan(begin, static_cast<std::size_t>(source.num_pages));
  const Status done =
      converter.convert({slices, source.first_token, source.num_tokens}, views[0].heads,
                        {slice + views[0].heads[c.to_head].k_offset_bytes,
                         static_cast<std::size_t>(c.num_heads) * head_bytes});
  ASSERT_TRUE(done.ok()) << done.error().message;
  std::vector<std::byte> k(rows_of(c.to, 0, false).size()), v(rows_of(c.to, 0, true).size());
  ASSERT_TRUE(pages::read_slice(*to, page, 0, k, v).ok());
  for (std::int64_t token = 0; token < c.to.page_size; ++token) {
    for (std::int32_t i = 0; i < c.num_heads; ++i) {
      for (const bool is_v : {false, true}) {
        for (std::int64_t d = 0; d < (is_v ? c.to.head_dim_v : c.to.head_dim_k); ++d) {
          const float want =
              token < count ? value(first + token, c.from_head + i, d, is_v && !c.to.latent) : 0.0f;
          ASSERT_EQ(at(is_v ? v : k, c.to, token, c.to_head + i, d, is_v), want)
              << "token " << token << " head " << i << " dim " << d << (is_v ? " V" : " K");
        }
      }
    }
  }
  for (std::int32_t head = 0; head < c.to.num_kv_heads; ++head) {
    if (head >= c.to_head && head < c.to_head + c.num_heads) continue;
    const std::byte* other = slice + views[0].heads[head].k_offset_bytes;
    for (std::size_t i = 0; i < head_bytes; ++i) ASSERT_EQ(other[i], std::byte{0x55});
  }
}

TEST(Convert, EveryPairOfPageSizesLayoutsAndElements) {
  for (const int from_page : {16, 128})
    for (const int to_page : {16, 64})
      for (const Format from : {Format::kBf16, Format::kF16, Format::kF32})
        for (const Format to : {Format::kBf16, Format::kF16, Format::kF32})
          for (const LayoutId a : {LayoutId::kPacked, LayoutId::kCanonical})
            for (const LayoutId b : {LayoutId::kPacked, LayoutId::kCanonical}) {
              const Case c{spec(2, from_page, from, a), spec(2, to_page, to, b), 0, 0, 2};
              expect_converted(c, to_page, to_page);
              expect_converted(c, 0, to_page - 3);
              if (HasFatalFailure()) return;
            }
}

TEST(Convert, HeadsAreCutAndMoved) {
  const auto four = spec(4, 16, Format::kBf16, LayoutId::kPacked);
  const auto two = spec(2, 16, Format::kBf16, LayoutId::kPacked);
  const auto big = spec(3, 64, Format::kF32, LayoutId::kCanonical);
  expect_converted({four, two, 2, 0, 2}, 16, 16);
  expect_converted({two, four, 1, 3, 1}, 16, 16);
  expect_converted({four, big, 1, 1, 2}, 64, 50);
}

TEST(Convert, LatentPagesHaveOneBlock) {
  const auto small = spec(1, 16, Format::kBf16, LayoutId::kCanonical, true);
  auto large = small;
  large.page_size = 64;
  expect_converted({small, large, 0, 0, 1}, 64, 40);
  expect_converted({large, small, 0, 0, 1}, 16, 16);
}

// The reference for codes: the same values in open pages of the receiver, sealed there.
void expect_sealed(const pages::PageSpecOptions& from_spec, const pages::HeadFormats& formats,
                   std::int32_t head_begin, std::int32_t num_heads) {
  auto to_spec = spec(2, 64, Format::kBf16, LayoutId::kPacked);
  const Pages from = filled(from_spec, 128 / from_spec.page_size);
  const Pages reference = filled(to_spec, 6);
  const auto page_class = pages::PageClass::make(
      reference.pool->spec(),
      std::vector{formats, pages::HeadFormats{Format::kInt8, Format::kBf16}});
  ASSERT_TRUE(page_class.ok());
  const auto number = reference.pool->add_class(*page_class);
  ASSERT_TRUE(compress::seal_pages(*reference.pool, std::array{reference.pages[1]}, *number).ok());
  const auto views = page_class->layers(1);
  const std::int64_t skip = views[0].heads[head_begin].k_offset_bytes;
  const std::int64_t end =
      head_begin + num_heads == 2 ? page_class->slice_bytes(0) : views[0].heads[1].k_offset_bytes;
  std::vector<std::byte> out(static_cast<std::size_t>(end - skip), std::byte{0x77});
  Converter converter(from.pool->spec(), head_begin, reference.pool->spec(), head_begin, num_heads);
  const SlotSource source = PageMap{from_spec.page_size, 64, 0, 128}.source_of(1);
  const std::span slices = std::span(from.slices)
                               .subspan(static_cast<std::size_t>(source.first_page),
                                        static_cast<std::size_t>(source.num_pages));
  ASSERT_TRUE(
      converter.convert({slices, source.first_token, source.num_tokens}, views[0].heads, out).ok());
  const std::byte* want = reference.pool->slice(reference.pages[1], 0) + skip;
  EXPECT_EQ(std::memcmp(out.data(), want, out.size()), 0);
}

TEST(Convert, CodesAreThoseThatSealingWrites) {
  for (const int page_size : {16, 64, 128})
    for (const Format from : {Format::kBf16, Format::kF32})
      for (const LayoutId layout : {LayoutId::kPacked, LayoutId::kCanonical})
        for (const pages::HeadFormats f : {pages::HeadFormats{Format::kK4, Format::kV4},
                                           {Format::kInt8, Format::kV3},
                                           {Format::kFp8, Format::kInt8},
                                           {Format::kBf16, Format::kV4}}) {
          expect_sealed(spec(2, page_size, from, layout), f, 0, 2);
          expect_sealed(spec(2, page_size, from, layout), f, 1, 1);
          expect_sealed(spec(2, page_size, from, layout), f, 0, 1);
          if (HasFatalFailure()) return;
        }
}

Status convert_value(float x, Format from_format, const pages::PageClass& target) {
  const auto from = testing::make_pool(spec(1, 64, from_format, LayoutId::kPacked), 1);
  const auto& o = from->spec().options();
  const std::int32_t page = (*from->alloc(1))[0];
  auto k = rows_of(o, 0, false);
  kernels::convert_row(
      reinterpret_cast<const char*>(&x), DType::kF32,
      reinterpret_cast<char*>(k.data()) + (3 * o.head_dim_k + 5) * kernels::size_of(from_format),
      kernels::dtype_of(from_format), 1);
  EXPECT_TRUE(pages::write_slice(*from, page, 0, k, rows_of(o, 0, true)).ok());
  std::vector<std::byte> out(static_cast<std::size_t>(target.slice_bytes(0)));
  Converter converter(from->spec(), 0, target.spec(), 0, 1);
  const auto views = target.layers(1);
  const std::byte* slice = from->slice(page, 0);
  return converter.convert({std::span(&slice, 1), 0, 64}, views[0].heads, out);
}

TEST(Convert, WhatTheReceiverCannotHoldIsRefusedByPlace) {
  const auto made = pages::PageSpec::make(spec(1, 64, Format::kF16, LayoutId::kPacked));
  const auto open = pages::PageClass::open(*made);
  EXPECT_TRUE(convert_value(60000, Format::kBf16, open).ok());
  const Status large = convert_value(1e5, Format::kBf16, open);
  ASSERT_FALSE(large.ok());
  EXPECT_EQ(large.error().code, ErrorCode::kInvalidArgument);
  EXPECT_NE(large.error().message.find("token=3 dim=5"), std::string::npos);
  EXPECT_NE(large.error().message.find("f16"), std::string::npos);
  // What was not finite before stays what it was between elements, and has no code.
  const float inf = std::numeric_limits<float>::infinity();
  EXPECT_TRUE(convert_value(inf, Format::kBf16, open).ok());
  const auto bf16 = pages::PageSpec::make(spec(1, 64, Format::kBf16, LayoutId::kPacked));
  const auto codes =
      pages::PageClass::make(*bf16, std::vector{pages::HeadFormats{Format::kK4, Format::kV4}});
  for (const float x : {inf, std::nanf(""), 1e5f}) {
    const Status refused = convert_value(x, Format::kBf16, *codes);
    ASSERT_FALSE(refused.ok());
    EXPECT_EQ(refused.error().code, ErrorCode::kInvalidArgument);
    EXPECT_NE(refused.error().message.find("head=0 K"), std::string::npos);
  }
}

}  // namespace
}  // namespace kvcore::stream
