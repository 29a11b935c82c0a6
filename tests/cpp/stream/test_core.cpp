// Two cores over loopback, one thread: what is moved, refused, fenced and given back.
#include <gtest/gtest.h>

#include "world.h"

namespace kvcore::stream {
namespace {

using testing::World;

constexpr std::int64_t kSecond = 1'000'000'000;

struct HandOver {
  RequestId id;
  std::vector<std::int32_t> from, to;
  std::shared_ptr<SendPort> port;
};

HandOver start(World& w, std::int64_t num_tokens, std::uint64_t stamp, std::uint64_t seed = 1) {
  std::mt19937_64 rng(seed);
  HandOver h;
  h.id = testing::make_id(rng);
  const auto slots = static_cast<std::size_t>((num_tokens + 15) / 16);
  h.from = testing::first_n(*w.prefill->pool->alloc(static_cast<std::int64_t>(slots)), slots);
  h.to = testing::first_n(*w.decode->pool->alloc(static_cast<std::int64_t>(slots)), slots);
  testing::stamp_pages(*w.prefill->pool, h.from, stamp);
  const auto grant = w.decode->core->grant(h.id, h.to, 0, num_tokens, w.now(), w.now() + kSecond);
  EXPECT_TRUE(grant.ok()) << grant.error().message;
  const auto port = w.prefill->core->open(*grant, h.from, w.now());
  EXPECT_TRUE(port.ok()) << port.error().message;
  h.port = *port;
  return h;
}

void publish_all(HandOver& h) {
  for (std::int32_t layer = 0; layer < h.port->shape().num_layers; ++layer)
    EXPECT_TRUE(h.port->publish_upto(layer, h.port->shape().num_tokens).ok());
}

std::int64_t io_pages(const World& w) {
  return w.prefill->pool->stats().io_pages + w.decode->pool->stats().io_pages;
}

TEST(Core, MovesEveryByteAndGivesEverythingBack) {
  World w;
  HandOver h = start(w, 41, 77);
  EXPECT_EQ(io_pages(w), 6);
  publish_all(h);
  h.port->mark(w.now());
  EXPECT_TRUE(h.port->commit(testing::as_payload("first token"), w.now()).ok());
  w.settle();
  const auto done = w.decode->take();
  ASSERT_EQ(done.size(), 1u);
  EXPECT_EQ(done[0].kind, StreamEvent::Kind::kComplete);
  EXPECT_EQ(done[0].payload, testing::as_payload("first token"));
  EXPECT_EQ(done[0].stats.bytes, 3 * 3 * w.decode->pool->spec().slice_bytes());
  EXPECT_EQ(done[0].stats.transport, "loopback");
  EXPECT_EQ(testing::wrong_slices(*w.decode->pool, h.to, 77), 0);
  const auto sent = w.prefill->take();
  ASSERT_EQ(sent.size(), 1u);
  EXPECT_EQ(sent[0].kind, StreamEvent::Kind::kSent);
  EXPECT_EQ(io_pages(w), 0);
  EXPECT_EQ(h.port->progress().state, Sender::State::kDone);
  // Full pages keep their checksum; the open one goes on being written, so its sum is gone.
  SliceHeader header;
  std::memcpy(&header, w.decode->pool->slice(h.to[2], 1), sizeof(header));
  EXPECT_EQ(header.valid_tokens, 9);
  EXPECT_EQ(header.checksum, 0u);
  std::memcpy(&header, w.decode->pool->slice(h.to[1], 1), sizeof(header));
  EXPECT_EQ(header.valid_tokens, 16);
  EXPECT_NE(header.checksum, 0u);
}

TEST(Core, NothingIsCompleteWithoutTheLastSlice) {
  World w;
  HandOver h = start(w, 32, 5);
  for (std::int32_t layer = 0; layer < 3; ++layer) {
    EXPECT_FALSE(h.port->commit({}, w.now()).ok());
    EXPECT_TRUE(h.port->publish_upto(layer, layer == 2 ? 31 : 32).ok());
  }
  w.settle();
  const auto early = h.port->commit({}, w.now());
  ASSERT_FALSE(early.ok());
  EXPECT_NE(early.error().message.find("5 of 6"), std::string::npos) << early.error().message;
  EXPECT_EQ(w.decode->take().size(), 0u);
  EXPECT_TRUE(h.port->publish_upto(2, 32).ok());
  EXPECT_TRUE(h.port->commit({}, w.now()).ok());
  w.settle();
  EXPECT_EQ(w.decode->take().size(), 1u);
}

TEST(Core, PublishIsCheckedAtOnce) {
  World w;
  HandOver h = start(w, 41, 5);
  EXPECT_FALSE(h.port->publish(3, 0, 1, 16).ok());
  EXPECT_FALSE(h.port->publish(0, 2, 2, 16).ok());
  EXPECT_FALSE(h.port->publish(0, 2, 1, 16).ok());  // 9 tokens there
  EXPECT_FALSE(h.port->publish(0, 0, 1, 9).ok());   // not whole
  EXPECT_TRUE(h.port->publish(0, 0, 3, 9).ok());
  const auto again = h.port->publish(0, 1, 1, 16);
  ASSERT_FALSE(again.ok());
  EXPECT_NE(again.error().message.find("before"), std::string::npos);
}

TEST(Core, CachedPagesOfAllLayersThenTheRest) {
  World w;
  HandOver h = start(w, 64, 6);
  EXPECT_TRUE(h.port->push_cached(0, 2).ok());
  for (std::int32_t layer = 0; layer < 3; ++layer) {
    EXPECT_TRUE(h.port->publish_upto(layer, 48).ok());
    EXPECT_TRUE(h.port->publish_upto(layer, 64).ok());
  }
  EXPECT_TRUE(h.port->commit({}, w.now()).ok());
  w.settle();
  ASSERT_EQ(w.decode->take().size(), 1u);
  EXPECT_EQ(testing::wrong_slices(*w.decode->pool, h.to, 6), 0);
}

TEST(Core, ReleaseFencesBeforeThePagesAreFree) {
  World w;
  HandOver h = start(w, 48, 9);
  publish_all(h);
  w.prefill->step(w.now());
  w.hub->step();  // the open message
  w.decode->step(w.now());
  w.prefill->step(w.now());
  w.hub->step();  // one write has landed, more are under way
  ASSERT_GT(w.hub->pending(), 0u);
  EXPECT_TRUE(w.decode->core->release(h.id, w.now()));
  EXPECT_FALSE(w.decode->core->release(h.id, w.now()));
  EXPECT_EQ(w.decode->pool->stats().io_pages, 0);
  EXPECT_TRUE(w.decode->pool->decref(h.to).ok());
  testing::stamp_pages(*w.decode->pool, h.to, 1234);  // the frame belongs to somebody else now
  w.settle();
  EXPECT_EQ(testing::wrong_slices(*w.decode->pool, h.to, 1234), 0);
  const auto failed = w.prefill->take();
  ASSERT_EQ(failed.size(), 1u);
  EXPECT_EQ(failed[0].kind, StreamEvent::Kind::kSendFailed);
  EXPECT_EQ(io_pages(w), 0);
  EXPECT_EQ(w.decode->take().size(), 0u);  // the caller asked for it: no event
}

// A fence that the transport could not carry out at once: pages and events wait for it.
TEST(Core, APendingFenceHoldsPagesAndEvents) {
  const auto actions_until_complete = [](bool late_fences) {
    World w;
    w.hub->set_late_fences(late_fences);
    HandOver h = start(w, 48, 9);
    publish_all(h);
    EXPECT_TRUE(h.port->commit({}, w.now()).ok());
    for (int i = 0; i < 200 && w.decode->events.empty(); ++i) {
      w.prefill->step(w.now());
      w.hub->step();
      w.decode->step(w.now());
      EXPECT_EQ(w.decode->events.empty(), w.decode->pool->stats().io_pages > 0);
    }
    EXPECT_EQ(w.decode->events.size(), 1u);
    return w.hub->actions();
  };
  EXPECT_EQ(actions_until_complete(true), actions_until_complete(false) + 1);

  World w;
  w.hub->set_late_fences(true);
  HandOver released = start(w, 48, 10);
  w.prefill->step(w.now());
  w.decode->step(w.now());
  EXPECT_TRUE(w.decode->core->release(released.id, w.now()));
  EXPECT_FALSE(w.decode->core->release(released.id, w.now()));
  EXPECT_GT(w.decode->pool->stats().io_pages, 0);
  w.advance(3600'000'000'000);  // no deadline ends it a second time
  w.decode->step(w.now());
  EXPECT_GT(w.decode->pool->stats().io_pages, 0);
  w.settle();
  EXPECT_EQ(w.decode->pool->stats().io_pages, 0);
  EXPECT_EQ(w.decode->core->stats().released, 1);

  HandOver open = start(w, 48, 11);
  w.decode->core->close(w.now());
  EXPECT_EQ(w.decode->pool->stats().io_pages, 0);
  EXPECT_EQ(w.decode->core->stats().refs_lost, 0);
}

TEST(Core, SenderAbortTellsTheReceiverWhy) {
  World w;
  HandOver h = start(w, 48, 9);
  EXPECT_TRUE(h.port->publish_upto(0, 48).ok());
  w.settle();
  h.port->abort(ErrorCode::kCancelled, "client went away");
  w.settle();
  const auto failed = w.decode->take();
  ASSERT_EQ(failed.size(), 1u);
  EXPECT_EQ(failed[0].kind, StreamEvent::Kind::kReceiveFailed);
  EXPECT_EQ(failed[0].error.code, ErrorCode::kCancelled);
  EXPECT_EQ(failed[0].error.message, "client went away");
  EXPECT_EQ(io_pages(w), 0);
}

TEST(Core, DeadlineEndsBothSides) {
  World w;
  HandOver h = start(w, 48, 9);
  EXPECT_TRUE(h.port->publish_upto(0, 48).ok());
  w.settle();
  w.advance(2 * kSecond);
  w.settle();
  ASSERT_EQ(w.decode->events.size(), 1u);
  EXPECT_EQ(w.decode->events[0].error.code, ErrorCode::kTimeout);
  ASSERT_EQ(w.prefill->events.size(), 1u);
  EXPECT_EQ(w.prefill->events[0].error.code, ErrorCode::kTimeout);
  EXPECT_EQ(io_pages(w), 0);
}

TEST(Core, AFlippedSlice) {
  for (const Checksums policy : {Checksums::kOff, Checksums::kAll}) {
    FaultPlan faults(1);
    World w({.checksums = policy}, {.checksums = policy, .faults = &faults});
    EXPECT_TRUE(faults.fail_nth("stream.flip_slice", 2).ok());
    HandOver h = start(w, 48, 9);
    publish_all(h);
    EXPECT_TRUE(h.port->commit({}, w.now()).ok());
    w.settle();
    const auto events = w.decode->take();
    ASSERT_EQ(events.size(), 1u);
    if (policy == Checksums::kOff) {
      EXPECT_EQ(events[0].kind, StreamEvent::Kind::kComplete);
      EXPECT_EQ(testing::wrong_slices(*w.decode->pool, h.to, 9), 1);
    } else {
      EXPECT_EQ(events[0].kind, StreamEvent::Kind::kReceiveFailed);
      EXPECT_EQ(events[0].error.code, ErrorCode::kCorrupt);
      EXPECT_EQ(w.prefill->take()[0].error.code, ErrorCode::kCorrupt);
    }
    EXPECT_EQ(io_pages(w), 0);
  }
}

TEST(Core, AReceiverThatVerifiesRefusesASenderThatDoesNotSum) {
  World w({.checksums = Checksums::kOff}, {.checksums = Checksums::kAll});
  HandOver h = start(w, 16, 9);
  publish_all(h);
  w.settle();
  const auto events = w.decode->take();
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0].error.code, ErrorCode::kCorrupt);
}

TEST(Core, OtherLayoutsAreRefusedBeforeAnythingIsHeld) {
  auto spec = testing::small_spec();
  spec.head_dim_v = 32;
  World w({}, {}, testing::make_pool(spec));
  std::mt19937_64 rng(3);
  const auto to = *w.decode->pool->alloc(2);
  const auto grant =
      w.decode->core->grant(testing::make_id(rng), to, 0, 32, w.now(), w.now() + kSecond);
  const auto from = *w.prefill->pool->alloc(2);
  const auto port = w.prefill->core->open(*grant, from, w.now());
  ASSERT_FALSE(port.ok());
  EXPECT_EQ(port.error().code, ErrorCode::kUnsupported);
  EXPECT_NE(port.error().message.find("head_dim_v=16"), std::string::npos);
  EXPECT_EQ(w.prefill->pool->stats().io_pages, 0);
}

TEST(Core, OtherExtentsAreFine) {
  World w({}, {}, testing::make_pool(testing::small_spec(1)),
          testing::make_pool(testing::small_spec(4)));
  HandOver h = start(w, 70, 8);
  publish_all(h);
  EXPECT_TRUE(h.port->commit({}, w.now()).ok());
  w.settle();
  ASSERT_EQ(w.decode->take().size(), 1u);
  EXPECT_EQ(testing::wrong_slices(*w.decode->pool, h.to, 8), 0);
}

TEST(Core, BadCallsAreRefusedByName) {
  World w;
  std::mt19937_64 rng(3);
  const RequestId id = testing::make_id(rng);
  const auto pages = *w.decode->pool->alloc(2);
  auto& core = *w.decode->core;
  const auto message = [&](auto r) { return r.ok() ? std::string() : r.error().message; };
  const std::int64_t t = w.now(), end = t + kSecond;
  EXPECT_NE(message(core.grant(id, {}, 0, 16, t, end)).find("pages"), std::string::npos);
  EXPECT_NE(message(core.grant(id, pages, 0, 99, t, end)).find("num_tokens=99"), std::string::npos);
  EXPECT_NE(message(core.grant(id, pages, 3, 32, t, end)).find("first_token=3"), std::string::npos);
  EXPECT_NE(message(core.grant(id, pages, 0, 32, t, t)).find("deadline"), std::string::npos);
  const std::vector<std::int32_t> outside = {0, 9999};
  EXPECT_NE(message(core.grant(id, outside, 0, 32, t, end)).find("9999"), std::string::npos);
  EXPECT_EQ(w.decode->pool->stats().io_pages, 0);
  const auto grant = core.grant(id, pages, 0, 32, t, end);
  ASSERT_TRUE(grant.ok());
  EXPECT_NE(message(core.grant(id, pages, 0, 32, t, end)).find("already"), std::string::npos);
  const auto from = *w.prefill->pool->alloc(4);
  EXPECT_NE(message(w.prefill->core->open(*grant, from, t)).find("lie in 2"), std::string::npos);
  EXPECT_NE(message(w.prefill->core->open({}, from, t)).find("magic"), std::string::npos);
}

TEST(Core, AGrantThatIsGoneIsRefusedAtOnce) {
  World w;
  std::mt19937_64 rng(3);
  const RequestId id = testing::make_id(rng);
  const auto to = *w.decode->pool->alloc(2);
  const auto from = *w.prefill->pool->alloc(2);
  const auto grant = w.decode->core->grant(id, to, 0, 32, w.now(), w.now() + kSecond);
  w.decode->core->release(id, w.now());
  EXPECT_TRUE(w.prefill->core->open(*grant, from, w.now()).ok());
  w.settle();
  const auto events = w.prefill->take();
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0].error.code, ErrorCode::kStale);
  EXPECT_EQ(io_pages(w), 0);
}

