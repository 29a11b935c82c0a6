// Endpoints with their own threads, over every link there is.
#include "stream/endpoint.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <time.h>
#include <unistd.h>

#include <chrono>

#include "fixture.h"
#include "transport/loopback.h"

namespace kvcore::stream {
namespace {

constexpr std::int64_t kSecond = 1'000'000'000;

struct Pair {
  explicit Pair(const std::string& scheme) {
    static int count = 0;
    const std::string path = ::testing::TempDir() + "stream-" + std::to_string(::getpid()) + "-" +
                             std::to_string(++count) + ".sock";
    const std::string address = scheme == "shm"   ? "shm:" + path
                                : scheme == "tcp" ? "tcp:127.0.0.1:0"
                                                  : "loopback:decode";
    prefill = make(scheme, from, {});
    decode = make(scheme, to, {address});
  }
  std::unique_ptr<Endpoint> make(const std::string& scheme, std::shared_ptr<pages::Pool> pool,
                                 const std::vector<std::string>& listen) {
    transport::TransportOptions options;
    options.key = std::string(32, 'k');
    auto t =
        scheme == "loopback" ? hub->make_transport(options) : transport::make_transport(options);
    return std::move(Endpoint::make(std::move(pool), std::move(*t), listen, {}).value());
  }

  std::shared_ptr<transport::LoopbackHub> hub = transport::make_loopback_hub();
  std::shared_ptr<pages::Pool> from = testing::make_pool(testing::small_spec());
  std::shared_ptr<pages::Pool> to = testing::make_pool(testing::small_spec());
  std::unique_ptr<Endpoint> prefill, decode;
};

class EndpointOver : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Links, EndpointOver, ::testing::Values("loopback", "shm", "tcp"),
                         [](const auto& info) { return std::string(info.param); });

std::vector<StreamEvent> wait_events(Endpoint& ep, std::size_t n) {
  std::vector<StreamEvent> out;
  for (int i = 0; i < 200 && out.size() < n; ++i) {
    pollfd fd{ep.event_fd(), POLLIN, 0};
    ::poll(&fd, 1, 50);
    for (auto& e : ep.poll()) out.push_back(std::move(e));
  }
  return out;
}

TEST_P(EndpointOver, HandsOverWhileAnotherThreadComputes) {
  Pair p(GetParam());
  std::mt19937_64 rng(1);
  for (int round = 0; round < 20; ++round) {
    const RequestId id = testing::make_id(rng);
    const auto from_all = *p.from->alloc(5), to_all = *p.to->alloc(5);
    const auto from = testing::first_n(from_all, 5), to = testing::first_n(to_all, 5);
    testing::stamp_pages(*p.from, from, static_cast<std::uint64_t>(round));
    const auto grant = p.decode->grant(id, to, 0, 70, transport::now_ns() + 10 * kSecond);
    ASSERT_TRUE(grant.ok()) << grant.error().message;
    const auto port = p.prefill->open(*grant, from);
    ASSERT_TRUE(port.ok()) << port.error().message;
    std::jthread compute([&] {
      for (const std::int64_t tokens : {32, 64, 70})
        for (std::int32_t layer = 0; layer < 3; ++layer)
          EXPECT_TRUE((*port)->publish_upto(layer, tokens).ok());
      (*port)->mark(transport::now_ns());
      EXPECT_TRUE((*port)->commit(testing::as_payload("x"), transport::now_ns()).ok());
    });
    const auto done = wait_events(*p.decode, 1);
    ASSERT_EQ(done.size(), 1u);
    EXPECT_EQ(done[0].kind, StreamEvent::Kind::kComplete);
    EXPECT_EQ(testing::wrong_slices(*p.to, to, static_cast<std::uint64_t>(round)), 0);
    ASSERT_EQ(wait_events(*p.prefill, 1).size(), 1u);
    EXPECT_TRUE(p.from->decref(from_all).ok());
    EXPECT_TRUE(p.to->decref(to_all).ok());
  }
  EXPECT_EQ(p.from->stats().io_pages, 0);
  EXPECT_EQ(p.to->stats().io_pages, 0);
  EXPECT_EQ(p.decode->stats()->completed, 20);
}

TEST_P(EndpointOver, PublishingIsCheapForTheComputeThread) {
  Pair p(GetParam());
  std::mt19937_64 rng(1);
  const auto from = *p.from->alloc(30);
  const auto to = *p.to->alloc(30);
  const auto grant =
      p.decode->grant(testing::make_id(rng), to, 0, 480, transport::now_ns() + 10 * kSecond);
  const auto port = p.prefill->open(*grant, from);
  ASSERT_TRUE(port.ok());
  const auto cpu_us = [] {  // of this thread: what others take of the machine is not its cost
    timespec ts{};
    ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &ts);
    return static_cast<double>(ts.tv_sec) * 1e6 + static_cast<double>(ts.tv_nsec) / 1e3;
  };
  const double begin = cpu_us();
  int calls = 0;
  for (std::int64_t tokens = 16; tokens <= 480; tokens += 16)
    for (std::int32_t layer = 0; layer < 3; ++layer, ++calls)
      EXPECT_TRUE((*port)->publish_upto(layer, tokens).ok());
  const double us = (cpu_us() - begin) / calls;
  RecordProperty("us_per_publish", std::to_string(us));
  EXPECT_LT(us, 50.0);  // some us; the rest is room for cold caches
}

