// Hand-overs between unlike workers: several senders, cut heads, other pages, pages that arrive
// compressed. The truth is always the same: the values of each token, head and layer, or the bytes
// that sealing the same page would have made.
#include <gtest/gtest.h>

#include "compress/seal.h"
#include "pages/slice_io.h"
#include "world.h"

namespace kvcore::stream {
namespace {

using testing::Worker;
using Pages = std::vector<std::int32_t>;

constexpr std::int64_t kSecond = 1'000'000'000;

pages::PageSpecOptions spec_of(std::int32_t layers, std::int32_t heads, std::int32_t page_size) {
  return {.num_layers = layers,
          .num_kv_heads = heads,
          .head_dim_k = 32,
          .head_dim_v = 16,
          .page_size = page_size,
          .extent_pages = 2};
}

// bf16 bits that name (layer, head, token, dim); finite, and small enough for every codec.
std::uint16_t value(std::int32_t layer, std::int32_t head, std::int64_t token, std::int64_t dim,
                    bool v) {
  const auto mix = static_cast<std::uint32_t>(layer * 7919 + head * 104729 + token * 31 + dim * 17 +
                                              (v ? 3 : 0)) *
                   2654435761u;
  return static_cast<std::uint16_t>(0x3c00u + (mix >> 22) % 512 + ((mix >> 3) & 1) * 0x8000u);
}

// The model's rows of one page, as the worker with these layers and heads holds them.
void rows_of(const Side& side, std::int32_t layer, std::int64_t first_token,
             std::vector<std::byte>& k, std::vector<std::byte>& v) {
  const auto& o = side.spec;
  std::vector<std::uint16_t> rows[2];
  for (std::int64_t token = 0; token < o.page_size; ++token)
    for (std::int32_t head = 0; head < o.num_kv_heads; ++head)
      for (const bool is_v : {false, true})
        for (std::int64_t d = 0; d < (is_v ? o.head_dim_v : o.head_dim_k); ++d)
          rows[is_v].push_back(value(side.layer_begin + layer, side.head_begin + head,
                                     first_token + token, d, is_v));
  const auto bytes = [](const std::vector<std::uint16_t>& r) {
    const auto b = std::as_bytes(std::span(r));
    return std::vector<std::byte>(b.begin(), b.end());
  };
  k = bytes(rows[0]);
  v = bytes(rows[1]);
}

void fill(const Worker& w, const Pages& pages, std::int64_t first_token) {
  const Side side = w.core->side();
  std::vector<std::byte> k, v;
  for (std::size_t i = 0; i < pages.size(); ++i)
    for (std::int32_t layer = 0; layer < side.spec.num_layers; ++layer) {
      rows_of(side, layer, first_token + static_cast<std::int64_t>(i) * side.spec.page_size, k, v);
      ASSERT_TRUE(pages::write_slice(*w.pool, pages[i], layer, k, v).ok());
    }
}

// Tokens of open pages that are not what they must be.
int wrong_values(const Worker& w, const Pages& pages, std::int64_t first_token,
                 std::int64_t num_tokens) {
  const Side side = w.core->side();
  const auto& o = side.spec;
  int wrong = 0;
  std::vector<std::byte> want_k, want_v;
  for (std::size_t i = 0; i < pages.size(); ++i) {
    if (w.pool->place(pages[i])->class_number != 0) continue;
    const std::int64_t first = static_cast<std::int64_t>(i) * o.page_size;
    const std::int64_t valid = std::min<std::int64_t>(o.page_size, num_tokens - first);
    for (std::int32_t layer = 0; layer < o.num_layers; ++layer) {
      rows_of(side, layer, first_token + first, want_k, want_v);
      std::vector<std::byte> k(want_k.size()), v(want_v.size());
      EXPECT_TRUE(pages::read_slice(*w.pool, pages[i], layer, k, v).ok());
      const auto part = [&](const auto& rows) {
        return rows.size() / static_cast<std::size_t>(o.page_size) *
               static_cast<std::size_t>(valid);
      };
      wrong += std::memcmp(k.data(), want_k.data(), part(k)) != 0;
      wrong += std::memcmp(v.data(), want_v.data(), part(v)) != 0;
      SliceHeader header;
      std::memcpy(&header, w.pool->slice(pages[i], layer), sizeof(header));
      wrong += header.layer != layer || header.valid_tokens != valid;
    }
  }
  return wrong;
}

// Any number of senders and one receiver over one hub.
struct Group {
  std::shared_ptr<transport::LoopbackHub> hub = transport::make_loopback_hub();
  std::vector<std::unique_ptr<Worker>> senders;
  std::unique_ptr<Worker> receiver;

