// Receiver: the state machine of one incoming hand-over. Sans-I/O: it holds no clock, thread or
// socket; it is told what happened and answers with actions that its owner carries out in order.
// Several senders may feed it, each with its share of the layers and KV heads and a grant of its
// own; each share is counted by itself.
//
//   granted --open--> streaming --all slices and commit, of every share--> complete
//      \________________\__abort, corrupt, down, deadline--> failed
//       \________________\__release-------------------------> released
//
// Invariants: complete only when every slice of every layer of every share has arrived and each
// share's commit was seen; what ends one share ends all;
// exactly one Fence in a life, and after it no input changes anything but the counters; an Event
// exactly once, except after release(), which the caller asked for. Whatever does not fit (unknown
// link, duplicate, late) is counted and dropped. Thread rules: none (one thread). Units: bytes,
// nanoseconds.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "base/result.h"
#include "stream/message.h"
#include "stream/run.h"
#include "transport/link.h"

namespace kvcore::stream {

// What one hand-over moved and when. Times are the receiver's CLOCK_MONOTONIC; mark_ns and
// commit_ns are the sender's, comparable when same_clock.
struct StreamStats {
  std::int64_t bytes = 0;     // of slices that arrived, headers included
  std::int64_t kv_bytes = 0;  // of all slices of the grant
  std::int32_t num_layers = 0;
  std::int64_t first_ns = 0;
  std::int64_t last_ns = 0;    // last slice
  std::int64_t mark_ns = 0;    // the sender's last attention ended
  std::int64_t commit_ns = 0;  // the sender gave the payload: prefill is over
  std::int64_t end_ns = 0;     // complete or failed
  bool same_clock = false;
  // mark_ns and commit_ns: the last of all senders.
  // Bytes that had arrived at mark_ns / kv_bytes; across hosts, where clocks differ, the bytes the
  // sender knew to have arrived (a lower bound). 0 without a mark.
  double arrived_fraction = 0;
  double tail_s = 0;     // from mark to the last slice; 0 when it came before (or no common clock)
  double exposed_s = 0;  // from commit (prefill over) to complete; 0 without a common clock
  std::int64_t duplicates = 0;  // slices that came again
  std::int64_t dropped = 0;     // messages and arrivals that did not fit
  std::string transport;
};

class Receiver {
 public:
  enum class State { kGranted, kStreaming, kComplete, kFailed, kReleased };

  struct Send {
    transport::LinkId link;
    StreamMessage message;
  };
  struct LayerArrived {  // all of this layer, of every share, is in place
    std::int32_t layer;  // of the receiver's pages
  };
  struct Fence {};  // revoke the transport's grants, then drop the io refs
  struct Complete {
    std::vector<std::byte> payload;
    StreamStats stats;
  };
  struct Failed {
    Error error;
    StreamStats stats;
  };
  using Action = std::variant<Send, LayerArrived, Fence, Complete, Failed>;

  struct ShareOf {  // what one sender gives
    Shape shape;
    transport::GrantRef grant;
    std::int32_t layer_begin = 0;  // of the receiver's pages: the shape's layer 0
  };

  // tell_layers: LayerArrived, once for each layer, before Complete.
  Receiver(const RequestId& id, std::vector<ShareOf> shares, HostId host, std::int64_t deadline_ns,
           bool tell_layers = false);

  void on_open(transport::LinkId link, const StreamMessage& open, const std::string& transport);
  // share: index. at_ns: when the bytes were in place. status: of the transport and of the check of
  // their header or sum.
  void on_arrival(transport::LinkId link, std::size_t share, const SliceRun& run,
                  std::int64_t bytes, std::int64_t at_ns, const Status& status,
                  std::int64_t now_ns);
  void on_message(transport::LinkId link, StreamMessage message, std::int64_t now_ns);
  void on_down(transport::LinkId link, const Error& error, std::int64_t now_ns);
  void on_time(std::int64_t now_ns);
  void release(std::int64_t now_ns);

  std::vector<Action> take_actions();
  State state() const noexcept { return state_; }
  bool active() const noexcept { return state_ <= State::kStreaming; }
  std::int64_t deadline_ns() const noexcept { return deadline_ns_; }
  const RequestId& id() const noexcept { return id_; }
  std::size_t num_shares() const noexcept { return shares_.size(); }
  const Shape& shape(std::size_t share = 0) const noexcept { return shares_[share].shape; }
  transport::GrantRef grant(std::size_t share = 0) const noexcept { return shares_[share].grant; }
  // The share that a grant stands for, or num_shares().
  std::size_t share_of(transport::GrantRef grant) const noexcept;
  bool bound_to(std::size_t share, transport::LinkId link) const noexcept;
  std::int32_t arrived_slots(std::int32_t layer, std::size_t share = 0) const;

 private:
  struct Incoming {
    Shape shape;
    transport::GrantRef grant;
    std::int32_t layer_begin = 0;
    std::optional<transport::LinkId> link{};
    std::vector<bool> arrived{};                // [num_layers * num_slots]
    std::vector<std::int32_t> layer_arrived{};  // [num_layers], slots
    std::int64_t num_arrived = 0;               // slices
    std::int64_t bytes = 0;
    bool same_clock = false;
    std::optional<StreamMessage> mark{};
    std::optional<StreamMessage> commit{};
    bool whole() const noexcept { return commit && num_arrived == shape.num_slices(); }
  };
  void count(Incoming& in, const SliceRun& run, std::int64_t at_ns);
  void complete_if_whole(std::int64_t now_ns);
  void fail(Error error, std::int64_t now_ns);
  void tell_all(const StreamMessage& message);
  void finish(State state, std::int64_t now_ns);
  void account();
  std::vector<std::byte> take_payload();

  const RequestId id_;
  const HostId host_;
  const std::int64_t deadline_ns_;
  const bool tell_layers_;
  State state_ = State::kGranted;
  std::vector<Incoming> shares_;
  std::vector<std::int64_t> layer_missing_;  // [layers of the pages]: slices of all shares
  struct Landed {
    std::int64_t at_ns, bytes;
  };
  std::vector<Landed> log_;  // at most one entry per slice
  StreamStats stats_;
  std::vector<Action> actions_;
};

}  // namespace kvcore::stream