TEST_P(EndpointOver, ClosedEndpointsRefuseAndPortsStaySafe) {
  Pair p(GetParam());
  std::mt19937_64 rng(1);
  const auto from = *p.from->alloc(2);
  const auto to = *p.to->alloc(2);
  const RequestId id = testing::make_id(rng);
  const auto grant = p.decode->grant(id, to, 0, 32, transport::now_ns() + 10 * kSecond);
  const auto port = p.prefill->open(*grant, from);
  ASSERT_TRUE(port.ok());
  EXPECT_TRUE((*port)->publish_upto(0, 32).ok());
  for (int i = 0; i < 200 && (*port)->progress().acked_bytes == 0; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  p.prefill->close();
  EXPECT_TRUE((*port)->publish_upto(1, 32).ok());
  (*port)->abort(ErrorCode::kCancelled, "");
  EXPECT_EQ(p.prefill->open(*grant, from).error().code, ErrorCode::kCancelled);
  const auto failed = wait_events(*p.decode, 1);
  ASSERT_EQ(failed.size(), 1u);
  EXPECT_EQ(failed[0].kind, StreamEvent::Kind::kReceiveFailed);
  p.decode->close();
  EXPECT_EQ(p.from->stats().io_pages, 0);
  EXPECT_EQ(p.to->stats().io_pages, 0);
  EXPECT_FALSE(p.decode->release(id).ok());
}

TEST_P(EndpointOver, CancelFromAnyThreadAtAnyMoment) {
  Pair p(GetParam());
  std::mt19937_64 rng(2);
  for (int round = 0; round < 60; ++round) {
    const RequestId id = testing::make_id(rng);
    const auto from = testing::first_n(*p.from->alloc(4), 4);
    const auto to = testing::first_n(*p.to->alloc(4), 4);
    const auto grant = p.decode->grant(id, to, 0, 64, transport::now_ns() + 10 * kSecond);
    const auto port = p.prefill->open(*grant, from);
    ASSERT_TRUE(port.ok());
    const auto wait = std::chrono::microseconds(rng() % 300);
    std::jthread compute([&] {
      for (std::int32_t layer = 0; layer < 3; ++layer) (void)(*port)->publish_upto(layer, 64).ok();
      (void)(*port)->commit({}, transport::now_ns()).ok();
    });
    std::this_thread::sleep_for(wait);
    if (round % 2 == 0)
      (void)p.decode->release(id).ok();
    else
      (*port)->abort(ErrorCode::kCancelled, "stop");
    compute.join();
    ASSERT_EQ(wait_events(*p.prefill, 1).size(), 1u);
    if (round % 2 == 1) {
      ASSERT_EQ(wait_events(*p.decode, 1).size(), 1u);
    } else {
      p.decode->poll();
    }
    EXPECT_TRUE(p.from->decref(from).ok());
    EXPECT_TRUE(p.to->decref(to).ok());
  }
  const auto idle = [](const pages::Pool& pool) { return pool.stats().io_pages == 0; };
  for (int i = 0; i < 100 && !(idle(*p.from) && idle(*p.to)); ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  EXPECT_TRUE(idle(*p.from) && idle(*p.to));
}

}  // namespace
}  // namespace kvcore::stream
