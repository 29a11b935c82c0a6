// A host name is looked up on another thread: a resolver that takes its time holds up nobody.
#include <atomic>

#include "fixture.h"
#include "transport/core/io_transport.h"
#include "transport/core/scheme.h"
#include "transport/socket/socket_scheme.h"

namespace kvcore::transport {
namespace {

std::atomic<bool> answered{false};
std::atomic<int> asked{0}, ended{0};

// tcp, with a resolver that knows one name and answers when it is told to.
class SlowNames final : public Scheme {
 public:
  std::string_view name() const noexcept override { return "tcp"; }
  LookUp look_up(std::string_view address) const override {
    if (!address.starts_with("tcp:peer:")) return nullptr;
    return [](std::string named) -> Result<std::string> {
      ++asked;
      while (!answered) ::usleep(1000);
      ++ended;
      if (named.ends_with(":1")) return Error{ErrorCode::kNotFound, "address=tcp:peer:1: unknown"};
      return text("tcp:127.0.0.1:", named.substr(named.rfind(':') + 1));
    };
  }
  Result<Listening> listen(std::string_view address) override { return tcp_->listen(address); }
  Result<Dialled> dial(std::string_view address) override { return tcp_->dial(address); }
  Result<Dialled> accepted(UniqueFd fd) override { return tcp_->accepted(std::move(fd)); }
  std::unique_ptr<Channel> channel(Io* io, std::shared_ptr<LinkState> state, UniqueFd fd,
                                   bool initiator, std::int64_t now) override {
    return tcp_->channel(io, std::move(state), std::move(fd), initiator, now);
  }

 private:
  std::unique_ptr<Scheme> tcp_ = make_tcp_scheme(true);
};

class LookUp : public ::testing::Test {
 protected:
  void SetUp() override {
    answered = false;
    asked = ended = 0;
    TransportOptions options;
    options.handshake_ns = 500 * kMs;
    Schemes schemes;
    schemes.push_back(std::make_unique<SlowNames>());
    peer.emplace(take(IoTransport::make(options, std::move(schemes))));
    owner.emplace(take(make_transport({})));
    const std::string bound = take(owner->transport->listen("tcp:127.0.0.1:0"));
    named = text("tcp:peer:", bound.substr(bound.rfind(':') + 1));
  }
  void TearDown() override {
    answered = true;
    while (ended < asked) ::usleep(1000);
  }
  std::optional<Node> owner, peer;
  std::string named;
};

TEST_F(LookUp, WhatIsPostedMeanwhileIsCarriedOut) {
  const auto link = take(peer->transport->connect(named));  // returns: nobody has answered yet
  SendOptions told;
  told.completion = true;
  const auto op = link->send(bytes_of("early"), told);
  ASSERT_TRUE(op.ok());
  EXPECT_FALSE(peer->next<Up>(50).has_value());
  answered = true;
  ASSERT_TRUE(peer->next<Up>().has_value());
  EXPECT_EQ(string_of(owner->next<Message>()->bytes), "early");
  EXPECT_TRUE(peer->next<Completion>()->status.ok());
  EXPECT_EQ(link->info().peer_address, named);
}

TEST_F(LookUp, AnUnknownNameGoesDown) {
  answered = true;
  ASSERT_TRUE(peer->transport->connect("tcp:peer:1").ok());
  EXPECT_EQ(peer->next<Down>()->status.error().code, ErrorCode::kNotFound);
}

TEST_F(LookUp, TakesNoLongerThanTheHandshakeMay) {
  const auto link = take(peer->transport->connect(named));
  SendOptions told;
  told.completion = true;
  ASSERT_TRUE(link->send(bytes_of("x"), told).ok());
  const std::int64_t start = now_ns();
  EXPECT_EQ(peer->next<Completion>()->status.error().code, ErrorCode::kPeerDead);
  EXPECT_EQ(peer->next<Down>()->status.error().code, ErrorCode::kPeerDead);
  EXPECT_GE(now_ns() - start, 300 * kMs);
  EXPECT_LT(now_ns() - start, 2000 * kMs);
  answered = true;  // too late
  EXPECT_FALSE(peer->next<Up>(50).has_value());
}

TEST_F(LookUp, HoldsUpNoClose) {
  const auto link = take(peer->transport->connect(named));
  const std::int64_t start = now_ns();
  peer->transport->close();
  EXPECT_LT(now_ns() - start, 400 * kMs);
  EXPECT_EQ(peer->next<Down>()->status.error().code, ErrorCode::kCancelled);
}

TEST(LookUpOfTheSystem, LocalhostIsFound) {
  Node owner(take(make_transport({}))), peer(take(make_transport({})));
  const std::string bound = take(owner.transport->listen("tcp:localhost:0"));
  const std::string port = bound.substr(bound.rfind(':') + 1);
  const auto link = take(peer.transport->connect(text("tcp:localhost:", port)));
  EXPECT_TRUE(peer.next<Up>().has_value());
}

}  // namespace
}  // namespace kvcore::transport
