#include <gtest/gtest.h>

#include <memory>

#include "base/result.h"
#include "base/tensor_view.h"
#include "base/text.h"

namespace kvcore {
namespace {

Result<int> half(int n) {
  if (n % 2 != 0) return invalid_argument(text("n=", n, " must be even"));
  return n / 2;
}

Result<int> quarter(int n) {
  KVCORE_ASSIGN_OR_RETURN(const int h, half(n));
  return half(h);
}

Status check(int n) {
  KVCORE_RETURN_IF_ERROR(half(n));
  return {};
}

TEST(Result, CarriesAValueOrANamedError) {
  EXPECT_EQ(quarter(8).value(), 2);
  const auto bad = quarter(6);
  ASSERT_FALSE(bad.ok());
  EXPECT_EQ(bad.error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(bad.error().message, "n=3 must be even");
  EXPECT_TRUE(check(2).ok());
  EXPECT_EQ(check(1).error().message, "n=1 must be even");
}

TEST(Result, MovesWhatCannotBeCopied) {
  Result<std::unique_ptr<int>> made = std::make_unique<int>(7);
  const std::unique_ptr<int> taken = std::move(made).value();
  EXPECT_EQ(*taken, 7);
}

TEST(TensorView, StridesAreInElements) {
  int data[6] = {0, 1, 2, 3, 4, 5};
  const TensorView<int, 2> columns{data, {3, 2}, {1, 3}};
  EXPECT_EQ(columns(2, 1), 5);
  EXPECT_EQ(columns(1, 0), 1);
}

}  // namespace
}  // namespace kvcore
