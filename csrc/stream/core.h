// Core: all hand-overs of one worker, driven by one thread. It joins the state machines
// (receiver.h, sender.h) with a Transport and a Pool: carries out their actions, routes events to
// them, keeps one link per peer, posts writes within the limits, and gives io refs back exactly
// once.
//
// Fence before free: a receiver's pages lose their io refs only after revoke_grant has returned; a
// sender's only after every posted write has its completion.
// A hand-over may have several senders (plan.h: shares), each over its own link with its own grant.
// What a sender's pages do not hold byte for byte as the receiver wants it goes through its staging
// memory: converted and encoded when its write is posted, never on the thread that computes.
//
// A grant lists several addresses. shm ones count only on the receiver's host and are preferred;
// the first that counts is used. If it cannot be reached the hand-over fails and says so, unless
// allow_fallback lets the next address be tried (then counted in stats().fallbacks).
// Thread rules: one thread. Time comes in as an argument. Units: bytes, nanoseconds.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/fault.h"
#include "base/result.h"
#include "pages/pool.h"
#include "stream/conversion.h"
#include "stream/grant.h"
#include "stream/inbox.h"
#include "stream/plan.h"
#include "stream/port.h"
#include "stream/receiver.h"
#include "stream/sender.h"
#include "stream/slice_check.h"
#include "stream/staging.h"
#include "transport/link.h"

namespace kvcore::stream {

struct StreamOptions {
  Checksums checksums = Checksums::kSampled;
  SenderLimits limits{};
  bool allow_fallback = false;
  std::int32_t layer_begin = 0;  // of the model: the layer and KV head that are the pool's first
  std::int32_t head_begin = 0;
  std::int64_t staging_bytes = std::int64_t{32} << 20;  // of all hand-overs that convert
  const Clock* clock = nullptr;  // null = CLOCK_MONOTONIC; must outlive the core
  // Tests only. Point "stream.flip_slice": one bit of an arrived slice is flipped before its check.
  FaultPlan* faults = nullptr;
};

struct StreamEvent {
  enum class Kind : std::uint8_t { kLayerArrived, kComplete, kReceiveFailed, kSent, kSendFailed };
  Kind kind;
  RequestId request_id;
  std::vector<std::byte> payload;  // complete
  Error error{ErrorCode::kInternal, {}};
  StreamStats stats;       // of sends: bytes, kv_bytes and transport only
  std::int32_t layer = 0;  // layer arrived
};

struct CoreStats {
  std::int64_t staged_bytes = 0;            // in staging memory now
  std::int64_t receiving = 0, sending = 0;  // now
  std::int64_t completed = 0, receive_failed = 0, released = 0, sent = 0, send_failed = 0;
  std::int64_t bytes_received = 0, bytes_sent = 0;  // of completed and sent hand-overs
  std::int64_t dropped =
      0;  // events for unknown or finished hand-overs, messages that do not parse
  std::int64_t fallbacks = 0;      // connections made to another address than the preferred one
  std::int64_t refs_lost = 0;      // must stay 0: io refs the pool refused to take back
  std::vector<std::string> links;  // addresses of the outgoing links that are up
};

class Core {
 public:
  // The transport must outlive the core. Registers the pool's arena.
  static Result<std::unique_ptr<Core>> make(std::shared_ptr<pages::Pool> pool,
                                            transport::Transport* transport,
                                            std::shared_ptr<Inbox> inbox, StreamOptions options);
  ~Core();