TEST(Core, ManyHandOversShareOneLink) {
  World w;
  std::vector<HandOver> all;
  for (std::uint64_t i = 0; i < 8; ++i) all.push_back(start(w, 20, 100 + i, 50 + i));
  for (auto& h : all) publish_all(h);
  for (auto& h : all) EXPECT_TRUE(h.port->commit({}, w.now()).ok());
  w.settle();
  EXPECT_EQ(w.decode->take().size(), 8u);
  EXPECT_EQ(w.prefill->core->stats().links.size(), 1u);
  for (std::size_t i = 0; i < all.size(); ++i)
    EXPECT_EQ(testing::wrong_slices(*w.decode->pool, all[i].to, 100 + i), 0);
  EXPECT_EQ(io_pages(w), 0);
}

TEST(Core, ASharedPageGoesToTwoPeersAtOnce) {
  World w;
  HandOver a = start(w, 32, 7, 1);
  HandOver b = start(w, 32, 8, 2);
  b.port->abort(ErrorCode::kCancelled, "");
  w.settle();
  // Both hand-overs read the same (prefix cached) pages.
  std::mt19937_64 rng(11);
  const RequestId id = testing::make_id(rng);
  const auto grant = w.decode->core->grant(id, b.to, 0, 32, w.now(), w.now() + kSecond);
  auto second = *w.prefill->core->open(*grant, a.from, w.now());
  EXPECT_TRUE(a.port->push_cached(0, 2).ok());
  EXPECT_TRUE(second->push_cached(0, 2).ok());
  EXPECT_TRUE(a.port->commit({}, w.now()).ok());
  EXPECT_TRUE(second->commit({}, w.now()).ok());
  w.settle();
  EXPECT_EQ(testing::wrong_slices(*w.decode->pool, a.to, 7), 0);
  EXPECT_EQ(testing::wrong_slices(*w.decode->pool, b.to, 7), 0);
  EXPECT_EQ(io_pages(w), 0);
}

