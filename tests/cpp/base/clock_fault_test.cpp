#include <gtest/gtest.h>

#include "base/clock.h"
#include "base/fault.h"

namespace kvcore {
namespace {

TEST(Clock, SystemClockDoesNotRunBackwards) {
  SystemClock clock;
  std::int64_t last = clock.now_ns();
  for (int i = 0; i < 1000; ++i) {
    const std::int64_t now = clock.now_ns();
    ASSERT_GE(now, last);
    last = now;
  }
}

TEST(Clock, ManualClockMovesOnlyForwardAndOnlyWhenTold) {
  ManualClock clock(5);
  const Clock& seen = clock;
  EXPECT_EQ(seen.now_ns(), 5);
  clock.advance_ns(10);
  clock.advance_ns(-3);
  EXPECT_EQ(seen.now_ns(), 15);
}

TEST(FaultPlan, FailsTheNthCallOnceAndOnlyAtItsPoint) {
  FaultPlan plan(1);
  ASSERT_TRUE(plan.fail_nth("pool.alloc", 2).ok());
  EXPECT_FALSE(fails(&plan, "pool.alloc"));
  EXPECT_FALSE(fails(&plan, "link.write"));
  EXPECT_TRUE(fails(&plan, "pool.alloc"));
  EXPECT_FALSE(fails(&plan, "pool.alloc"));
  EXPECT_EQ(plan.calls("pool.alloc"), 3);
  EXPECT_EQ(plan.failures("pool.alloc"), 1);
}

TEST(FaultPlan, NoPlanNeverFails) { EXPECT_FALSE(fails(nullptr, "anything")); }

TEST(FaultPlan, RandomFailuresRepeatWithTheSeed) {
  FaultPlan a(7), b(7), other(8);
  for (FaultPlan* plan : {&a, &b, &other}) ASSERT_TRUE(plan->fail_randomly("x", 0.5).ok());
  int differences = 0;
  for (int i = 0; i < 1000; ++i) {
    const bool hit = a.hit("x");
    ASSERT_EQ(hit, b.hit("x"));
    differences += hit != other.hit("x");
  }
  EXPECT_GT(differences, 300);
  EXPECT_NEAR(static_cast<double>(a.failures("x")), 500, 80);
}

TEST(FaultPlan, RefusesNonsense) {
  FaultPlan plan(0);
  EXPECT_EQ(plan.fail_nth("x", 0).error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(plan.fail_randomly("x", 1.5).error().code, ErrorCode::kInvalidArgument);
}

}  // namespace
}  // namespace kvcore
