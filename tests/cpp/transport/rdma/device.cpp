// The same two ends over a real device, with real completions, windows and retries. Needs one or
// two RDMA devices (Soft-RoCE does): run in a guest by `make test-rdma`, not by ctest.
#include <gtest/gtest.h>

#include <cstdlib>
#include <thread>

#include "base/clock.h"
#include "base/random.h"
#include "pair_fixture.h"
#include "transport/rdma/device.h"
#include "transport/rdma/nic_counters.h"

namespace kvcore::transport::rdma {
namespace {

constexpr std::int64_t kSecond = 1'000'000'000;

Result<std::uint32_t> random_packet() {
  std::uint32_t value = 0;
  EXPECT_TRUE(secure_random(std::as_writable_bytes(std::span(&value, 1))).ok());
  return value & 0xffffffU;
}

std::unique_ptr<End> open_end(std::uint32_t num_rails, std::uint32_t receives) {
  const auto verbs = system_verbs();
  EXPECT_TRUE(verbs.ok()) << verbs.error().message;
  const auto ports = list_ports();
  EXPECT_GE(ports.size(), num_rails) << "run this in a guest: make test-rdma";
  std::vector<std::unique_ptr<Nic>> nics;
  for (std::uint32_t r = 0; r < num_rails; ++r) {
    const Port& port = ports.at(r);
    const auto entry = choose_gid(port, *gid_of_address(r == 0 ? "10.77.0.9" : "10.78.0.9"));
    EXPECT_TRUE(entry.ok()) << entry.error().message;
    NicRequest request{.device = port.device, .port = port.number, .gid_index = entry->index};
    request.receives = receives;
    auto nic = (*verbs)->open(request);
    EXPECT_TRUE(nic.ok()) << nic.error().message;
    nics.push_back(std::move(nic).value());
  }
  return std::make_unique<End>(std::move(nics), random_packet);
}

class DeviceWire : public Turns {
 public:
  explicit DeviceWire(std::uint32_t num_rails, std::uint32_t receives = 256)
      : Turns(open_end(num_rails, receives), open_end(num_rails, receives)) {
    now = clock.now_ns();
  }
  void round() override {
    now = clock.now_ns();
    turn(a, b, 8);
    turn(b, a, 8);
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  bool soon(const std::function<bool()>& over, std::int64_t limit_ns = 30 * kSecond) {
    const std::int64_t end = clock.now_ns() + limit_ns;
    while (clock.now_ns() < end)
      if (until(over, 20)) return true;
    return over();
  }
  SystemClock clock;
};

std::uint64_t packets() {
  std::uint64_t total = 0;
  for (const Port& port : list_ports()) {
    SysfsNicCounters counters(port.device, port.number);
    total += counters.read()->packets_out;
  }
  return total;
}

TEST(Device, EveryPortIsListedWithAUsableGid) {
  const auto ports = list_ports();
  ASSERT_FALSE(ports.empty());
  for (const Port& port : ports) {
    EXPECT_TRUE(port.active && port.ethernet) << port.device;
    EXPECT_FALSE(port.gids.empty()) << port.device;
  }
  EXPECT_TRUE(choose_gid(ports[0], *gid_of_address("10.77.0.2")).ok());
  const auto six = choose_gid(ports[0], *gid_of_address("fd77::2"));
  ASSERT_TRUE(six.ok()) << six.error().message;
  EXPECT_EQ(to_string(six->gid), "fd77::1");
}

TEST(Device, WritesAndReadsMoveTheRightBytesAndTheDeviceCountsThem) {
  DeviceWire w(2);
  ASSERT_TRUE(w.ready());
  const std::uint64_t before = packets();
  const Grant grant = w.b.grant({{4096, 100'000}, {300'000, 500'000}}, Rights::kReadWrite);
  std::vector<std::byte> expected = w.b.memory;
  const std::vector<Segment> segments = {
      {10, 5000, 90'000}, {200'000, 300'000, 500'000}, {90'010, 95'001, 1}};
  for (const Segment& s : segments)
    std::memcpy(expected.data() + s.remote_offset, w.a.memory.data() + s.local_offset, s.bytes);
  w.a.peer->outbound().start(w.a.job(1, grant.ref, segments));
  ASSERT_TRUE(w.soon([&] { return w.a.done.contains(1) && w.arrivals(w.b) == 1; }));
  EXPECT_TRUE(w.a.done.at(1).ok()) << message_of(w.a.done.at(1));
  EXPECT_EQ(w.b.memory, expected);
  EXPECT_GE((packets() - before) * 4096, 590'001U);
  w.a.peer->outbound().start(w.a.job(2, grant.ref, {{0, 4096, 100'000}}, true));
  ASSERT_TRUE(w.soon([&] { return w.a.done.contains(2); }));
  EXPECT_TRUE(w.a.done.at(2).ok()) << message_of(w.a.done.at(2));
  EXPECT_EQ(std::memcmp(w.a.memory.data(), expected.data() + 4096, 100'000), 0);
  for (std::uint32_t r = 0; r < 2; ++r) EXPECT_GT(w.a.peer->outbound().bytes_posted(r), 0U);
}

TEST(Device, AfterTheFenceNoByteLandsAndTheLinkGoesOn) {
  DeviceWire w(1);
  ASSERT_TRUE(w.ready());
  std::size_t stale = 0, by_invalidation = 0;
  for (std::uint64_t i = 0; i < 12; ++i) {
    const Grant grant = w.b.grant({{0, 400'000}, {500'000, 300'000}}, Rights::kWrite);
    for (std::uint64_t op = 1; op <= 4; ++op)
      w.a.peer->outbound().start(
          w.a.job(10 * i + op, grant.ref, {{0, 0, 400'000}, {400'000, 500'000, 300'000}}));
    w.rounds(static_cast<int>(i * 3));
    w.b.grants.erase(grant.ref.id);
    const std::int64_t start = w.clock.now_ns();
    w.b.fenced.clear();
    if (!w.b.peer->inbound().revoke(grant.ref, w.now)) {
      ASSERT_TRUE(w.soon([&] { return !w.b.fenced.empty(); }));
      by_invalidation += w.clock.now_ns() - start < kFenceNs;
    }
    std::memset(w.b.memory.data(), static_cast<int>(0x40 + i), 800'000);
    ASSERT_TRUE(w.soon([&] { return w.a.done.size() == 4 * (i + 1); }));
    for (std::uint64_t op = 1; op <= 4; ++op) {
      const Status& status = w.a.done.at(10 * i + op);
      if (!status.ok()) {
        EXPECT_EQ(status.error().code, ErrorCode::kStale) << message_of(status);
        ++stale;
      }
    }
    w.rounds(50);
    EXPECT_EQ(std::count(w.b.memory.begin(), w.b.memory.begin() + 800'000,
                         static_cast<std::byte>(0x40 + i)),
              800'000);
  }
  EXPECT_GT(stale, 0U);
  EXPECT_GT(by_invalidation, 0U) << "no fence was a LOCAL_INV: type 2 windows do not work here";
  const Grant grant = w.b.grant({{0, 1000}}, Rights::kWrite);
  w.a.peer->outbound().start(w.a.job(1000, grant.ref, {{0, 0, 1000}}));
  ASSERT_TRUE(w.soon([&] { return w.a.done.contains(1000); }));
  EXPECT_TRUE(w.a.done.at(1000).ok()) << message_of(w.a.done.at(1000));
}

// Soft-RoCE checks a window's key, rights and queue pair, and not its range (rxe of Linux 6.1 looks
// at the registration's range instead); real devices check that too.
TEST(Device, TheDeviceItselfRefusesWhatTheWindowDoesNotAllow) {
  DeviceWire w(1);
  ASSERT_TRUE(w.ready());
  Nic& nic = *w.a.nics[0];
  const auto owner = std::move(nic.make_queue_pair(1)).value();
  const auto sender = std::move(nic.make_queue_pair(2)).value();
  ASSERT_TRUE(owner->connect(sender->local(), {}).ok());
  ASSERT_TRUE(sender->connect(owner->local(), {}).ok());
  const auto window = std::move(nic.make_window()).value();
  const auto wait = [&](std::uint64_t id) {
    for (int i = 0; i < 20'000; ++i) {
      WorkDone done;
      if (*nic.poll({&done, 1}) == 1 && done.id == id) return done.status;
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    return WorkStatus::kFatal;
  };
  std::size_t posted = 0;
  Work bind{.id = 1001, .kind = WorkKind::kBind, .signalled = true};
  bind.window = window.get();
  bind.memory = w.a.keys[0].get();
  bind.remote_address = reinterpret_cast<std::uint64_t>(w.a.memory.data()) + 4096;
  bind.window_bytes = 4096;
  bind.remote_key = following_key(window->key());
  bind.remote_write = true;
  ASSERT_TRUE(owner->post({&bind, 1}, &posted).ok());
  ASSERT_EQ(wait(1001), WorkStatus::kOk);
  const LocalPiece piece{reinterpret_cast<std::uint64_t>(w.a.memory.data()), 16,
                         w.a.keys[0]->local_key()};
  Work write{.id = 1002, .kind = WorkKind::kWrite, .signalled = true};
  write.pieces = {&piece, 1};
  write.remote_key = bind.remote_key;
  write.remote_address = bind.remote_address + 4080;
  ASSERT_TRUE(sender->post({&write, 1}, &posted).ok());
  EXPECT_EQ(wait(1002), WorkStatus::kOk);
  Work read = write;  // the window gives no right to read
  read.id = 1003;
  read.kind = WorkKind::kRead;
  ASSERT_TRUE(sender->post({&read, 1}, &posted).ok());
  EXPECT_EQ(wait(1003), WorkStatus::kRemoteAccess);
  // Another queue pair's window: the key alone is worth nothing.
  const auto stranger = std::move(nic.make_queue_pair(3)).value();
  const auto host = std::move(nic.make_queue_pair(4)).value();
  ASSERT_TRUE(host->connect(stranger->local(), {}).ok());
  ASSERT_TRUE(stranger->connect(host->local(), {}).ok());
  write.id = 1004;
  const std::byte before = w.a.memory[4096 + 4080];
  w.a.memory[0] = ~before;
  ASSERT_TRUE(stranger->post({&write, 1}, &posted).ok());
  EXPECT_EQ(wait(1004), WorkStatus::kRemoteAccess);
  EXPECT_EQ(w.a.memory[4096 + 4080], before);
}

TEST(Device, AQueuePairInErrorIsMadeAnewAndNothingIsLost) {
  DeviceWire w(1);
  ASSERT_TRUE(w.ready());
  const Grant grant = w.b.grant({{0, kBytes}}, Rights::kWrite);
  for (std::uint64_t op = 1; op <= 8; ++op)
    w.a.peer->outbound().start(
        w.a.job(op, grant.ref, {{(op - 1) * 100'000, (op - 1) * 100'000, 100'000}}));
  ASSERT_TRUE(w.soon([&] { return w.a.peer->outbound().bytes_posted(0) > 0; }));
  w.a.peer->on_event(w.a.nics[0].get(), NicEvent::kPortDown, w.now);
  ASSERT_TRUE(w.soon([&] { return w.a.done.size() == 8; }));
  for (const auto& [op, status] : w.a.done) EXPECT_TRUE(status.ok()) << message_of(status);
  EXPECT_EQ(std::memcmp(w.a.memory.data(), w.b.memory.data(), 800'000), 0);
  EXPECT_GE(w.a.peer->outbound().reconnects(), 1U);
}

TEST(Device, MoreImmediatesThanReceivesAreNotLost) {
  DeviceWire w(1, 16);
  ASSERT_TRUE(w.ready());
  const Grant grant = w.b.grant({{0, kBytes}}, Rights::kWrite);
  for (std::uint64_t op = 1; op <= 300; ++op)
    w.a.peer->outbound().start(w.a.job(op, grant.ref, {{op, op, 3}}));
  ASSERT_TRUE(w.soon([&] { return w.a.done.size() == 300 && w.arrivals(w.b) == 300; }));
  for (const auto& [op, status] : w.a.done) EXPECT_TRUE(status.ok()) << message_of(status);
}

TEST(Device, MemoryThatIsNotThereIsRefused) {
  const auto end = open_end(1, 16);
  const auto bad = end->nics[0]->register_memory({.base = nullptr, .bytes = 1UL << 40});
  ASSERT_FALSE(bad.ok());
  EXPECT_EQ(bad.error().code, ErrorCode::kIo);
  const auto verbs = system_verbs();
  EXPECT_EQ((*verbs)->open({.device = "no_such_device"}).error().code, ErrorCode::kNotFound);
}

}  // namespace
}  // namespace kvcore::transport::rdma
