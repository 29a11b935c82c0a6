#include "pages/space.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <vector>

#include "pages/page_ids.h"

namespace kvcore::pages {
namespace {

constexpr std::int64_t kUnit = 4096;
constexpr std::int64_t kUnits = 256;

TEST(Space, OpenRunsComeFromTheLowEndOthersFromTheHighOne) {
  Space space({kUnit, kUnit});
  EXPECT_FALSE(space.take(kUnit, End::kLow).has_value());
  space.give(kUnit, 10 * kUnit);
  EXPECT_EQ(space.take(4 * kUnit, End::kLow), kUnit);
  EXPECT_EQ(space.take(kUnit, End::kHigh), 10 * kUnit);
  EXPECT_EQ(space.take(kUnit, End::kHigh), 9 * kUnit);
  space.give(10 * kUnit, kUnit);  // the outer hole is filled before the middle is cut further
  EXPECT_EQ(space.take(kUnit, End::kHigh), 10 * kUnit);
  EXPECT_FALSE(space.take(5 * kUnit, End::kLow).has_value());
  EXPECT_EQ(space.take(4 * kUnit, End::kLow), 5 * kUnit);
  EXPECT_EQ(space.free_bytes(), 0);
  EXPECT_EQ(space.num_spans(), 0);
}

TEST(Space, NothingOverlapsAndNothingIsLost) {
  std::mt19937 rng(5);
  for (int round = 0; round < 200; ++round) {
    Space space({3 * kUnit, kUnit});
    space.give(0, kUnits * kUnit);
    std::vector<std::int64_t> owner(kUnits, -1);  // run that holds each unit
    std::map<std::int64_t, std::int64_t> runs;    // offset -> units
    for (int step = 0; step < 300; ++step) {
      if (runs.empty() || rng() % 5 < 3) {
        const std::int64_t units = 1 + rng() % (rng() % 4 == 0 ? 40 : 4);
        const auto at = space.take(units * kUnit, rng() % 2 == 0 ? End::kLow : End::kHigh);
        std::int64_t widest = 0, here = 0;
        for (const std::int64_t o : owner) widest = std::max(widest, here = o < 0 ? here + 1 : 0);
        ASSERT_EQ(at.has_value(), widest >= units);
        if (!at) continue;
        for (std::int64_t i = 0; i < units; ++i) {
          auto& o = owner[static_cast<std::size_t>(*at / kUnit + i)];
          ASSERT_LT(o, 0) << "given out twice";
          o = *at;
        }
        runs.emplace(*at, units);
      } else {
        const auto run = std::next(runs.begin(), static_cast<std::ptrdiff_t>(rng() % runs.size()));
        for (std::int64_t i = 0; i < run->second; ++i)
          owner[static_cast<std::size_t>(run->first / kUnit + i)] = -1;
        space.give(run->first, run->second * kUnit);
        runs.erase(run);
      }
      std::int64_t free = 0, fits = 0, here = 0;
      for (const std::int64_t o : owner) {
        free += o < 0;
        here = o < 0 ? here + 1 : 0;
        fits += here > 0 && here % 3 == 0;
      }
      ASSERT_EQ(space.free_bytes(), free * kUnit);
      ASSERT_EQ(space.fits(0), fits);
      ASSERT_EQ(space.fits(1), free);
    }
    for (const auto& [at, units] : runs) space.give(at, units * kUnit);
    ASSERT_EQ(space.num_spans(), 1);
    ASSERT_EQ(space.take(kUnits * kUnit, End::kHigh), 0);
  }
}

TEST(PageIds, GroupsAndSingleIdsNeverMeet) {
  std::mt19937 rng(6);
  for (const std::int32_t extent : {1, 2, 4, 16}) {
    PageIds ids(extent, 2, 12);
    std::vector<int> taken(static_cast<std::size_t>(12 * extent), 0);
    std::fill_n(taken.begin(), 2 * extent, 1);  // groups before the first one
    std::vector<std::int32_t> groups, singles;
    const auto mark = [&](std::int32_t first, std::int32_t count, int by) {
      for (std::int32_t i = first; i < first + count; ++i) {
        taken[static_cast<std::size_t>(i)] += by;
        ASSERT_TRUE(taken[static_cast<std::size_t>(i)] == 0 ||
                    taken[static_cast<std::size_t>(i)] == 1);
      }
    };
    for (int step = 0; step < 5000; ++step) {
      const auto drawn = rng() % 4;
      if (drawn == 0 && ids.free_groups() > 0) {
        groups.push_back(ids.take_group());
        mark(groups.back() * extent, extent, 1);
      } else if (drawn == 1 && ids.free_ids() > 0) {
        singles.push_back(ids.take_id());
        EXPECT_TRUE(ids.is_split(singles.back() / extent));
        mark(singles.back(), 1, 1);
      } else if (drawn == 2 && !groups.empty()) {
        mark(groups.back() * extent, extent, -1);
        ids.give_group(groups.back());
        groups.pop_back();
      } else if (drawn == 3 && !singles.empty()) {
        std::swap(singles[rng() % singles.size()], singles.back());
        mark(singles.back(), 1, -1);
        ids.give_id(singles.back());
        singles.pop_back();
      }
      ASSERT_EQ(ids.free_ids(), std::count(taken.begin(), taken.end(), 0));
    }
    for (const std::int32_t id : singles) ids.give_id(id);
    for (const std::int32_t group : groups) ids.give_group(group);
    EXPECT_EQ(ids.free_groups(), 10);
  }
}

}  // namespace
}  // namespace kvcore::pages
