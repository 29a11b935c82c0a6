// SendPort: the compute thread's side of one outgoing hand-over. Calls are checked here, at once;
// what passes goes to the I/O thread by the inbox, so no call waits for a peer or a queue. A slice
// is published once, when all its tokens are in place: layers are this side's own, pages those of
// the receiver, which may have another size; from then on the caller must not write the
// page until the hand-over has ended (pages are held by io refs, so freeing them early is safe).
// Thread rules: every method from any thread. Units: tokens, bytes, nanoseconds.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "base/result.h"
#include "stream/inbox.h"
#include "stream/message.h"
#include "stream/run.h"
#include "stream/sender.h"

namespace kvcore::stream {

class SendPort {
 public:
  struct Progress {
    Sender::State state = Sender::State::kConnecting;
    Status status;  // why it failed
    std::int64_t acked_bytes = 0;
    std::string transport;  // "shm", "tcp", "loopback"; empty until connected
  };

  SendPort(std::uint64_t sender, const RequestId& id, const Shape& shape, std::int64_t first_token,
           std::int32_t layer_begin, const PagesView* pages, std::shared_ptr<Inbox> inbox);

  // Slots [first, first + count) of `layer` are in place. valid_last: tokens in the last of them,
  // page_size unless it is the last slot of the hand-over, where it must be what the grant says.
  Status publish(std::int32_t layer, std::int32_t first, std::int32_t count,
                 std::int32_t valid_last);
  // All layers of these slots (pages found in a prefix cache).
  Status push_cached(std::int32_t first, std::int32_t count);
  // All layers of what lies before token `end` of the sequence.
  Status push_cached_upto(std::int64_t end_token);
  // The sequence's KV of `layer` is in place up to token `end` (of the sequence, exclusive):
  // publishes the slots that are whole by now and were not published before. Layers that
  // the hand-over does not send are passed over. Cheap: for the op of each layer.
  Status publish_upto(std::int32_t layer, std::int64_t end_token);
  // The last attention of prefill ended at at_ns (CLOCK_MONOTONIC). Once; later calls are ignored.
  void mark(std::int64_t at_ns);
  // Nothing more comes. InvalidArgument while a slice is unpublished.
  Status commit(std::vector<std::byte> payload, std::int64_t at_ns);
  void abort(ErrorCode code, std::string reason);

  bool all_published() const;
  Progress progress() const;
  void set_progress(Progress progress);  // by the I/O thread
  const RequestId& id() const noexcept { return id_; }
  const Shape& shape() const noexcept { return shape_; }
  std::int64_t first_token() const noexcept { return first_token_; }
  std::uint64_t sender() const noexcept { return sender_; }
  const PagesView* pages() const noexcept { return pages_; }  // of the pool it sends from

 private:
  Status may_publish(const SliceRun& run) const;
  void note_published(const SliceRun& run);
  void publish_upto_locked(std::int32_t layer, std::int64_t end_token);
  void send_run(const SliceRun& run);

  const std::uint64_t sender_;
  const RequestId id_;
  const Shape shape_;
  const std::int64_t first_token_;
  const std::int32_t layer_begin_;  // this side's layer that is the shape's layer 0
  const PagesView* const pages_;
  const std::shared_ptr<Inbox> inbox_;
  mutable std::mutex mu_;
  std::vector<bool> published_;       // [num_layers * num_slots]
  std::vector<std::int32_t> cursor_;  // [num_layers]: slots below were published or skipped
  std::int64_t num_published_ = 0;    // slices
  bool marked_ = false;
  bool committed_ = false;
  mutable std::mutex progress_mu_;
  Progress progress_;
};

}  // namespace kvcore::stream
