#include "transport/rdma/slow_work.h"

#include <utility>

namespace kvcore::transport::rdma {

SlowWork::SlowWork(std::function<void()> wake)
    : wake_(std::move(wake)), thread_([this](const std::stop_token& stop) { run(stop); }) {}

void SlowWork::submit(Work work) {
  {
    const std::lock_guard lock(mu_);
    work_.push_back(std::move(work));
  }
  changed_.notify_one();
}

void SlowWork::run_finished() {
  std::vector<Finish> finished;
  {
    const std::lock_guard lock(mu_);
    finished.swap(finished_);
  }
  for (const Finish& finish : finished) finish();
}

void SlowWork::run(const std::stop_token& stop) {
  for (;;) {
    Work work;
    {
      std::unique_lock lock(mu_);
      if (!changed_.wait(lock, stop, [this] { return !work_.empty(); }) || stop.stop_requested())
        return;
      work = std::move(work_.front());
      work_.pop_front();
    }
    Finish finish = work();
    {
      const std::lock_guard lock(mu_);
      finished_.push_back(std::move(finish));
    }
    wake_();
  }
}

}  // namespace kvcore::transport::rdma
