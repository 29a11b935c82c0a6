// Inbox: commands from any thread to the endpoint's I/O thread. push() is a short lock, and one
// write to an eventfd when the inbox was empty; it never waits for I/O. Thread rules: push, run and
// close from any thread; drain from the I/O thread only.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

namespace kvcore::stream {

class Core;

class Inbox {
 public:
  using Command = std::function<void(Core&)>;
  Inbox();
  ~Inbox();
  Inbox(const Inbox&) = delete;
  Inbox& operator=(const Inbox&) = delete;

  bool push(Command command);  // false: closed, the command was not taken
  std::vector<Command> drain();
  void wake();   // makes fd() readable although nothing was pushed
  void close();  // push returns false from now on
  int fd() const noexcept { return fd_; }

 private:
  std::mutex mu_;
  std::vector<Command> commands_;
  bool closed_ = false;
  int fd_;
};

}  // namespace kvcore::stream
