#include "compress/chooser.h"

#include <gtest/gtest.h>

#include <limits>

namespace kvcore::compress {
namespace {

using pages::HeadFormats;
using pages::PageClass;
using pages::PageSpec;

PageSpec spec(std::int32_t layers = 3, std::int32_t dim = 64) {
  pages::PageSpecOptions o;
  o.num_layers = layers;
  o.num_kv_heads = 2;
  o.head_dim_k = o.head_dim_v = dim;
  return PageSpec::make(o).value();
}

// A head whose errors are those of normal numbers, `weight` times as important as another's.
HeadStatistics head(double weight = 1, std::size_t dim = 64) {
  HeadStatistics s;
  s.key_weight.assign(dim, weight);
  s.key_energy.assign(dim, 1);
  s.key_error = {{Format::kK4, std::vector<double>(dim, 0.009)},
                 {Format::kInt8, std::vector<double>(dim, 0.0001)}};
  s.value_weight = 64 * weight;
  s.value_error = {{Format::kV3, 0.034}, {Format::kV4, 0.009}, {Format::kInt8, 0.0001}};
  return s;
}

std::int64_t bytes(const PageSpec& s, HeadFormats f) {
  const auto& o = s.options();
  const std::vector<HeadFormats> all(
      static_cast<std::size_t>(o.num_layers) * static_cast<std::size_t>(o.num_kv_heads), f);
  return PageClass::make(s, all).value().page_bytes();
}

constexpr HeadFormats kLeast{Format::kK4, Format::kV3}, kMost{Format::kInt8, Format::kInt8};

Profile profile(std::int64_t budget) {
  Profile p;
  p.budget_bytes = budget;
  return p;
}

TEST(Chooser, LeastBudgetIsTheLeastTableAndMuchBuysEverything) {
  const PageSpec s = spec();
  const std::vector<HeadStatistics> six(6, head());
  for (const HeadFormats all : {kLeast, kMost}) {
    const PageClass table = choose(s, six, profile(bytes(s, all))).value();
    for (const HeadFormats& f : table.formats()) EXPECT_EQ(f, all);
  }
}

TEST(Chooser, EqualHeadsAreServedInOrderAndTheBudgetIsKept) {
  const PageSpec s = spec();
  const std::vector<HeadStatistics> six(6, head());
  const std::int64_t budget = bytes(s, kLeast) + 2 * 512 + 100;  // two v4 at head_dim 64
  const PageClass table = choose(s, six, profile(budget)).value();
  for (std::size_t i = 0; i < 6; ++i)
    EXPECT_EQ(table.formats()[i].v, i < 2 ? Format::kV4 : Format::kV3) << i;
  EXPECT_LE(table.page_bytes(), budget);
  EXPECT_EQ(table.digest(), choose(s, six, profile(budget)).value().digest());
}

TEST(Chooser, BytesGoWhereTheyRemoveMostError) {
  const PageSpec s = spec();
  std::vector<HeadStatistics> six(6, head(1e-3));
  six[4] = head(50);                 // all of it matters
  six[1].key_weight.assign(64, 20);  // its scores matter
  six[1].value_weight = 0;
  six[3].key_weight.assign(64, 0);  // nobody looks at its keys
  const PageClass table = choose(s, six, profile(bytes(s, kLeast) + 7000)).value();
  EXPECT_EQ(table.formats()[4], kMost);
  EXPECT_EQ(table.formats()[1].k, Format::kInt8);
  EXPECT_EQ(table.formats()[1].v, Format::kV3);
  EXPECT_EQ(table.formats()[3].k, Format::kK4);
}

// No table of the same bytes is better by more than one upgrade of the least rate bought.
TEST(Chooser, GreedyIsNearTheBest) {
  const PageSpec s = spec(2);
  std::vector<HeadStatistics> four;
  for (const double weight : {1.0, 3.0, 0.2, 7.0}) four.push_back(head(weight));
  const Format keys[] = {Format::kK4, Format::kInt8};
  const Format values[] = {Format::kV3, Format::kV4, Format::kInt8};
  const auto total = [&](const PageClass& c) {
    double sum = 0;
    const std::vector<double> errors = predicted_error(c, four).value();
    for (const double e : errors) sum += e;
    return sum;
  };
  for (std::int64_t budget = bytes(s, kLeast); budget <= bytes(s, kMost); budget += 1500) {
    double best = std::numeric_limits<double>::infinity();
    for (int code = 0; code < 6 * 6 * 6 * 6; ++code) {
      std::vector<HeadFormats> table;
      for (int at = code, i = 0; i < 4; ++i, at /= 6)
        table.push_back({keys[at % 2], values[at % 6 / 2]});
      const PageClass c = PageClass::make(s, table).value();
      if (c.page_bytes() <= budget) best = std::min(best, total(c));
    }
    const PageClass chosen = choose(s, four, profile(budget)).value();
    EXPECT_LE(chosen.page_bytes(), budget);
    EXPECT_LE(total(chosen), best + 7 * 64 * 0.025) << budget;  // the largest single upgrade
  }
}

TEST(Chooser, KeysThatFourBitsCannotCarryComeFirst) {
  const PageSpec s = spec();
  std::vector<HeadStatistics> six(6, head());
  six[5] = head(1e-9);                 // it seems to matter to nobody,
  six[5].key_energy.assign(64, 0.05);  // but k4 would change 18 % of what its keys say
  const PageClass table = choose(s, six, profile(bytes(s, kLeast) + 2200)).value();
  EXPECT_EQ(table.formats()[5].k, Format::kInt8);
  const auto refused = choose(s, six, profile(bytes(s, kLeast)));
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kUnsupported);
}

TEST(Chooser, ProfilesKeepTheirBytes) {
  pages::PageSpecOptions o;
  o.num_layers = 32;
  o.num_kv_heads = 8;
  o.head_dim_k = o.head_dim_v = 128;
  for (const std::int32_t page : {64, 128}) {
    o.page_size = page;
    const PageSpec s = PageSpec::make(o).value();
    const auto percent = [&](const char* name) {
      return 100.0 * static_cast<double>(profile_of(s, name).value().budget_bytes) /
             static_cast<double>(s.page_bytes());
    };
    EXPECT_LE(percent("balanced"), 27.5);
    EXPECT_GT(percent("balanced"), 26.5);
    EXPECT_LE(percent("small"), 24.5);
    EXPECT_GT(percent("small"), 23.5);
  }
  EXPECT_NE(profile_of(spec(), "exact").error().message.find("allowed balanced, small"),
            std::string::npos);
}

TEST(Chooser, RefusesByNameAndPlace) {
  const PageSpec s = spec();
  const auto message = [&](auto change) {
    std::vector<HeadStatistics> six(6, head());
    change(six);
    const auto result = choose(s, six, profile(bytes(s, kMost)));
    EXPECT_EQ(result.error().code, ErrorCode::kInvalidArgument);
    return result.error().message;
  };
  const double nan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_NE(message([](auto& h) { h.pop_back(); }).find("5 entries: allowed 6"), std::string::npos);
  EXPECT_NE(message([](auto& h) {
              h[3].key_weight.pop_back();
            }).find("layer 1, KV head 1: key_weight has 63 entries: allowed 64"),
            std::string::npos);
  EXPECT_NE(message([&](auto& h) { h[0].key_error[1].second[2] = nan; }).find("key_error of int8"),
            std::string::npos);
  EXPECT_NE(message([](auto& h) { h[2].value_error[0].second = -1; }).find("value_error of v3=-1"),
            std::string::npos);
  EXPECT_NE(message([&](auto& h) { h[2].value_weight = nan; }).find("value_weight"),
            std::string::npos);
  Profile unguarded = profile(bytes(s, kMost));
  unguarded.max_key_error = nan;
  EXPECT_EQ(choose(s, std::vector<HeadStatistics>(6, head()), unguarded).error().code,
            ErrorCode::kInvalidArgument);
  EXPECT_NE(message([](auto& h) { h[1].key_error.erase(h[1].key_error.begin()); }).find("k4/v3"),
            std::string::npos);
}

TEST(Chooser, PredictionsAddUpAndOwnFormatCostsNothing) {
  const PageSpec s = spec(1);
  const std::vector<HeadStatistics> two = {head(2), head(1)};
  const std::vector<HeadFormats> table = {{Format::kK4, Format::kV3}, {Format::kBf16, Format::kV4}};
  const auto error = predicted_error(PageClass::make(s, table).value(), two).value();
  ASSERT_EQ(error.size(), 4u);
  EXPECT_DOUBLE_EQ(error[0], 2 * 64 * 0.009);
  EXPECT_DOUBLE_EQ(error[1], 2 * 64 * 0.034);
  EXPECT_EQ(error[2], 0);
  EXPECT_DOUBLE_EQ(error[3], 64 * 0.009);
  const std::vector<HeadFormats> unknown(2, {Format::kFp8, Format::kV3});
  EXPECT_NE(predicted_error(PageClass::make(s, unknown).value(), two)
                .error()
                .message.find("do not know format fp8"),
            std::string::npos);
}

}  // namespace
}  // namespace kvcore::compress