// A prompt computed again into the same pages, as after a preemption that kept them.
TEST(Core, APageFilledAnewIsSummedAnew) {
  World w({.checksums = Checksums::kAll}, {.checksums = Checksums::kAll});
  HandOver h = start(w, 32, 7);
  std::mt19937_64 rng(23);
  for (const std::uint64_t stamp : {7u, 8u}) {
    publish_all(h);
    EXPECT_TRUE(h.port->commit({}, w.now()).ok());
    w.settle();
    const auto events = w.decode->take();
    ASSERT_EQ(events.size(), 1u);
    EXPECT_EQ(events[0].kind, StreamEvent::Kind::kComplete) << events[0].error.message;
    EXPECT_EQ(testing::wrong_slices(*w.decode->pool, h.to, stamp), 0);
    testing::stamp_pages(*w.prefill->pool, h.from, 8);
    for (const auto page : h.from) {
      for (std::int32_t layer = 0; layer < 3; ++layer)
        std::memset(w.prefill->pool->slice(page, layer), 0, kSliceHeaderBytes);
    }
    const RequestId id = testing::make_id(rng);
    const auto grant = w.decode->core->grant(id, h.to, 0, 32, w.now(), w.now() + kSecond);
    h.port = *w.prefill->core->open(*grant, h.from, w.now());
  }
}

TEST(Core, CloseGivesEverythingBack) {
  World w;
  HandOver h = start(w, 48, 9);
  publish_all(h);
  w.prefill->step(w.now());
  w.prefill->core->close(w.now());
  w.decode->core->close(w.now());
  EXPECT_EQ(io_pages(w), 0);
  EXPECT_EQ(w.prefill->core->stats().refs_lost, 0);
  EXPECT_EQ(w.decode->core->stats().refs_lost, 0);
}

}  // namespace
}  // namespace kvcore::stream
