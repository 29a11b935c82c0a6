#include "base/thread_pool.h"

#include <gtest/gtest.h>

#include <chrono>
#include <vector>

namespace kvcore {
namespace {

// Pieces of work that threads take until none are left.
struct Work {
  std::atomic<std::size_t> next{0};
  std::vector<int> done;  // [pieces] how often each was done; a piece belongs to who took it
  std::atomic<int> callers{0};
  std::atomic<bool> hold{false};  // workers that came in wait here

  explicit Work(std::size_t pieces) : done(pieces) {}
  static void take(void* self, int thread) {
    Work& work = *static_cast<Work*>(self);
    work.callers.fetch_add(1);
    for (std::size_t i; (i = work.next.fetch_add(1)) < work.done.size();) ++work.done[i];
    while (thread != 0 && work.hold) std::this_thread::yield();
  }
};

TEST(ThreadPool, EveryPieceIsDoneOnceInEverySection) {
  for (const int threads : {1, 2, 3, 8}) {
    const auto pool = ThreadPool::make(threads).value();
    for (int section = 0; section < 2000; ++section) {
      Work work(static_cast<std::size_t>(section % 7));
      pool->run(Work::take, &work);
      for (const int times : work.done) ASSERT_EQ(times, 1);
      ASSERT_GE(work.callers.load(), 1);
    }
  }
}

TEST(ThreadPool, WaitsForThoseThatCameAndOnlyForThem) {
  const auto pool = ThreadPool::make(2).value();
  Work work(1);
  work.hold = true;
  std::jthread let_go([&work] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    work.hold = false;
  });
  for (int i = 0; i < 200; ++i) {
    pool->run(Work::take, &work);  // after it nobody is inside: `work` may change
    work.next = 0;
    work.done[0] = 0;
  }
}

TEST(ThreadPool, SectionsOfSeveralCallersDoNotMix) {
  const auto pool = ThreadPool::make(3).value();
  std::vector<std::jthread> callers;
  for (int c = 0; c < 3; ++c)
    callers.emplace_back([&pool] {
      for (int i = 0; i < 500; ++i) {
        Work work(5);
        pool->run(Work::take, &work);
        for (const int times : work.done) ASSERT_EQ(times, 1);
      }
    });
}

TEST(ThreadPool, RefusesNumbersOutOfRange) {
  EXPECT_FALSE(ThreadPool::make(0).ok());
  EXPECT_FALSE(ThreadPool::make(257).ok());
  const std::int32_t far_away[] = {0, 100000}, short_list[] = {0};
  EXPECT_FALSE(ThreadPool::make(2, far_away).ok());
  EXPECT_FALSE(ThreadPool::make(2, short_list).ok());
  EXPECT_FALSE(ThreadPool::make(200).value()->spins());
}

}  // namespace
}  // namespace kvcore