  // What this worker's pages hold of the model.
  Side side() const { return {pool_->spec().options(), options_.layer_begin, options_.head_begin}; }
  // Grants name these addresses (listened on by the owner of the transport).
  void set_addresses(std::vector<std::string> addresses) { addresses_ = std::move(addresses); }
  // Pages are open, or of one compressed class and full: those are filled in that class. shares:
  // what each sender gives, together all this worker holds; empty: one sender gives it.
  // tell_layers: an event for each layer that is in place.
  Result<std::vector<std::byte>> grant(const RequestId& id, std::span<const std::int32_t> pages,
                                       std::int64_t first_token, std::int64_t num_tokens,
                                       std::int64_t now_ns, std::int64_t deadline_ns,
                                       std::span<const Share> shares = {},
                                       bool tell_layers = false);
  // share: which of the grant's this side gives. pages: this side's, from the one that holds the
  // grant's first token to the one that holds its last.
  Result<std::shared_ptr<SendPort>> open(std::span<const std::byte> grant,
                                         std::span<const std::int32_t> pages, std::int64_t now_ns,
                                         std::size_t share = 0);
  // Fence, then the pages are free of this hand-over. False: it was over already, or never was.
  bool release(const RequestId& id, std::int64_t now_ns);

  void publish(std::uint64_t sender, const SliceRun& run);
  void mark(std::uint64_t sender, std::int64_t at_ns);
  void commit(std::uint64_t sender, const std::vector<std::byte>& payload, std::int64_t at_ns);
  void abort(std::uint64_t sender, const Error& error);

  // Handles up to max_events of the transport's events and the deadlines, and posts writes. True if
  // there may be more to do at once.
  bool step(std::int64_t now_ns, std::size_t max_events = 64);
  std::int64_t next_deadline_ns() const;  // 0 = none
  std::vector<StreamEvent> take_events();
  CoreStats stats() const;
  // Ends everything: receivers released, senders aborted, the transport closed, all refs given
  // back.
  void close(std::int64_t now_ns);

 private:
  struct PageSet {  // where pages lie
    std::vector<std::int64_t> offsets;
    std::vector<bool> sealed;  // empty: none
    std::int64_t layer_stride_bytes = 0;
    std::int32_t class_number = 0;  // of the sealed ones
  };
  struct Arrived {  // a run that waits for its sums
    transport::Arrival arrival;
    SliceRun run;
  };
  struct IncomingShare {
    Placement place;
    std::int32_t layer_begin = 0;  // in this worker's counting
    std::string scheme{};          // of the sender's link, once open
    SliceSums sums{};              // where slices come without headers
    std::vector<Arrived> waiting{};
  };
  struct Incoming {
    Receiver machine;
    std::vector<std::int32_t> pages;
    bool with_headers = true;
    std::uint32_t class_number = 0;
    pages::PageClass page_class;  // of sealed pages
    std::vector<IncomingShare> shares{};
    std::deque<Receiver::Action> actions{};    // to be carried out
    std::set<std::uint64_t> pending_fences{};  // grants; while there are any, actions wait
  };
  struct Outgoing {
    Sender machine;
    std::vector<std::int32_t> pages;
    Placement local, remote;  // local: where slices lie that are sent as they are
    std::shared_ptr<SendPort> port;
    bool with_headers = true;
    Way way = Way::kWhole;
    bool packed = false;                       // sealed slices are sent as they lie, too
    std::unique_ptr<Conversion> conversion{};  // null: nothing is staged
    std::optional<transport::LinkId> peer{};
  };
  struct Posted {
    std::uint64_t sender;
    std::int64_t staged_at = 0, staged_bytes = 0;
  };
  struct Peer {
    std::shared_ptr<transport::Link> link;
    std::string address, scheme;
    std::vector<std::string> left;  // addresses to try if this one fails
    bool up = false;
    std::set<std::uint64_t> senders;
  };

  Core(std::shared_ptr<pages::Pool> pool, transport::Transport* transport,
       std::shared_ptr<Inbox> inbox, StreamOptions options, transport::RegionId region);
  Status check_pages(std::span<const std::int32_t> pages) const;
  Result<PageSet> page_set(std::span<const std::int32_t> pages) const;
  Result<StreamGrant> describe(const RequestId& id, std::span<const std::int32_t> pages,
                               std::span<const Share> shares) const;
  Status make_grants(StreamGrant& grant, std::int64_t deadline_ns);
  Incoming incoming(const StreamGrant& grant, std::span<const std::int32_t> pages,
                    std::int64_t deadline_ns, bool tell_layers) const;
  Status check_open(const StreamGrant& grant, std::span<const std::int32_t> pages,
                    std::size_t share) const;
  Result<Outgoing> outgoing(const StreamGrant& grant, std::span<const std::int32_t> pages,
                            std::size_t share, std::int64_t now_ns);
  Status check_packed(const StreamGrant& grant, const PageSet& set, Way way) const;
  Result<transport::LinkId> peer_for(const StreamGrant& grant);
  Result<transport::LinkId> connect(std::vector<std::string> addresses);
  void attach(std::uint64_t id, Outgoing& out, transport::LinkId link);

