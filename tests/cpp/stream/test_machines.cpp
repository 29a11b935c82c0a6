// Receiver and Sender alone: accounting, totality, exactly-once.
#include <gtest/gtest.h>

#include "fixture.h"
#include "stream/receiver.h"
#include "stream/sender.h"

namespace kvcore::stream {
namespace {

using transport::LinkId;
using transport::OpId;

const Shape kShape{
    .num_layers = 2, .num_slots = 2, .page_size = 16, .num_tokens = 20, .slice_bytes = 100};
constexpr transport::GrantRef kGrant{5, 6};

template <class T, class Actions>
int count_of(const Actions& actions) {
  int n = 0;
  for (const auto& a : actions) n += std::holds_alternative<T>(a);
  return n;
}

StreamMessage message(MessageKind kind, std::int64_t at_ns = 0) {
  StreamMessage m{.kind = kind};
  m.grant = kGrant;
  m.host = local_host_id();
  m.at_ns = at_ns;
  return m;
}

Receiver opened() {
  Receiver r({}, {{kShape, kGrant}}, local_host_id(), 1000);
  r.on_open(LinkId{1}, message(MessageKind::kOpen), "loopback");
  return r;
}

// Two shares of two layers each, the second one layer further on: layer 1 is of both.
TEST(Receiver, TellsEachLayerOnceWhenAllSharesHaveIt) {
  const transport::GrantRef other{7, 8};
  Receiver r({}, {{kShape, kGrant, 0}, {kShape, other, 1}}, local_host_id(), 1000, true);
  StreamMessage open = message(MessageKind::kOpen);
  r.on_open(LinkId{1}, open, "loopback");
  open.grant = other;
  r.on_open(LinkId{2}, open, "loopback");
  std::vector<std::int32_t> layers;
  const auto arrive = [&](std::uint64_t link, std::size_t share, const SliceRun& run) {
    r.on_arrival(LinkId{link}, share, run, 100 * run.count, 10, {}, 10);
    for (const auto& a : r.take_actions()) {
      if (const auto* layer = std::get_if<Receiver::LayerArrived>(&a))
        layers.push_back(layer->layer);
    }
  };
  arrive(1, 0, {1, 0, 2});
  arrive(2, 1, {0, 1, 1});
  EXPECT_TRUE(layers.empty());  // of layer 1 one slice is missing
  arrive(2, 1, {0, 0, 1});
  arrive(2, 1, {0, 0, 2});  // again
  arrive(2, 1, {1, 0, 2});
  arrive(1, 0, {0, 0, 2});
  EXPECT_EQ(layers, (std::vector<std::int32_t>{1, 2, 0}));
}

TEST(Receiver, CompletesOnlyWithEverySliceAndCommit) {
  for (const bool commit_first : {false, true}) {
    Receiver r = opened();
    StreamMessage commit = message(MessageKind::kCommit, 60);
    commit.payload = testing::as_payload("7");
    if (commit_first) r.on_message(LinkId{1}, commit, 30);
    r.on_arrival(LinkId{1}, 0, {0, 0, 2}, 200, 40, {}, 40);
    r.on_message(LinkId{1}, message(MessageKind::kMark, 50), 55);
    r.on_arrival(LinkId{1}, 0, {1, 1, 1}, 100, 50, {}, 50);
    EXPECT_EQ(r.take_actions().size(), 0u);
    r.on_arrival(LinkId{1}, 0, {1, 0, 1}, 100, 70, {}, 70);
    if (!commit_first) {
      EXPECT_EQ(r.state(), Receiver::State::kStreaming);
      r.on_message(LinkId{1}, commit, 80);
    }
    EXPECT_EQ(r.state(), Receiver::State::kComplete);
    const auto actions = r.take_actions();
    ASSERT_EQ(actions.size(), 3u);
    EXPECT_TRUE(std::holds_alternative<Receiver::Fence>(actions[0]));  // before anyone is told
    EXPECT_TRUE(std::holds_alternative<Receiver::Send>(actions[1]));
    const auto& done = std::get<Receiver::Complete>(actions[2]);
    EXPECT_EQ(done.payload, testing::as_payload("7"));
    EXPECT_EQ(done.stats.bytes, 400);
    EXPECT_EQ(done.stats.kv_bytes, 400);
    EXPECT_DOUBLE_EQ(done.stats.arrived_fraction, 0.75);  // 200 at 40, 100 at 50, the mark at 50
    EXPECT_NEAR(done.stats.tail_s, 20e-9, 1e-12);
    EXPECT_NEAR(done.stats.exposed_s, commit_first ? 10e-9 : 20e-9, 1e-12);
    EXPECT_EQ(done.stats.first_ns, 40);
    EXPECT_EQ(done.stats.last_ns, 70);
  }
}

TEST(Receiver, AcrossHostsTheSendersAcksCount) {
  Receiver r({}, {{kShape, kGrant}}, local_host_id(), 1000);
  StreamMessage open = message(MessageKind::kOpen);
  open.host[0] ^= std::byte{1};
  r.on_open(LinkId{1}, open, "tcp");
  r.on_arrival(LinkId{1}, 0, {0, 0, 2}, 200, 40, {}, 40);
  StreamMessage mark = message(MessageKind::kMark, 999999);  // another clock
  mark.acked_bytes = 100;
  r.on_message(LinkId{1}, mark, 55);
  r.on_arrival(LinkId{1}, 0, {1, 0, 2}, 200, 70, {}, 70);
  r.on_message(LinkId{1}, message(MessageKind::kCommit, 1), 80);
  const auto actions = r.take_actions();
  const auto& done = std::get<Receiver::Complete>(actions.back());
  EXPECT_DOUBLE_EQ(done.stats.arrived_fraction, 0.25);
  EXPECT_EQ(done.stats.exposed_s, 0);
  EXPECT_FALSE(done.stats.same_clock);
}

TEST(Receiver, DuplicatesAndStrangersAreCountedAndDropped) {
  Receiver r = opened();
  r.on_arrival(LinkId{1}, 0, {0, 0, 2}, 200, 40, {}, 40);
  r.on_arrival(LinkId{1}, 0, {0, 0, 2}, 200, 41, {}, 41);
  r.on_arrival(LinkId{2}, 0, {1, 0, 2}, 200, 42, {}, 42);
  r.on_message(LinkId{2}, message(MessageKind::kCommit), 43);
  r.on_message(LinkId{1}, message(MessageKind::kDone), 43);
  r.on_arrival(LinkId{1}, 0, {1, 0, 2}, 200, 44, {}, 44);
  EXPECT_EQ(r.state(), Receiver::State::kStreaming);
  r.on_message(LinkId{1}, message(MessageKind::kCommit), 45);
  const auto actions = r.take_actions();
  const auto& done = std::get<Receiver::Complete>(actions.back());
  EXPECT_EQ(done.stats.duplicates, 2);
  EXPECT_EQ(done.stats.dropped, 3);
  EXPECT_EQ(done.stats.bytes, 400);
}

TEST(Receiver, ASecondSenderOrAnOldGrantIsRefused) {
  Receiver r({}, {{kShape, kGrant}}, local_host_id(), 1000);
  StreamMessage old = message(MessageKind::kOpen);
  old.grant.generation = 5;
  r.on_open(LinkId{1}, old, "shm");
  r.on_open(LinkId{1}, message(MessageKind::kOpen), "shm");
  r.on_open(LinkId{2}, message(MessageKind::kOpen), "shm");
  const auto actions = r.take_actions();
  ASSERT_EQ(count_of<Receiver::Send>(actions), 2);
  EXPECT_EQ(std::get<Receiver::Send>(actions[1]).link, LinkId{2});
  EXPECT_EQ(r.state(), Receiver::State::kStreaming);
}

TEST(Receiver, WhatDoesNotFitTheGrantFailsTheStream) {
  for (const SliceRun run : {SliceRun{2, 0, 1}, {0, 2, 1}, {0, 0, 3}, {0, 1, 2}, {0, 0, 0}}) {
    Receiver r = opened();
    r.on_arrival(LinkId{1}, 0, run, run.count * 100, 40, {}, 40);
    EXPECT_EQ(r.state(), Receiver::State::kFailed);
    EXPECT_EQ(count_of<Receiver::Failed>(r.take_actions()), 1);
  }
  Receiver r = opened();
  r.on_arrival(LinkId{1}, 0, {0, 0, 1}, 99, 40, {}, 40);
  EXPECT_EQ(r.state(), Receiver::State::kFailed);
}

// Every way to end, then every input again: one fence, at most one event.
TEST(Receiver, EndsOnce) {
  const std::vector<std::function<void(Receiver&)>> ends = {
      [](Receiver& r) { r.release(1); },
      [](Receiver& r) { r.on_time(1000); },
      [](Receiver& r) {
        r.on_down(LinkId{1}, {ErrorCode::kPeerDead, "gone"}, 5);
      },
      [](Receiver& r) { r.on_message(LinkId{1}, message(MessageKind::kSenderAbort), 5); },
      [](Receiver& r) {
        r.on_arrival(LinkId{1}, 0, {0, 0, 1}, 100, 5, Error{ErrorCode::kCorrupt, ""}, 5);
      },
      [](Receiver& r) {
        r.on_arrival(LinkId{1}, 0, {0, 0, 2}, 200, 5, {}, 5);
        r.on_arrival(LinkId{1}, 0, {1, 0, 2}, 200, 5, {}, 5);
        r.on_message(LinkId{1}, message(MessageKind::kCommit), 6);
      },
  };
  for (std::size_t first = 0; first < ends.size(); ++first) {
    Receiver r = opened();
    ends[first](r);
    for (const auto& again : ends) again(r);
    r.on_open(LinkId{3}, message(MessageKind::kOpen), "shm");
    const auto actions = r.take_actions();
    EXPECT_EQ(count_of<Receiver::Fence>(actions), 1) << first;
    EXPECT_EQ(count_of<Receiver::Failed>(actions) + count_of<Receiver::Complete>(actions),
              first == 0 ? 0 : 1)
        << first;
  }
}

Sender make_sender(SenderLimits limits = {}) {
  return Sender({}, kShape, kGrant, local_host_id(), 1000, limits);
}

TEST(Sender, LimitsAndOrder) {
  Sender s = make_sender({.max_inflight_bytes = 250, .max_write_bytes = 100});
  s.publish({0, 0, 2});
  s.publish({1, 0, 1});
  EXPECT_FALSE(s.next_write().has_value());  // not connected yet
  s.on_up();
  EXPECT_EQ(count_of<Sender::Send>(s.take_actions()), 1);
  auto run = s.next_write();
  EXPECT_EQ(*run, (SliceRun{0, 0, 1}));
  s.on_posted(OpId{1}, *run);
  run = s.next_write();
  EXPECT_EQ(*run, (SliceRun{0, 1, 1}));
  s.on_posted(OpId{2}, *run);
  EXPECT_FALSE(s.next_write().has_value());  // 50 bytes of room
  s.on_completion(OpId{1}, {}, 100);
  EXPECT_EQ(s.acked_bytes(), 100);
  run = s.next_write();
  EXPECT_EQ(*run, (SliceRun{1, 0, 1}));
}

TEST(Sender, ASliceAboveTheLimitsGoesAlone) {
  Sender s = make_sender({.max_inflight_bytes = 10, .max_write_bytes = 10});
  s.on_up();
  s.publish({0, 0, 2});
  auto run = s.next_write();
  ASSERT_TRUE(run.has_value());
  EXPECT_EQ(run->count, 1);
  s.on_posted(OpId{1}, *run);
  EXPECT_FALSE(s.next_write().has_value());
}

TEST(Sender, CommitFollowsTheLastWrite) {
  Sender s = make_sender();
  s.on_up();
  s.publish({0, 0, 2});
  s.publish({1, 0, 2});
  s.commit({}, 50);
  s.on_posted(OpId{1}, *s.next_write());
  EXPECT_EQ(s.state(), Sender::State::kStreaming);
  s.take_actions();
  s.on_posted(OpId{2}, *s.next_write());
  EXPECT_EQ(s.state(), Sender::State::kCommitted);
  EXPECT_EQ(count_of<Sender::Send>(s.take_actions()), 1);
  s.on_completion(OpId{1}, {}, 100);
  s.on_message(message(MessageKind::kDone));
  auto actions = s.take_actions();
  EXPECT_EQ(count_of<Sender::Ended>(actions), 1);
  EXPECT_EQ(count_of<Sender::ReleasePages>(actions), 0);  // op 2 has no completion yet
  s.on_completion(OpId{2}, {}, 100);
  EXPECT_EQ(count_of<Sender::ReleasePages>(s.take_actions()), 1);
  EXPECT_TRUE(s.finished());
}

TEST(Sender, WaitsForTheReasonOfARevokedGrant) {
  for (const bool told : {true, false}) {
    Sender s({}, kShape, kGrant, local_host_id(), 10 * kReasonGraceNs, {});
    s.on_up();
    s.publish({0, 0, 2});
    s.publish({1, 0, 2});
    s.on_posted(OpId{1}, *s.next_write());
    s.on_completion(OpId{1}, Error{ErrorCode::kStale, "revoked"}, 100);
    EXPECT_FALSE(s.ended());
    EXPECT_FALSE(s.next_write().has_value());
    if (told) {
      StreamMessage why = message(MessageKind::kReceiverAbort);
      why.code = ErrorCode::kCorrupt;
      s.on_message(why);
    }
    s.on_time(100 + kReasonGraceNs);
    EXPECT_EQ(s.status().error().code, told ? ErrorCode::kCorrupt : ErrorCode::kStale);
    EXPECT_TRUE(s.finished());
  }
}

TEST(Sender, AnAbortBeforeTheLinkIsUpIsToldLater) {
  Sender s = make_sender();
  s.abort({ErrorCode::kCancelled, "stop"});
  EXPECT_EQ(count_of<Sender::ReleasePages>(s.take_actions()), 1);
  EXPECT_FALSE(s.finished());
  s.on_up();
  const auto actions = s.take_actions();
  ASSERT_EQ(actions.size(), 2u);
  EXPECT_EQ(std::get<Sender::Send>(actions[0]).message.kind, MessageKind::kOpen);
  EXPECT_EQ(std::get<Sender::Send>(actions[1]).message.kind, MessageKind::kSenderAbort);
  EXPECT_TRUE(s.finished());
}

TEST(Sender, EndsOnceAndReleasesAfterTheLastCompletion) {
  const std::vector<std::function<void(Sender&)>> ends = {
      [](Sender& s) {
        s.abort({ErrorCode::kCancelled, "stop"});
      },
      [](Sender& s) { s.on_time(1000); },
      [](Sender& s) {
        s.on_down({ErrorCode::kPeerDead, "gone"});
      },
      [](Sender& s) { s.on_message(message(MessageKind::kReceiverAbort)); },
      [](Sender& s) {
        s.on_refused({ErrorCode::kTransport, "full"});
      },
      [](Sender& s) {
        s.on_completion(OpId{1}, Error{ErrorCode::kTimeout, "late"}, 100);
      },
  };
  for (std::size_t first = 0; first < ends.size(); ++first) {
    Sender s = make_sender();
    s.on_up();
    s.publish({0, 0, 2});
    s.publish({1, 0, 1});
    s.on_posted(OpId{1}, *s.next_write());
    s.on_posted(OpId{2}, *s.next_write());
    s.take_actions();
    ends[first](s);
    for (const auto& again : ends) again(s);
    EXPECT_FALSE(s.next_write().has_value());
    auto actions = s.take_actions();
    EXPECT_EQ(count_of<Sender::Ended>(actions), 1) << first;
    EXPECT_EQ(count_of<Sender::ReleasePages>(actions), 0) << first;  // op 2 is still out
    s.on_completion(OpId{2}, Error{ErrorCode::kCancelled, ""}, 100);
    EXPECT_EQ(count_of<Sender::ReleasePages>(s.take_actions()), 1) << first;
    s.on_completion(OpId{2}, {}, 100);
    EXPECT_EQ(s.take_actions().size(), 0u);
  }
}

}  // namespace
}  // namespace kvcore::stream
