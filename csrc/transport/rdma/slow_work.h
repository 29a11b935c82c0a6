// One thread for what may take seconds (opening a device, pinning memory), so that the I/O thread,
// and with it every other link, never waits for it.
//
// Work runs one by one in that thread, in the order of submission, and returns what the I/O thread
// does with its result. Destruction waits for the work under way and drops the rest. Thread rules:
// submit and run_finished by the I/O thread; `wake` is called by the thread of the work.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace kvcore::transport::rdma {

class SlowWork {
 public:
  using Finish = std::function<void()>;
  using Work = std::function<Finish()>;

  explicit SlowWork(std::function<void()> wake);

  void submit(Work work);
  void run_finished();

 private:
  void run(const std::stop_token& stop);

  std::function<void()> wake_;
  std::mutex mu_;
  std::condition_variable_any changed_;
  std::deque<Work> work_;
  std::vector<Finish> finished_;
  std::jthread thread_;  // last: joined before the rest goes
};

}  // namespace kvcore::transport::rdma