  void handle(transport::Event& event, std::int64_t now_ns);
  void on_up(const transport::Up& up);
  void on_down(const transport::Down& down, std::int64_t now_ns);
  void on_arrival(const transport::Arrival& arrival, std::int64_t now_ns);
  void on_message(const transport::Message& message, std::int64_t now_ns);
  void on_completion(const transport::Completion& completion, std::int64_t now_ns);
  void on_fenced(const transport::Fenced& fenced);
  void take_arrival(const RequestId& id, std::size_t share, const transport::Arrival& arrival,
                    std::int64_t now_ns);
  void on_sums(const RequestId& id, std::size_t share, const StreamMessage& message,
               std::int64_t now_ns);
  void on_open(const RequestId& id, const transport::Message& from, const StreamMessage& open,
               std::int64_t now_ns);
  Status check_run(const Incoming& in, std::size_t share, const SliceRun& run) const;
  std::span<std::byte> piece(const Incoming& in, std::size_t share, std::int32_t layer,
                             std::int32_t slot) const;
  SliceHeader header_of(const Incoming& in, std::int32_t layer, std::int32_t slot) const;
  void flip_if_asked(const Incoming& in, std::size_t share, const SliceRun& run);
  std::string scheme_of(transport::LinkId link) const;
  std::int64_t clock_ns() const;

  bool pump();
  bool post_one(std::uint64_t id, Peer& peer);
  void post(std::uint64_t id, Peer& peer, const SliceRun& run);
  void send_sums(Peer& peer, const Outgoing& out, const SliceRun& run,
                 std::span<const transport::Segment> segments, const std::byte* base);
  bool stage(Posted& posted, std::int64_t bytes);
  void unstage(const Posted& posted);
  void on_time(std::int64_t now_ns);
  void settle_receiver(const RequestId& id);  // carries out its actions; forgets it when it is over
  void carry_out(const RequestId& id, Incoming& in, Receiver::Action action);
  void after_fence(Incoming& in);
  void settle_sender(std::uint64_t id);
  void finish_pages(const Incoming& in);
  void revoke_all(Incoming& in);
  void send(transport::LinkId link, const StreamMessage& message);
  Status claim(std::span<const std::int32_t> pages);
  void unclaim(std::span<const std::int32_t> pages);
  void io_release(std::span<const std::int32_t> pages);

  const std::shared_ptr<pages::Pool> pool_;
  transport::Transport* const transport_;
  const std::shared_ptr<Inbox> inbox_;
  const StreamOptions options_;
  const transport::RegionId region_;
  SliceStamper stamper_;
  std::vector<std::string> addresses_;
  std::map<RequestId, Incoming> incoming_;
  std::vector<bool> claimed_;  // [num_pages], by one of incoming_
  std::unique_ptr<Staging> staging_;
  std::map<std::uint64_t, std::pair<RequestId, std::size_t>> by_grant_;  // GrantRef::id -> share
  std::map<std::uint64_t, Outgoing> outgoing_;
  std::map<std::pair<RequestId, std::uint64_t>, std::uint64_t> sender_of_;  // by grant
  std::map<std::pair<transport::LinkId, transport::OpId>, Posted> ops_;     // posted writes
  std::map<transport::LinkId, Peer> peers_;                                 // outgoing links
  std::uint64_t next_sender_ = 1;
  std::vector<StreamEvent> events_;
  CoreStats stats_;
  bool closed_ = false;
};

}  // namespace kvcore::stream
