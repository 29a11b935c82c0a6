// Grants and messages: round trips, and decoders that survive any bytes.
#include <gtest/gtest.h>

#include "fixture.h"
#include "stream/grant.h"
#include "stream/message.h"

namespace kvcore::stream {
namespace {

StreamGrant example_grant() {
  StreamGrant g;
  std::mt19937_64 rng(7);
  g.request_id = testing::make_id(rng);
  g.spec = testing::small_spec();
  g.first_token = 32;
  g.num_tokens = 41;
  g.ttl_ns = 1'000'000'000;
  g.host = local_host_id();
  g.shares = {{{0x1122334455667788u, 42}, {{0, 3}, {0, 1}}}};
  g.layer_stride_bytes = 2 * 1088;
  g.pages = {{4, 9, 64}, {5, 9, 64 + 1088}, {8, 2, 1 << 20}};
  g.addresses = {"shm:/tmp/a.sock", "tcp:127.0.0.1:4000"};
  return g;
}

TEST(Grant, RoundTrip) {
  const StreamGrant g = example_grant();
  ASSERT_TRUE(g.check().ok()) << g.check().error().message;
  const auto back = StreamGrant::decode(g.encode());
  ASSERT_TRUE(back.ok()) << back.error().message;
  EXPECT_EQ(back->request_id, g.request_id);
  EXPECT_EQ(back->pages, g.pages);
  EXPECT_EQ(back->addresses, g.addresses);
  EXPECT_EQ(back->shares, g.shares);
  EXPECT_EQ(back->first_token, 32);
  EXPECT_EQ(back->shape(0).num_slots, 3);
  EXPECT_EQ(back->shape(0).valid_tokens(2), 9);
  EXPECT_EQ(back->encode(), g.encode());
}

TEST(Grant, EveryCutIsRefused) {
  const auto bytes = example_grant().encode();
  for (std::size_t n = 0; n < bytes.size(); ++n) {
    EXPECT_FALSE(StreamGrant::decode(std::span(bytes).first(n)).ok()) << n;
  }
  auto longer = bytes;
  longer.push_back(std::byte{0});
  EXPECT_FALSE(StreamGrant::decode(longer).ok());
}

TEST(Grant, RandomBytesNeverPassUnchecked) {
  const auto bytes = example_grant().encode();
  std::mt19937_64 rng(1);
  for (int round = 0; round < 20000; ++round) {
    auto mutated = bytes;
    const auto flips = 1 + rng() % 4;
    for (std::size_t i = 0; i < flips; ++i)
      mutated[rng() % mutated.size()] = static_cast<std::byte>(rng());
    const auto g = StreamGrant::decode(mutated);
    EXPECT_TRUE(!g.ok() || g->check().ok());
  }
}

TEST(Grant, RangesAreRefusedByName) {
  const auto broken = [](auto change) {
    StreamGrant g = example_grant();
    change(g);
    const auto back = StreamGrant::decode(g.encode());
    return back.ok() ? std::string("accepted") : back.error().message;
  };
  EXPECT_NE(broken([](auto& g) { g.num_tokens = 49; }).find("num_tokens=49"), std::string::npos);
  EXPECT_NE(broken([](auto& g) { g.num_tokens = 32; }).find("num_tokens=32"), std::string::npos);
  EXPECT_NE(broken([](auto& g) { g.first_token = 8; }).find("first_token=8"), std::string::npos);
  EXPECT_NE(broken([](auto& g) { g.pages[1].offset_bytes = -64; }).find("offset_bytes=-64"),
            std::string::npos);
  EXPECT_NE(broken([](auto& g) { g.pages[1].offset_bytes = 65; }).find("offset_bytes=65"),
            std::string::npos);
  EXPECT_NE(broken([](auto& g) { g.layer_stride_bytes = 64; }).find("layer_stride_bytes=64"),
            std::string::npos);
  EXPECT_NE(broken([](auto& g) { g.spec.page_size = 7; }).find("page_size=7"), std::string::npos);
  EXPECT_NE(broken([](auto& g) { g.spec.format = static_cast<Format>(9); }).find("format=9"),
            std::string::npos);
  EXPECT_NE(broken([](auto& g) { g.addresses.clear(); }).find("addresses"), std::string::npos);
}

TEST(Grant, SealedPagesAndSharesSayWhereEachPieceLies) {
  StreamGrant g = example_grant();
  g.spec.num_kv_heads = 4;
  g.layer_begin = 6;
  g.head_begin = 8;
  g.class_number = 2;
  g.formats.assign(12, {Format::kK4, Format::kV4});
  g.pages = {{4, 9, 0, false}, {5, 9, 1 << 16, true}, {8, 2, 1 << 20, false}};
  g.layer_stride_bytes = 2 * (64 + 4 * 1024);
  g.shares = {{{1, 1}, {{6, 3}, {8, 1}}}, {{2, 1}, {{6, 2}, {9, 3}}}, {{3, 1}, {{8, 1}, {9, 3}}}};
  ASSERT_TRUE(g.check().ok()) << g.check().error().message;
  const auto back = StreamGrant::decode(g.encode());
  ASSERT_TRUE(back.ok()) << back.error().message;
  EXPECT_EQ(back->encode(), g.encode());
  const pages::PageClass sealed = g.page_class();
  const auto views = sealed.layers(1);
  const Shape shape = back->shape(2);
  EXPECT_EQ(shape.num_layers, 1);
  EXPECT_EQ(shape.slice_bytes, 3 * 1024);
  const HeadBlock* heads = views[2].heads;
  EXPECT_EQ(shape.bytes_of(0, 1), sealed.slice_bytes(2) - heads[1].k_offset_bytes);
  const Placement place = back->placement(2);
  EXPECT_EQ(place.at(0, 0), 2 * g.layer_stride_bytes + 64 + 1024);
  EXPECT_EQ(place.at(1, 0), (1 << 16) + views[2].run_bytes + heads[1].k_offset_bytes);
  // All shares together are all bytes of all pages but the headers.
  std::int64_t bytes = 0;
  for (std::size_t share = 0; share < 3; ++share) bytes += back->shape(share).kv_bytes();
  EXPECT_EQ(bytes, 3 * 2 * 4 * 1024 + sealed.page_bytes() - 3 * kSliceHeaderBytes);
}

TEST(Grant, SharesAndSealedPagesThatDoNotFitAreRefusedByName) {
  const auto broken = [](auto change) {
    StreamGrant g = example_grant();
    change(g);
    const auto back = StreamGrant::decode(g.encode());
    return back.ok() ? std::string("accepted") : back.error().message;
  };
  EXPECT_NE(broken([](auto& g) { g.shares.clear(); }).find("shares=0"), std::string::npos);
  EXPECT_NE(broken([](auto& g) { g.shares[0].share.layers.count = 2; }).find("layer 2"),
            std::string::npos);
  EXPECT_NE(broken([](auto& g) { g.shares.push_back(g.shares[0]); }).find("two of them"),
            std::string::npos);
  EXPECT_NE(broken([](auto& g) { g.pages[1].sealed = true; }).find("formats is empty"),
            std::string::npos);
  const auto sealed = [](std::size_t slot) {
    return [slot](auto& g) {
      g.formats.assign(3, {Format::kK4, Format::kV4});
      g.pages[slot].sealed = true;
    };
  };
  EXPECT_EQ(broken(sealed(1)), "accepted");
  EXPECT_NE(broken(sealed(2)).find("not full"), std::string::npos);
  EXPECT_NE(broken([](auto& g) {
              g.formats.assign(3, {Format::kV4, Format::kV4});
            }).find("format 'v4'"),
            std::string::npos);
}

TEST(Message, RoundTripOfEveryKind) {
  for (int kind = 1; kind <= 7; ++kind) {
    StreamMessage m{.kind = static_cast<MessageKind>(kind)};
    m.at_ns = 5;
    m.reason = "why";
    m.code = ErrorCode::kTimeout;
    m.payload = testing::as_payload("token");
    m.grant = {3, 4};
    m.run = {1, 2, 2};
    m.sums = {7, 8};
    const auto bytes = m.encode();
    const auto back = StreamMessage::decode(bytes);
    ASSERT_TRUE(back.ok());
    EXPECT_EQ(back->kind, m.kind);
    EXPECT_EQ(back->grant, m.grant);
    EXPECT_EQ(back->encode(), bytes);
    for (std::size_t n = 0; n < bytes.size(); ++n)
      EXPECT_FALSE(StreamMessage::decode(std::span(bytes).first(n)).ok());
  }
  EXPECT_FALSE(
      StreamMessage::decode(StreamMessage{.kind = static_cast<MessageKind>(8)}.encode()).ok());
}

TEST(Run, TagsAndSegments) {
  const SliceRun run{4095, kMaxSlots - 2, 2};
  EXPECT_EQ(run_of(tag_of(run)), run);
  // Pages 0..3 of one frame on both sides, page 4 elsewhere on the local side only.
  const Placement local{.offsets = {0, 100, 200, 300, 900}, .layer_stride_bytes = 1000};
  const Placement remote{.offsets = {5000, 5100, 5200, 5300, 5400}, .layer_stride_bytes = 1000};
  const Shape shape{
      .num_layers = 3, .num_slots = 5, .page_size = 16, .num_tokens = 80, .slice_bytes = 100};
  const auto segments = segments_of({2, 1, 4}, shape, local, remote);
  ASSERT_EQ(segments.size(), 2u);
  EXPECT_EQ(segments[0].local_offset, 2100u);
  EXPECT_EQ(segments[0].remote_offset, 7100u);
  EXPECT_EQ(segments[0].bytes, 300u);
  EXPECT_EQ(segments[1].local_offset, 2900u);
  EXPECT_EQ(segments[1].bytes, 100u);
}

TEST(Run, SlotsAreReadyOnlyWhole) {
  const Shape shape{
      .num_layers = 1, .num_slots = 3, .page_size = 16, .num_tokens = 41, .slice_bytes = 64};
  EXPECT_EQ(shape.ready_slots(-5), 0);
  EXPECT_EQ(shape.ready_slots(15), 0);
  EXPECT_EQ(shape.ready_slots(16), 1);
  EXPECT_EQ(shape.ready_slots(40), 2);
  EXPECT_EQ(shape.ready_slots(41), 3);
  EXPECT_EQ(shape.ready_slots(400), 3);
}

TEST(Run, WholeFramesAreOneRange) {
  const auto pool = testing::make_pool(testing::small_spec(2));
  const Shape shape{.num_layers = 3,
                    .num_slots = 2,
                    .page_size = 16,
                    .num_tokens = 32,
                    .slice_bytes = pool->spec().slice_bytes()};
  const std::int64_t slice = shape.slice_bytes;
  const auto ranges =
      ranges_of(shape, Placement{.offsets = {4096, 4096 + slice}, .layer_stride_bytes = 2 * slice});
  ASSERT_EQ(ranges.size(), 1u);
  EXPECT_EQ(ranges[0].bytes, static_cast<std::uint64_t>(6 * slice));
}

}  // namespace
}  // namespace kvcore::stream
