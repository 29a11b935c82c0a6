// Handshake and frames: wrong keys, changed, repeated, reordered, foreign and oversized bytes.
#include "wire/session.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>

namespace kvcore::wire {
namespace {

using Side = AuthSession::Side;

std::vector<std::byte> two_bytes() { return {std::byte{32}, std::byte{1}}; }

std::vector<std::byte> make_key(int seed) {
  return std::vector<std::byte>(32, static_cast<std::byte>(seed));
}

Message cancel_message(char fill) {
  return {find_message("cancel"), {Value(std::string(16, fill))}};
}

struct Pair {
  Session a, b;
  std::vector<std::byte> hello, reply, proof;  // the handshake's three flights
};

Pair connected(std::size_t max_frame_bytes = kDefaultMaxFrameBytes) {
  Pair p{*Session::make(Side::kInitiator, make_key(7), "decode", max_frame_bytes),
         *Session::make(Side::kResponder, make_key(7), "router", max_frame_bytes),
         {},
         {},
         {}};
  std::vector<Message> none;
  p.hello = p.a.start();
  EXPECT_TRUE(p.b.feed(p.hello, &p.reply, &none).ok());
  EXPECT_TRUE(p.a.feed(p.reply, &p.proof, &none).ok());
  EXPECT_TRUE(p.b.feed(p.proof, &p.reply, &none).ok());
  EXPECT_TRUE(p.a.established() && p.b.established() && none.empty());
  return p;
}

ErrorCode feed_error(Session& session, Bytes in) {
  std::vector<std::byte> out;
  std::vector<Message> messages;
  const Status status = session.feed(in, &out, &messages);
  EXPECT_TRUE(messages.empty());
  return status.ok() ? ErrorCode::kInternal : status.error().code;
}

TEST(WireSession, TalksBothWaysAndKnowsRoles) {
  Pair p = connected();
  EXPECT_EQ(p.a.peer_role(), "router");
  EXPECT_EQ(p.b.peer_role(), "decode");
  std::vector<std::byte> out;
  std::vector<Message> got;
  for (char c = 'a'; c < 'f'; ++c)
    ASSERT_TRUE(p.b.feed(*p.a.encode(cancel_message(c)), &out, &got).ok());
  ASSERT_TRUE(p.a.feed(*p.b.encode(cancel_message('z')), &out, &got).ok());
  ASSERT_EQ(got.size(), 6U);
  EXPECT_EQ(std::get<std::string>(got[2].values[0]), std::string(16, 'c'));
  EXPECT_TRUE(out.empty());
}

TEST(WireSession, AnySplitOfTheBytesGivesTheSameMessages) {
  std::mt19937_64 rng(4);
  for (int round = 0; round < 200; ++round) {
    Pair p = connected();
    std::vector<std::byte> stream;
    for (char c = 'a'; c < 'e'; ++c) {
      const auto frame = *p.a.encode(cancel_message(c));
      stream.insert(stream.end(), frame.begin(), frame.end());
    }
    std::vector<std::byte> out;
    std::vector<Message> got;
    for (std::size_t at = 0; at < stream.size();) {
      const std::size_t n = std::min<std::size_t>(1 + rng() % 120, stream.size() - at);
      ASSERT_TRUE(p.b.feed(Bytes(stream).subspan(at, n), &out, &got).ok());
      at += n;
    }
    ASSERT_EQ(got.size(), 4U);
    EXPECT_FALSE(p.b.mid_frame());
  }
}

TEST(WireSession, WrongKeyIsRefusedByBothSides) {
  auto a = *Session::make(Side::kInitiator, make_key(1), "x");
  auto b = *Session::make(Side::kResponder, make_key(2), "y");
  std::vector<std::byte> reply;
  std::vector<Message> none;
  ASSERT_TRUE(b.feed(a.start(), &reply, &none).ok());
  EXPECT_EQ(feed_error(a, reply), ErrorCode::kUnauthenticated);
  std::vector<std::byte> guess = {std::byte{'K'}, std::byte{'V'}, std::byte{'C'}, std::byte{'A'},
                                  std::byte{1},   std::byte{3},   std::byte{32},  std::byte{0}};
  guess.resize(40);
  EXPECT_EQ(feed_error(b, guess), ErrorCode::kUnauthenticated);
  EXPECT_FALSE(b.established());
}

TEST(WireSession, ReplayedHandshakeIsRefused) {
  Pair old = connected();
  auto b = *Session::make(Side::kResponder, make_key(7), "router");
  std::vector<std::byte> reply;
  std::vector<Message> none;
  ASSERT_TRUE(b.feed(old.hello, &reply, &none).ok());  // a hello alone proves nothing yet
  EXPECT_EQ(feed_error(b, old.proof), ErrorCode::kUnauthenticated);
}

TEST(WireSession, ReplayReorderReflectAndForeignFramesAreRefused) {
  std::vector<std::byte> out;
  std::vector<Message> got;
  {
    Pair p = connected();
    const auto frame = *p.a.encode(cancel_message('r'));
    ASSERT_TRUE(p.b.feed(frame, &out, &got).ok());
    EXPECT_EQ(feed_error(p.b, frame), ErrorCode::kCorrupt);
    EXPECT_EQ(feed_error(p.b, *p.a.encode(cancel_message('s'))), ErrorCode::kTransport);  // dead
  }
  {
    Pair p = connected();
    const auto first = *p.a.encode(cancel_message('1'));
    EXPECT_EQ(feed_error(p.b, *p.a.encode(cancel_message('2'))), ErrorCode::kCorrupt);
  }
  {
    Pair p = connected();
    EXPECT_EQ(feed_error(p.a, *p.a.encode(cancel_message('m'))), ErrorCode::kCorrupt);
  }
  {
    Pair p = connected();
    Pair other = connected();
    EXPECT_EQ(feed_error(p.b, *other.a.encode(cancel_message('o'))), ErrorCode::kCorrupt);
  }
}

TEST(WireSession, EveryFlippedBitIsRefused) {
  const std::size_t bits = 8 * connected().a.encode(cancel_message('x'))->size();
  for (std::size_t bit = 0; bit < bits; ++bit) {
    Pair p = connected();
    auto frame = *p.a.encode(cancel_message('x'));
    frame[bit / 8] ^= static_cast<std::byte>(1U << (bit % 8));
    std::vector<std::byte> out;
    std::vector<Message> got;
    const Status status = p.b.feed(frame, &out, &got);
    EXPECT_TRUE(got.empty()) << bit;
    // A flipped length may leave the session waiting for more bytes; all else is refused now.
    if (status.ok()) {
      EXPECT_TRUE(p.b.mid_frame()) << bit;
    }
  }
}

TEST(WireSession, OversizedFrameIsRefusedFromItsHeader) {
  Pair p = connected(256);
  Message big{find_message("reserved"),
              {Value(std::string(16, 'i')), Value(std::string(300, 'g')), Value(std::uint64_t{0})}};
  EXPECT_EQ(p.a.encode(big).error().code, ErrorCode::kInvalidArgument);
  auto frame = *p.a.encode(cancel_message('x'));
  const std::uint32_t huge = 1U << 30;
  std::memcpy(frame.data() + 12, &huge, sizeof huge);
  EXPECT_EQ(feed_error(p.b, Bytes(frame).first(kFrameHeaderBytes)), ErrorCode::kCorrupt);
}

TEST(WireSession, RandomBytesBeforeAndAfterTheHandshake) {
  std::mt19937_64 rng(5);
  for (int round = 0; round < 3000; ++round) {
    std::vector<std::byte> junk(1 + rng() % 300);
    for (auto& b : junk) b = static_cast<std::byte>(rng());
    if (round % 2 == 0)
      std::memcpy(junk.data(), "KVCA\x01\x01", std::min<std::size_t>(6, junk.size()));
    auto b = *Session::make(Side::kResponder, make_key(7), "router");
    std::vector<std::byte> out;
    std::vector<Message> got;
    (void)b.feed(junk, &out, &got).ok();
    EXPECT_FALSE(b.established());
    EXPECT_TRUE(got.empty());
  }
}

TEST(WireSession, BadArgumentsAreNamed) {
  const auto short_key = Session::make(Side::kInitiator, two_bytes(), "x");
  ASSERT_FALSE(short_key.ok());
  EXPECT_NE(short_key.error().message.find("key has 2 bytes"), std::string::npos);
  EXPECT_FALSE(Session::make(Side::kInitiator, {}, std::string(65, 'r')).ok());
  EXPECT_FALSE(Session::make(Side::kInitiator, {}, "r", 10).ok());
  auto fresh = *Session::make(Side::kInitiator, {}, "r");
  EXPECT_EQ(fresh.encode(cancel_message('x')).error().code, ErrorCode::kTransport);
}

}  // namespace
}  // namespace kvcore::wire
