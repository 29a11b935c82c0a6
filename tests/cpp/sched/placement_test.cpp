#include "sched/placement.h"

#include <gtest/gtest.h>

#include "sched/load_book.h"

namespace kvcore::sched {
namespace {

WorkerLoad worker(Role role) { return {role, 0, 0, 0, 1000, 100, 100, 256, 0}; }

TEST(Placement, TheCheaperOfPairAndMonoWins) {
  std::vector<WorkerLoad> workers = {worker(Role::kPrefill), worker(Role::kDecode),
                                     worker(Role::kMono)};
  workers[2].queued_tokens = 3000;
  const auto pair = std::get<Placement>(choose({1000, 10, 1e4}, workers, {}).value());
  EXPECT_EQ(pair.prefill, 0u);
  EXPECT_EQ(pair.decode, 1u);
  workers[0].queued_tokens = 9000;
  const auto mono = std::get<Placement>(choose({1000, 10, 1e4}, workers, {}).value());
  EXPECT_EQ(mono.prefill, 2u);
  EXPECT_EQ(mono.cost.stream_s, 0);
}

TEST(Placement, RefusalsAreValues) {
  EXPECT_EQ(std::get<Rejection>(choose({5, 5, 0}, {}, {}).value()).reason, Refusal::kNoWorkers);
  std::vector<WorkerLoad> workers = {worker(Role::kMono)};
  EXPECT_EQ(std::get<Rejection>(choose({25600, 1, 0}, workers, {}).value()).reason,
            Refusal::kTooLong);
  workers[0].free_frames = 0;
  const auto room = std::get<Rejection>(choose({256, 0, 0}, workers, {}).value());
  EXPECT_EQ(room.reason, Refusal::kNoRoom);
  EXPECT_DOUBLE_EQ(room.retry_after_s, 0.5);
  workers[0].num_frames = 0;
  EXPECT_FALSE(choose({256, 0, 0}, workers, {}).ok());
}

TEST(LoadBook, EndsEachEntryOnce) {
  LoadBook book;
  EXPECT_TRUE(book.dispatch("w", "r", 100, 2));
  EXPECT_FALSE(book.dispatch("w", "r", 100, 2));
  EXPECT_TRUE(book.finished("w", "r"));
  EXPECT_FALSE(book.finished("w", "r"));
  EXPECT_EQ(book.load("w").queued_tokens, 0);
  EXPECT_EQ(book.load("w").running, 0);
}

}  // namespace
}  // namespace kvcore::sched
