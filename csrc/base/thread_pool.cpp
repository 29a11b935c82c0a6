#include "base/thread_pool.h"

#include <system_error>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

#include "base/text.h"

namespace kvcore {
namespace {

constexpr std::int64_t kMaxThreads = 256;
constexpr std::int64_t kSpins =
    4000;  // about 100 us of pause instructions: longer than one layer's gap

inline void pause_cpu() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

#if defined(__linux__)
int allowed_cpus() noexcept {
  cpu_set_t set;
  CPU_ZERO(&set);
  return sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1;
}

bool cpu_allowed(std::int32_t cpu) noexcept {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (cpu < 0 || cpu >= CPU_SETSIZE || sched_getaffinity(0, sizeof(set), &set) != 0) return false;
  return CPU_ISSET(static_cast<std::size_t>(cpu), &set);
}

void pin(std::jthread& thread, std::int32_t cpu) noexcept {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(static_cast<std::size_t>(cpu), &set);
  pthread_setaffinity_np(thread.native_handle(), sizeof(set), &set);
}
#else
int allowed_cpus() noexcept { return static_cast<int>(std::thread::hardware_concurrency()); }
bool cpu_allowed(std::int32_t cpu) noexcept { return cpu >= 0 && cpu < allowed_cpus(); }
void pin(std::jthread&, std::int32_t) noexcept {}
#endif

}  // namespace

Result<std::unique_ptr<ThreadPool>> ThreadPool::make(std::int64_t num_threads,
                                                     std::span<const std::int32_t> cpus) {
  if (num_threads < 1 || num_threads > kMaxThreads)
    return invalid_argument(
        text("num_threads=", num_threads, " is out of range: allowed 1 to ", kMaxThreads));
  if (!cpus.empty() && static_cast<std::int64_t>(cpus.size()) != num_threads)
    return invalid_argument(text("cpus has ", cpus.size(), " entries: expected num_threads=",
                                 num_threads, ", or none for threads that are not pinned"));
  for (const std::int32_t cpu : cpus)
    if (!cpu_allowed(cpu))
      return invalid_argument(text("cpus contains ", cpu, ", which this process may not run on"));
  const bool fits = num_threads <= allowed_cpus();
  std::unique_ptr<ThreadPool> pool(
      new ThreadPool(static_cast<int>(num_threads), fits ? kSpins : 0));
  for (int i = 1; i < pool->num_threads_; ++i) {
    try {
      pool->workers_.emplace_back([p = pool.get(), i] { p->worker(i); });
    } catch (const std::system_error& e) {
      return Error{ErrorCode::kIo, text("cannot start thread ", i, " of num_threads=", num_threads,
                                        ": ", e.what())};
    }
    if (!cpus.empty()) pin(pool->workers_.back(), cpus[static_cast<std::size_t>(i)]);
  }
  return pool;
}

ThreadPool::~ThreadPool() {
  stop_.store(true, std::memory_order_relaxed);
  generation_.fetch_add(1, std::memory_order_release);
  generation_.notify_all();
}

void ThreadPool::run(Function function, void* context) {
  if (num_threads_ == 1) {
    function(context, 0);
    return;
  }
  const std::lock_guard lock(section_);
  function_ = function;
  context_ = context;
  inside_.store(0, std::memory_order_release);
  generation_.fetch_add(1, std::memory_order_release);
  generation_.notify_all();
  function(context, 0);
  std::uint32_t left = inside_.fetch_or(kClosed, std::memory_order_acq_rel) | kClosed;
  for (std::int64_t i = 0; i < spins_ && left != kClosed; ++i) {
    pause_cpu();
    left = inside_.load(std::memory_order_acquire);
  }
  for (; left != kClosed; left = inside_.load(std::memory_order_acquire))
    inside_.wait(left, std::memory_order_acquire);
}

bool ThreadPool::enter() noexcept {
  std::uint32_t now = inside_.load(std::memory_order_relaxed);
  while ((now & kClosed) == 0)
    if (inside_.compare_exchange_weak(now, now + 1, std::memory_order_acquire,
                                      std::memory_order_relaxed))
      return true;
  return false;
}

void ThreadPool::leave() noexcept {
  if (inside_.fetch_sub(1, std::memory_order_acq_rel) == (kClosed | 1)) inside_.notify_one();
}

void ThreadPool::worker(int thread) {
  std::uint32_t seen = 0;
  for (;;) {
    for (std::int64_t i = 0; i < spins_ && generation_.load(std::memory_order_relaxed) == seen; ++i)
      pause_cpu();
    generation_.wait(seen, std::memory_order_acquire);
    seen = generation_.load(std::memory_order_acquire);
    if (stop_.load(std::memory_order_relaxed)) return;
    if (!enter()) continue;  // too late: the section is over
    function_(context_, thread);
    leave();
  }
}

}  // namespace kvcore
