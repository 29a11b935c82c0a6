// Endpoint: a Core with its own I/O thread; one per worker process. Calls from other threads go to
// the I/O thread through the inbox; grant, open and release wait for its answer (tens of
// microseconds), publishing does not. Events collect in a queue with an eventfd for asyncio.
// Thread rules: every method from any thread but the I/O thread itself. close() ends all hand-overs
// and joins the thread; ports may outlive the endpoint (their calls then do nothing).
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/result.h"
#include "stream/core.h"
#include "stream/inbox.h"
#include "transport/link.h"

namespace kvcore::stream {

class Endpoint {
 public:
  // Listens on every address of `listen`; addresses() has the ports filled in.
  static Result<std::unique_ptr<Endpoint>> make(std::shared_ptr<pages::Pool> pool,
                                                std::unique_ptr<transport::Transport> transport,
                                                const std::vector<std::string>& listen,
                                                StreamOptions options,
                                                std::unique_ptr<FaultPlan> faults = nullptr);
  ~Endpoint();

  Result<std::vector<std::byte>> grant(const RequestId& id, std::vector<std::int32_t> pages,
                                       std::int64_t first_token, std::int64_t num_tokens,
                                       std::int64_t deadline_ns, std::vector<Share> shares = {},
                                       bool tell_layers = false);
  Result<std::shared_ptr<SendPort>> open(std::vector<std::byte> grant,
                                         std::vector<std::int32_t> pages, std::size_t share = 0);
  Result<bool> release(const RequestId& id);
  Result<CoreStats> stats();

  std::vector<StreamEvent> poll();
  int event_fd() const noexcept { return event_fd_; }  // readable while events wait
  const std::vector<std::string>& addresses() const noexcept { return addresses_; }
  const std::shared_ptr<pages::Pool>& pool() const noexcept { return pool_; }
  void close();

 private:
  Endpoint(std::shared_ptr<pages::Pool> pool, std::unique_ptr<transport::Transport> transport,
           std::unique_ptr<FaultPlan> faults);
  template <class T>
  Result<T> call(std::function<Result<T>(Core&)> f);
  void loop();
  void queue_events();

  const std::shared_ptr<pages::Pool> pool_;
  const std::unique_ptr<FaultPlan> faults_;
  const std::unique_ptr<transport::Transport> transport_;
  const std::shared_ptr<Inbox> inbox_;
  std::unique_ptr<Core> core_;  // after start: the I/O thread's alone
  std::vector<std::string> addresses_;
  std::mutex events_mu_;
  std::vector<StreamEvent> events_;
  int event_fd_;
  std::atomic<bool> stop_{false};
  std::mutex close_mu_;
  std::jthread thread_;
};

}  // namespace kvcore::stream
