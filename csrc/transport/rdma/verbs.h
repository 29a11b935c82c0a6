// The verbs that the rdma link uses, as interfaces: libibverbs behind them (verbs_ibv.cpp, loaded
// by dlopen), or a fake fabric in tests. Only what kvcore needs: reliable connected queue pairs,
// one-sided work, zero-byte receives of a shared queue, type 2B memory windows.
//
// Life         A Nic outlives what it made; windows go before the queue pair they are bound to.
//              Destroying a Window or a QueuePair is the hard fence: when the destructor has
//              returned, nothing reaches memory through it any more.
// Threads      One thread for a Nic and all it made, but for register_memory (any thread).
// Completions  Every piece of work that fails or is flushed completes, signalled or not; work that
//              succeeds completes only when signalled. Those of one queue pair come in the order of
//              posting, those of two in any order.
// Units        bytes; addresses are virtual addresses of the process that owns the memory.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "transport/rdma/gid.h"

namespace kvcore::transport::rdma {

struct MemoryRequest {
  std::byte* base = nullptr;
  std::uint64_t bytes = 0;
  int dmabuf_fd = -1;            // device memory by dma-buf; -1 = the address itself
  bool relaxed_ordering = true;  // of payload; never of memory that is polled
};

// A registration. It lets this side read and write; peers get in through windows only.
class RegisteredMemory {
 public:
  virtual ~RegisteredMemory() = default;
  virtual std::uint32_t local_key() const noexcept = 0;
};

// A type 2B window: names a byte range to one peer's queue pair while it is bound.
class Window {
 public:
  virtual ~Window() = default;
  virtual std::uint32_t key() const noexcept = 0;  // the last one; a bind takes following_key of it
};

// Consumers own the low byte of a window's key: each binding has another one.
constexpr std::uint32_t following_key(std::uint32_t key) noexcept {
  return (key & 0xffffff00U) | ((key + 1) & 0xffU);
}

enum class WorkKind : std::uint8_t { kWrite, kWriteImmediate, kRead, kBind, kInvalidate, kReceive };

struct LocalPiece {
  std::uint64_t address;
  std::uint32_t bytes;
  std::uint32_t key;
};

struct Work {
  std::uint64_t id = 0;
  WorkKind kind = WorkKind::kWrite;
  bool signalled = false;
  std::span<const LocalPiece> pieces{};  // kWrite*, kRead: gathered from or scattered to
  std::uint64_t remote_address = 0;      // kWrite*, kRead; kBind: where the window begins
  std::uint32_t remote_key = 0;          // kWrite*, kRead; kBind: the new key; kInvalidate: the key
  std::uint32_t immediate = 0;           // kWriteImmediate, host order
  std::uint64_t window_bytes = 0;        // kBind
  bool remote_read = false, remote_write = false;  // kBind
  Window* window = nullptr;                        // kBind
  const RegisteredMemory* memory = nullptr;        // kBind
};

enum class WorkStatus : std::uint8_t {
  kOk,
  kFlushed,       // the queue pair was in error before this was executed, or may have been executed
  kRemoteAccess,  // the peer's window did not allow it: revoked, or never ours
  kRetry,         // no acknowledgement after every retry
  kReceiverNotReady,  // the peer had no receive posted, after every retry
  kLocal,             // this side's request was wrong or its memory is gone
  kFatal,             // the device
};
std::string_view to_string(WorkStatus status) noexcept;

struct WorkDone {
  std::uint64_t id = 0;  // undefined for kReceive
  QueuePairNumber queue_pair{};
  WorkKind kind = WorkKind::kWrite;  // kReceive, or undefined when status is not kOk
  WorkStatus status = WorkStatus::kOk;
  std::uint32_t immediate = 0;  // kReceive
};

// How queue pairs are connected. Retries are finite: 7 means for ever to some devices.
struct PathSettings {
  std::uint8_t retry_count = 3;     // [0, 6]
  std::uint8_t receiver_retry = 6;  // [0, 6]
  std::uint8_t timeout = 14;        // 4.096 us * 2^timeout, [1, 31]
  std::uint8_t receiver_wait = 12;  // code of 0.64 ms: what we ask of a peer that must wait
  std::uint8_t hop_limit = 64;
  std::uint8_t traffic_class = 106;  // DSCP 26, ECN capable
  std::uint8_t service_level = 0;
  std::uint8_t outstanding_reads = 16;  // cut to what the device can do
};
Status check(const PathSettings& settings);

// What a peer must know of a queue pair; travels in authenticated control messages only.
struct Endpoint {
  Gid gid{};
  QueuePairNumber number{};
  std::uint32_t first_packet = 0;  // 24 bits, random
  std::uint32_t mtu_bytes = 0;     // of the path: the smaller of both sides
  friend bool operator==(const Endpoint&, const Endpoint&) = default;
};

class QueuePair {
 public:
  virtual ~QueuePair() = default;
  virtual const Endpoint& local() const noexcept = 0;
  // To ready-to-receive and ready-to-send.
  virtual Status connect(const Endpoint& remote, const PathSettings& settings) = 0;
  // All or, when it fails, the first *posted of them. After a failure destroy the queue pair: a
  // half posted batch leaves no way to count.
  virtual Status post(std::span<const Work> work, std::size_t* posted) = 0;
};

struct NicInfo {
  std::string name;  // "mlx5_0"
  Gid gid{};
  int gid_index = 0;
  std::uint32_t mtu_bytes = 0;
  std::uint32_t send_depth = 0;  // work that fits in one queue pair
  std::uint32_t max_pieces = 0;  // LocalPiece of one Work
  bool windows = false;          // type 2B
};

enum class NicEvent : std::uint8_t { kPortDown, kPortUp, kGidChanged, kFatal };

class Nic {
 public:
  virtual ~Nic() = default;
  virtual const NicInfo& info() const noexcept = 0;
  virtual Result<std::unique_ptr<RegisteredMemory>> register_memory(const MemoryRequest& r) = 0;
  virtual Result<std::unique_ptr<Window>> make_window() = 0;
  virtual Result<std::unique_ptr<QueuePair>> make_queue_pair(std::uint32_t first_packet) = 0;
  // Zero-byte receives, shared by every queue pair of this Nic: each immediate consumes one.
  virtual Status post_receives(std::uint32_t count) = 0;
  virtual Result<std::size_t> poll(std::span<WorkDone> done) = 0;
  // Readable once work completes after arm(); arm() before the last poll() of a round, so that
  // nothing is missed. -1 = none (the fake).
  virtual int completion_fd() const noexcept = 0;
  virtual Status arm() = 0;
  virtual int event_fd() const noexcept = 0;
  virtual std::vector<NicEvent> take_events() = 0;
};

struct NicRequest {
  std::string device;
  std::uint8_t port = 1;
  int gid_index = 0;
  std::uint32_t send_depth = 512;
  std::uint32_t receives = 4096;
};

class Verbs {
 public:
  virtual ~Verbs() = default;
  virtual Result<std::unique_ptr<Nic>> open(const NicRequest& request) = 0;
};

// libibverbs.so.1, loaded at the first call. Unsupported with the reason: built without the
// headers, or no library on this machine.
Result<Verbs*> system_verbs();

}  // namespace kvcore::transport::rdma
