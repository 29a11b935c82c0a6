// Hand-overs between pages in runs of different lengths, and pages that are being compressed.
#include <gtest/gtest.h>

#include "world.h"

namespace kvcore::stream {
namespace {

using testing::World;
using Pages = std::vector<std::int32_t>;

constexpr std::int64_t kSecond = 1'000'000'000;

std::int32_t add_small_class(pages::Pool& pool) {
  const std::vector<pages::HeadFormats> table(3, {Format::kK4, Format::kV4});
  return *pool.add_class(*pages::PageClass::make(pool.spec(), table));
}

void seal(pages::Pool& pool, std::int32_t page, std::int32_t number) {
  const auto job = pool.begin_seal(page, number);
  ASSERT_TRUE(job.ok()) << job.error().message;
  ASSERT_TRUE(pool.end_seal(*job, true).ok());
}

Result<std::vector<std::byte>> grant(World& w, const RequestId& id, const Pages& to) {
  return w.decode->core->grant(id, to, 0, static_cast<std::int64_t>(to.size()) * 16, w.now(),
                               w.now() + kSecond);
}

void send_all(World& w, SendPort& port) {
  for (std::int32_t layer = 0; layer < port.shape().num_layers; ++layer)
    EXPECT_TRUE(port.publish_upto(layer, port.shape().num_tokens).ok());
  EXPECT_TRUE(port.commit({}, w.now()).ok());
  w.settle();
}

void expect_complete(World& w) {
  const auto events = w.decode->take();
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0].kind, StreamEvent::Kind::kComplete) << events[0].error.message;
  EXPECT_EQ(w.prefill->pool->stats().io_pages + w.decode->pool->stats().io_pages, 0);
}

TEST(Runs, FramesAndSinglePagesMeet) {
  std::mt19937_64 rng(1);
  for (const std::int32_t from_run : {1, 2}) {
    for (const std::int32_t to_run : {1, 2}) {
      World w({.checksums = Checksums::kAll}, {.checksums = Checksums::kAll});
      const Pages from = *w.prefill->pool->alloc(4, from_run);
      const Pages to = *w.decode->pool->alloc(4, to_run);
      testing::stamp_pages(*w.prefill->pool, from, 5);
      const RequestId id = testing::make_id(rng);
      const auto port = w.prefill->core->open(*grant(w, id, to), from, w.now());
      ASSERT_TRUE(port.ok()) << port.error().message;
      send_all(w, **port);
      expect_complete(w);
      EXPECT_EQ(testing::wrong_slices(*w.decode->pool, to, 5), 0);
    }
  }
}

TEST(Runs, PagesOfOneHandOverHaveOneStrideAndAreOpen) {
  World w;
  std::mt19937_64 rng(2);
  const RequestId id = testing::make_id(rng);
  const std::int32_t number = add_small_class(*w.decode->pool);
  Pages mixed = *w.decode->pool->alloc(2, 1);
  const std::int32_t frame = w.decode->pool->alloc(1)->front();
  mixed.push_back(frame);
  const auto refused = grant(w, id, mixed);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code, ErrorCode::kUnsupported);
  EXPECT_NE(refused.error().message.find("runs of one length"), std::string::npos);
  mixed.pop_back();
  seal(*w.decode->pool, mixed[1], number);
  EXPECT_NE(grant(w, id, mixed).error().message.find("sealed pages are immutable"),
            std::string::npos);
  const Pages to = *w.decode->pool->alloc(2, 1);
  const auto granted = grant(w, id, to);
  ASSERT_TRUE(granted.ok());
  Pages from = *w.prefill->pool->alloc(2, 1);
  seal(*w.prefill->pool, from[0], add_small_class(*w.prefill->pool));
  const auto port = w.prefill->core->open(*granted, from, w.now());
  ASSERT_FALSE(port.ok());
  EXPECT_EQ(port.error().code, ErrorCode::kUnsupported);
  EXPECT_NE(port.error().message.find("compressed"), std::string::npos);
  EXPECT_EQ(w.prefill->pool->stats().io_pages, 0);
}

TEST(Runs, APageSealedWhileItIsSentArrivesAsItWas) {
  World w({.checksums = Checksums::kAll}, {.checksums = Checksums::kAll});
  std::mt19937_64 rng(3);
  const std::int32_t number = add_small_class(*w.prefill->pool);
  const Pages from = *w.prefill->pool->alloc(3, 1);
  const Pages to = *w.decode->pool->alloc(3, 1);
  testing::stamp_pages(*w.prefill->pool, from, 9);
  const auto port = w.prefill->core->open(*grant(w, testing::make_id(rng), to), from, w.now());
  ASSERT_TRUE(port.ok()) << port.error().message;
  const std::int64_t open = w.prefill->pool->stats().open_bytes;
  seal(*w.prefill->pool, from[1], number);
  EXPECT_EQ(w.prefill->pool->stats().open_bytes, open);
  send_all(w, **port);
  expect_complete(w);
  EXPECT_EQ(testing::wrong_slices(*w.decode->pool, to, 9), 0);
  EXPECT_EQ(w.prefill->pool->stats().open_bytes, open / 3 * 2);
}

}  // namespace
}  // namespace kvcore::stream
