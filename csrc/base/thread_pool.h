// A fixed team of threads for short parallel sections (one per layer of a model step).
// run(fn, context) calls fn(context, thread) on the caller, which is thread 0, and on every worker
// that comes before the caller is done; it returns when all that came are done. So fn takes its work
// piece by piece from what is left (an atomic counter), and a worker whose CPU somebody else keeps
// busy, say another library's threads that spin, is done without. With one thread it is a plain call.
// Workers spin a little between sections, then sleep on a futex; they never spin when the team is
// larger than the process's affinity mask, because spinning threads would then starve each other.
// Thread rules: run() may be called from several threads, sections are serialised. Not reentrant.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "base/result.h"

namespace kvcore {

class ThreadPool {
 public:
  using Function = void (*)(void* context, int thread);

  // num_threads 1..256. cpus: empty = not pinned, or one CPU number per thread; worker i (1..) is
  // pinned to cpus[i]. The calling thread's own affinity is left alone.
  static Result<std::unique_ptr<ThreadPool>> make(std::int64_t num_threads,
                                                  std::span<const std::int32_t> cpus = {});
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const noexcept { return num_threads_; }
  bool spins() const noexcept { return spins_ > 0; }
  void run(Function function, void* context);

 private:
  ThreadPool(int num_threads, std::int64_t spins) : num_threads_(num_threads), spins_(spins) {}
  void worker(int thread);
  bool enter() noexcept;
  void leave() noexcept;

  static constexpr std::uint32_t kClosed = std::uint32_t{1} << 31;

  const int num_threads_;
  const std::int64_t spins_;
  std::mutex section_;
  Function function_ = nullptr;
  void* context_ = nullptr;
  alignas(64) std::atomic<std::uint32_t> generation_{0};
  // Workers inside the section; kClosed: no more come in.
  alignas(64) std::atomic<std::uint32_t> inside_{kClosed};
  std::atomic<bool> stop_{false};
  std::vector<std::jthread> workers_;
};

}  // namespace kvcore