  static StreamOptions options(const Side& side, Checksums checksums) {
    return {.checksums = checksums,
            .limits = {.max_inflight_bytes = 60000, .max_write_bytes = 20000},
            .layer_begin = side.layer_begin,
            .head_begin = side.head_begin,
            .staging_bytes = 1 << 21};
  }
  Group(const std::vector<Side>& from, const Side& to, Checksums checksums = Checksums::kAll) {
    hub->set_manual(true);
    for (std::size_t i = 0; i < from.size(); ++i)
      senders.push_back(std::make_unique<Worker>(*hub, testing::make_pool(from[i].spec, 40),
                                                 "sender" + std::to_string(i),
                                                 options(from[i], checksums)));
    receiver = std::make_unique<Worker>(*hub, testing::make_pool(to.spec, 40), "receiver",
                                        options(to, checksums));
  }
  void step_all() {
    receiver->step(transport::now_ns());
    for (auto& s : senders) s->step(transport::now_ns());
  }
  void settle() {
    for (int i = 0; i < 40; ++i) {
      step_all();
      while (hub->step()) step_all();
    }
  }
  std::int64_t io_pages() const {
    std::int64_t n = receiver->pool->stats().io_pages;
    for (const auto& s : senders) n += s->pool->stats().io_pages;
    return n;
  }
  std::int64_t staged_bytes() const {
    std::int64_t n = 0;
    for (const auto& s : senders) n += s->core->stats().staged_bytes;
    return n;
  }
};

std::vector<Side> sides(const std::vector<Range32>& layers, const std::vector<Range32>& heads,
                        std::int32_t page_size) {
  std::vector<Side> out;
  for (const Range32& l : layers)
    for (const Range32& h : heads)
      out.push_back({spec_of(l.count, h.count, page_size), l.begin, h.begin});
  return out;
}

struct HandOver {
  RequestId id;
  Pages to;
  std::vector<Pages> from;
  std::vector<std::shared_ptr<SendPort>> ports;
};

// Grants by the plan and opens every share; the sender's pages are filled.
HandOver start(Group& g, std::int64_t first_token, std::int64_t num_tokens, Pages to = {}) {
  HandOver h;
  std::mt19937_64 rng(5);
  h.id = testing::make_id(rng);
  std::vector<Side> from;
  for (const auto& s : g.senders) from.push_back(s->core->side());
  const Side side = g.receiver->core->side();
  const auto plan = plan_shares(from, side);
  EXPECT_TRUE(plan.ok()) << plan.error().message;
  std::vector<Share> shares;
  for (const PlannedShare& p : *plan) shares.push_back(p.share);
  const auto slots = (num_tokens + side.spec.page_size - 1) / side.spec.page_size;
  h.to = to.empty() ? *g.receiver->pool->alloc(slots, 1) : to;
  const std::int64_t now = transport::now_ns();
  const auto grant =
      g.receiver->core->grant(h.id, h.to, first_token, num_tokens, now, now + kSecond, shares);
  EXPECT_TRUE(grant.ok()) << grant.error().message;
  for (std::size_t i = 0; grant.ok() && i < plan->size(); ++i) {
    Worker& s = *g.senders[static_cast<std::size_t>((*plan)[i].sender)];
    const PageMap map{s.core->side().spec.page_size, side.spec.page_size, first_token, num_tokens};
    h.from.push_back(*s.pool->alloc(map.num_source_pages(), 1));
    fill(s, h.from.back(), first_token / map.from_page_size * map.from_page_size);
    const auto port = s.core->open(*grant, h.from.back(), now, i);
    EXPECT_TRUE(port.ok()) << port.error().message;
    if (port.ok()) h.ports.push_back(*port);
  }
  return h;
}

void publish(const HandOver& h, std::int64_t end_token) {
  for (const auto& port : h.ports)
    for (std::int32_t layer = 0; layer < port->pages()->num_layers; ++layer)
      EXPECT_TRUE(port->publish_upto(layer, end_token).ok());
}

void commit(const HandOver& h) {
  for (std::size_t i = 0; i < h.ports.size(); ++i)
    EXPECT_TRUE(h.ports[i]->commit(testing::as_payload("rank " + std::to_string(i)), 1).ok());
}

void expect_whole(Group& g, const HandOver& h, std::int64_t first_token, std::int64_t num_tokens) {
  const auto done = g.receiver->take();
  ASSERT_EQ(done.size(), 1u);
  ASSERT_EQ(done[0].kind, StreamEvent::Kind::kComplete) << done[0].error.message;
  EXPECT_EQ(done[0].payload, testing::as_payload("rank 0"));
  EXPECT_EQ(done[0].stats.bytes, done[0].stats.kv_bytes);
  EXPECT_EQ(wrong_values(*g.receiver, h.to, first_token, num_tokens), 0);
  EXPECT_EQ(g.io_pages(), 0);
  EXPECT_EQ(g.staged_bytes(), 0);
  for (const auto& s : g.senders)
    for (const auto& e : s->take()) EXPECT_EQ(e.kind, StreamEvent::Kind::kSent);
}

struct Pair {
  const char* name;
  std::vector<Range32> from_layers, from_heads;
  std::int32_t from_page;
  Range32 to_layers, to_heads;
  std::int32_t to_page;
};

class Shares : public ::testing::TestWithParam<Pair> {};

TEST_P(Shares, EveryTokenOfEveryHeadArrivesOnce) {
  const Pair& p = GetParam();
  const auto from = sides(p.from_layers, p.from_heads, p.from_page);
  const auto to = sides({p.to_layers}, {p.to_heads}, p.to_page)[0];
  for (const Checksums checksums : {Checksums::kAll, Checksums::kSampled, Checksums::kOff}) {
    for (const std::int64_t first : {std::int64_t{0}, std::int64_t{3} * p.to_page}) {
      Group g(from, to, checksums);
      HandOver h = start(g, first, 150);
      publish(h, first + 70);
      g.settle();
      EXPECT_TRUE(g.receiver->take().empty());
      publish(h, first + 150);
      g.settle();
      EXPECT_TRUE(g.receiver->take().empty());  // every slice is there, no commit
      commit(h);
      g.settle();
      expect_whole(g, h, first, 150);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Pairs, Shares,
    ::testing::Values(Pair{"tp2to1", {{0, 3}}, {{0, 2}, {2, 2}}, 16, {0, 3}, {0, 4}, 16},
                      Pair{"tp3to1", {{0, 3}}, {{0, 1}, {1, 1}, {2, 1}}, 16, {0, 3}, {0, 3}, 16},
                      Pair{"tp1to2", {{0, 3}}, {{0, 4}}, 16, {0, 3}, {2, 2}, 16},
                      Pair{"pp2to1", {{0, 2}, {2, 1}}, {{0, 2}}, 16, {0, 3}, {0, 2}, 16},
                      Pair{"pp1to2", {{0, 3}}, {{0, 2}}, 16, {1, 2}, {0, 2}, 16},
                      Pair{"both", {{0, 2}, {2, 2}}, {{0, 2}, {2, 2}}, 16, {1, 3}, {1, 2}, 16},
                      Pair{"small_to_large", {{0, 3}}, {{0, 2}}, 16, {0, 3}, {0, 2}, 64},
                      Pair{"large_to_small", {{0, 3}}, {{0, 2}}, 64, {0, 3}, {0, 2}, 16},
                      Pair{"tp2_and_pages", {{0, 3}}, {{0, 1}, {1, 1}}, 32, {0, 3}, {0, 2}, 64}),
    [](const auto& info) { return info.param.name; });

// ---- pages that arrive compressed

pages::PageClass class_of(const pages::Pool& pool) {
  const auto& o = pool.spec().options();
  std::vector<pages::HeadFormats> formats;
  for (std::int32_t i = 0; i < o.num_layers * o.num_kv_heads; ++i)
    formats.push_back(i % 3 == 2 ? pages::HeadFormats{Format::kInt8, Format::kV3}
                                 : pages::HeadFormats{Format::kK4, Format::kV4});
  return *pages::PageClass::make(pool.spec(), formats);
}

// Whether a page that arrived has the bytes that sealing the same open page gives, headers too.
void expect_as_sealed(Worker& w, std::int32_t page, std::int64_t first_token, std::int32_t number) {
  const std::int32_t twin = (*w.pool->alloc(1, 1))[0];
  fill(w, {twin}, first_token);
  ASSERT_TRUE(compress::seal_pages(*w.pool, std::array{twin}, number).ok());
  const auto page_class = *w.pool->page_class(number);
  for (std::int32_t layer = 0; layer < w.pool->spec().options().num_layers; ++layer)
    EXPECT_EQ(std::memcmp(w.pool->slice(page, layer), w.pool->slice(twin, layer),
                          static_cast<std::size_t>(page_class.slice_bytes(layer))),
              0)
        << "layer " << layer;
  EXPECT_TRUE(*w.pool->is_sealed(page));
}

Pages first_open_rest_in_class(pages::Pool& pool, std::int64_t slots, std::int32_t number) {
  Pages out = *pool.alloc(1, 1);
  const Pages middle = *pool.alloc_in_class(slots - 2, number);
  out.insert(out.end(), middle.begin(), middle.end());
  out.push_back((*pool.alloc(1, 1))[0]);
  return out;
}

class Encoded : public ::testing::TestWithParam<Pair> {};

TEST_P(Encoded, PagesAreThoseThatSealingMakes) {
  const Pair& p = GetParam();
  const auto to = sides({p.to_layers}, {p.to_heads}, p.to_page)[0];
  Group g(sides(p.from_layers, p.from_heads, p.from_page), to);
  Worker& receiver = *g.receiver;
  const std::int32_t number = *receiver.pool->add_class(class_of(*receiver.pool));
  const std::int64_t tokens = 4 * p.to_page + 5;
  HandOver h = start(g, 0, tokens, first_open_rest_in_class(*receiver.pool, 5, number));
  publish(h, tokens);
  commit(h);
  g.settle();
  expect_whole(g, h, 0, tokens);
  for (const std::size_t slot : {1, 2, 3})
    expect_as_sealed(receiver, h.to[slot], static_cast<std::int64_t>(slot) * p.to_page, number);
  EXPECT_EQ(receiver.pool->place(h.to[0])->class_number, 0);
  EXPECT_EQ(receiver.pool->place(h.to[4])->class_number, 0);
  ASSERT_TRUE(receiver.pool->decref(h.to).ok());
}

INSTANTIATE_TEST_SUITE_P(
    Pairs, Encoded,
    ::testing::Values(Pair{"alike", {{0, 3}}, {{0, 2}}, 64, {0, 3}, {0, 2}, 64},
                      Pair{"tp2to1", {{0, 3}}, {{0, 2}, {2, 2}}, 16, {0, 3}, {0, 4}, 16},
                      Pair{"tp1to2", {{0, 3}}, {{0, 4}}, 16, {0, 3}, {2, 2}, 16},
                      Pair{"pp", {{0, 1}, {1, 2}}, {{0, 2}}, 16, {0, 3}, {0, 2}, 16},
                      Pair{"pages", {{0, 3}}, {{0, 2}}, 16, {0, 3}, {0, 2}, 64}),
    [](const auto& info) { return info.param.name; });

TEST(Encoded, ANumberWithoutACodeFailsTheHandOverByName) {
  const auto side = sides({{0, 3}}, {{0, 2}}, 16)[0];
  Group g({side}, side);
  pages::Pool& pool = *g.receiver->pool;
  const std::int32_t number = *pool.add_class(class_of(pool));
  HandOver h = start(g, 0, 53, first_open_rest_in_class(pool, 4, number));
  const std::uint16_t inf = 0x7f80;
  std::memcpy(g.senders[0]->pool->slice(h.from[0][1], 2) + kSliceHeaderBytes, &inf, sizeof(inf));
  publish(h, 53);
  commit(h);
  g.settle();
  for (Worker* w : {g.receiver.get(), g.senders[0].get()}) {
    const auto events = w->take();
    ASSERT_EQ(events.size(), 1u);
    EXPECT_EQ(events[0].error.code, ErrorCode::kUnsupported);
    EXPECT_NE(events[0].error.message.find("page 1, layer=2 head=0 K"), std::string::npos)
        << events[0].error.message;
  }
  EXPECT_EQ(g.io_pages(), 0);
  EXPECT_EQ(g.staged_bytes(), 0);
}

TEST(Encoded, StagingIsABoundAndNotADeadlock) {
  const auto side = sides({{0, 3}}, {{0, 2}}, 64)[0];
  Group g({side}, side);
  StreamOptions tight = Group::options(side, Checksums::kAll);
  tight.staging_bytes = 1;  // less than a slice
  g.senders[0] =
      std::make_unique<Worker>(*g.hub, testing::make_pool(side.spec, 40), "tight", tight);
  pages::Pool& pool = *g.receiver->pool;
  const std::int32_t number = *pool.add_class(class_of(pool));
  const Pages to = first_open_rest_in_class(pool, 6, number);
  std::mt19937_64 rng(1);
  const std::int64_t now = transport::now_ns();
  const auto grant = g.receiver->core->grant(testing::make_id(rng), to, 0, 350, now, now + kSecond);
  ASSERT_TRUE(grant.ok()) << grant.error().message;
  const Pages from = *g.senders[0]->pool->alloc(6, 1);
  const auto refused = g.senders[0]->core->open(*grant, from, now);
  ASSERT_FALSE(refused.ok());
  EXPECT_NE(refused.error().message.find("staging_bytes=1"), std::string::npos);
  EXPECT_EQ(g.senders[0]->pool->stats().io_pages, 0);
}

// ---- several senders end together

TEST(SharesEnd, NothingIsCompleteWhileOneShareLacksAnything) {
  const auto from = sides({{0, 3}}, {{0, 2}, {2, 2}}, 16);
  const auto to = sides({{0, 3}}, {{0, 4}}, 16)[0];
  Group g(from, to);
  HandOver h = start(g, 0, 40);
  publish(h, 40);
  EXPECT_TRUE(h.ports[0]->commit(testing::as_payload("rank 0"), 1).ok());
  g.settle();
  EXPECT_TRUE(g.receiver->take().empty());
  EXPECT_GT(g.io_pages(), 0);
  EXPECT_TRUE(h.ports[1]->commit(testing::as_payload("rank 1"), 1).ok());
  g.settle();
  expect_whole(g, h, 0, 40);
}

TEST(SharesEnd, WhatEndsOneShareEndsAllAndFreesOnce) {
  const auto from = sides({{0, 3}}, {{0, 2}, {2, 1}, {3, 1}}, 16);
  const auto to = sides({{0, 3}}, {{0, 4}}, 16)[0];
  const std::vector<std::function<void(Group&, HandOver&)>> ends = {
      [](Group&, HandOver& h) { h.ports[1]->abort(ErrorCode::kCancelled, "gone"); },
      [](Group& g, HandOver& h) { g.receiver->core->release(h.id, transport::now_ns()); },
      [](Group& g, HandOver&) { g.senders[2]->core->close(transport::now_ns()); },
      [](Group& g, HandOver&) { g.hub->arm(1, transport::LoopbackFault::kDown); },
  };
  for (std::size_t how = 0; how < ends.size(); ++how) {
    for (int steps = 0; steps < 40; steps += 3) {
      Group g(from, to);
      HandOver h = start(g, 0, 40);
      publish(h, 40);
      for (int i = 0; i < steps; ++i) {
        if (i % 2 == 0) g.step_all();
        g.hub->step();
      }
      ends[how](g, h);
      publish(h, 40);
      g.settle();
      // A link may have had nothing left to carry when it was to break: then the deadline ends it.
      const std::int64_t late = transport::now_ns() + 2 * kSecond;
      g.receiver->step(late);
      for (auto& s : g.senders) s->step(late);
      g.settle();
      EXPECT_EQ(g.io_pages(), 0) << how << " " << steps;
      const auto events = g.receiver->take();
      EXPECT_EQ(events.size(), how == 1 ? 0u : 1u) << how << " " << steps;
      for (const auto& e : events) EXPECT_EQ(e.kind, StreamEvent::Kind::kReceiveFailed);
      for (const auto& s : g.senders) EXPECT_EQ(s->core->stats().refs_lost, 0);
      EXPECT_EQ(g.receiver->core->stats().refs_lost, 0);
      ASSERT_TRUE(g.receiver->pool->decref(h.to).ok());
      EXPECT_EQ(g.receiver->pool->stats().held_pages, 0);
    }
  }
}

TEST(SharesEnd, ASenderThatNeverComesIsNamedAtTheDeadline) {
  const auto from = sides({{0, 3}}, {{0, 2}, {2, 2}}, 16);
  Group g(from, sides({{0, 3}}, {{0, 4}}, 16)[0]);
  std::mt19937_64 rng(5);
  const Pages to = *g.receiver->pool->alloc(2, 1);
  const std::vector<Share> shares = {{{0, 3}, {0, 2}}, {{0, 3}, {2, 2}}};
  const std::int64_t now = transport::now_ns();
  const auto grant =
      g.receiver->core->grant(testing::make_id(rng), to, 0, 32, now, now + kSecond, shares);
  const Pages pages = *g.senders[0]->pool->alloc(2, 1);
  const auto port = g.senders[0]->core->open(*grant, pages, now, 0);
  ASSERT_TRUE(port.ok());
  g.settle();
  g.receiver->step(now + 2 * kSecond);
  const auto events = g.receiver->take();
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0].error.code, ErrorCode::kTimeout);
  EXPECT_NE(events[0].error.message.find("1 of 2 senders never came"), std::string::npos);
  g.settle();
  EXPECT_EQ(g.io_pages(), 0);
}

TEST(SharesEnd, AFlippedShareIsCorrupt) {
  const auto from = sides({{0, 3}}, {{0, 2}, {2, 2}}, 16);
  const auto to = sides({{0, 3}}, {{0, 4}}, 16)[0];
  for (const std::int64_t nth : {1, 2, 5}) {
    Group g(from, to);
    FaultPlan faults(1);
    ASSERT_TRUE(faults.fail_nth("stream.flip_slice", nth).ok());
    StreamOptions options = Group::options(to, Checksums::kAll);
    options.faults = &faults;
    g.receiver = std::make_unique<Worker>(*g.hub, testing::make_pool(to.spec, 40), "flip", options);
    HandOver h = start(g, 0, 40);
    publish(h, 40);
    commit(h);
    g.settle();
    const auto events = g.receiver->take();
    ASSERT_EQ(events.size(), 1u);
    EXPECT_EQ(events[0].error.code, ErrorCode::kCorrupt);
    EXPECT_NE(events[0].error.message.find("checksum differs"), std::string::npos);
    EXPECT_EQ(g.io_pages(), 0);
  }
}

TEST(SharesEnd, SharesOutsideASendersPagesAreRefusedByName) {
  const auto from = sides({{0, 3}}, {{0, 2}, {2, 2}}, 16);
  Group g(from, sides({{0, 3}}, {{0, 4}}, 16)[0]);
  std::mt19937_64 rng(5);
  const Pages to = *g.receiver->pool->alloc(2, 1);
  const std::int64_t now = transport::now_ns();
  auto& core = *g.receiver->core;
  const auto gap = core.grant(testing::make_id(rng), to, 0, 32, now, now + kSecond,
                              std::vector<Share>{{{0, 3}, {0, 2}}});
  ASSERT_FALSE(gap.ok());
  EXPECT_EQ(gap.error().code, ErrorCode::kInvalidArgument);
  EXPECT_NE(gap.error().message.find("KV head 2 is in none"), std::string::npos);
  const auto grant = core.grant(testing::make_id(rng), to, 0, 32, now, now + kSecond,
                                std::vector<Share>{{{0, 3}, {0, 2}}, {{0, 3}, {2, 2}}});
  ASSERT_TRUE(grant.ok());
  const Pages pages = *g.senders[0]->pool->alloc(2, 1);
  const auto wrong = g.senders[0]->core->open(*grant, pages, now, 1);
  ASSERT_FALSE(wrong.ok());
  EXPECT_EQ(wrong.error().code, ErrorCode::kUnsupported);
  EXPECT_NE(wrong.error().message.find("KV heads [2, 4), the sender's pages hold [0, 2)"),
            std::string::npos);
  EXPECT_NE(g.senders[0]->core->open(*grant, pages, now, 2).error().message.find("share=2"),
            std::string::npos);
  EXPECT_EQ(g.senders[0]->pool->stats().io_pages, 0);
}

}  // namespace
}  // namespace kvcore::stream
