// The parts of an rdma link that need no fabric.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <random>

#include "fake_verbs.h"
#include "transport/rdma/arrivals.h"
#include "transport/rdma/chunks.h"
#include "transport/rdma/control.h"
#include "transport/rdma/device.h"
#include "transport/rdma/memory.h"
#include "transport/rdma/nic_counters.h"
#include "transport/rdma/rail_health.h"
#include "transport/rdma/rate_control.h"
#include "transport/rdma/send_queue.h"

namespace kvcore::transport::rdma {
namespace {

namespace fs = std::filesystem;
constexpr std::int64_t kSecond = 1'000'000'000;

// A sysfs of files.
class FakeRoot {
 public:
  FakeRoot() : root_(fs::temp_directory_path() / text("kvcore-sysfs-", ::getpid())) {
    fs::remove_all(root_);
    fs::create_directories(root_);
  }
  ~FakeRoot() { fs::remove_all(root_); }
  void write(const std::string& path, const std::string& content) {
    fs::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path) << content << "\n";
  }
  void netdev(const std::string& name, const std::string& state, const std::string& flags) {
    write("class/net/" + name + "/operstate", state);
    write("class/net/" + name + "/flags", flags);
  }
  void port(const std::string& device, const std::string& state = "4: ACTIVE",
            const std::string& layer = "Ethernet") {
    write("class/infiniband/" + device + "/ports/1/state", state);
    write("class/infiniband/" + device + "/ports/1/link_layer", layer);
  }
  void gid(const std::string& device, int index, const std::string& gid,
           const std::string& netdev = "eth0", const std::string& type = "RoCE v2") {
    const std::string folder = "class/infiniband/" + device + "/ports/1/";
    write(folder + "gids/" + std::to_string(index), gid);
    write(folder + "gid_attrs/types/" + std::to_string(index), type);
    write(folder + "gid_attrs/ndevs/" + std::to_string(index), netdev);
  }
  const fs::path& path() const { return root_; }

 private:
  fs::path root_;
};

Gid gid(const char* address) { return *gid_of_address(address); }

TEST(Gids, KnowWhatTheyAre) {
  EXPECT_TRUE(gid("10.77.0.1").ipv4() && gid("10.77.0.1").routable());
  EXPECT_TRUE(gid("fd77::1").routable() && !gid("fd77::1").ipv4());
  for (const char* bad : {"0.0.0.0", "127.0.0.1", "169.254.3.4", "224.0.0.1", "::", "fe80::1",
                          "febf::1", "ff02::1", "0.1.2.3"})
    EXPECT_FALSE(gid(bad).routable()) << bad;
  EXPECT_TRUE(gid("fe80::1").link_local() && gid("169.254.3.4").link_local());
  EXPECT_EQ(to_string(gid("10.77.0.1")), "10.77.0.1");
  EXPECT_EQ(parse_gid("0000:0000:0000:0000:0000:ffff:0a4d:0001\n")->bytes, gid("10.77.0.1").bytes);
  EXPECT_EQ(parse_gid("nonsense").error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(gid_of_address("host.example").error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(gid("fe80::1"), gid("fe80::1%eth0"));
  EXPECT_EQ(common_prefix(gid("10.0.0.1"), gid("10.0.0.1")), 32);
  EXPECT_EQ(common_prefix(gid("10.0.0.1"), gid("10.0.0.2")), 30);
  EXPECT_EQ(common_prefix(gid("fd77::1"), gid("fd77::1")), 128);
  EXPECT_EQ(common_prefix(gid("10.0.0.1"), gid("fd77::1")), -1);
}

TEST(Devices, TheGidIsOfThePeersFamilyUpRoutableAndClosest) {
  FakeRoot root;
  root.netdev("eth0", "up", "0x1003");
  root.netdev("eth1", "down", "0x1002");
  root.netdev("dum0", "unknown", "0x83");
  root.netdev("dum1", "unknown", "0x82");
  root.port("mlx5_0");
  root.gid("mlx5_0", 0, "fe80:0000:0000:0000:0000:0000:0000:0001");
  root.gid("mlx5_0", 1, "0000:0000:0000:0000:0000:ffff:0a00:0001", "eth0", "IB/RoCE v1");
  root.gid("mlx5_0", 2, "0000:0000:0000:0000:0000:ffff:c0a8:0001", "eth1");
  root.gid("mlx5_0", 3, "0000:0000:0000:0000:0000:ffff:0a4e:0001", "dum0");
  root.gid("mlx5_0", 4, "0000:0000:0000:0000:0000:ffff:0a4d:0001");
  root.gid("mlx5_0", 5, "fd77:0000:0000:0000:0000:0000:0000:0001");
  root.gid("mlx5_0", 6, "0000:0000:0000:0000:0000:0000:0000:0000");
  root.gid("mlx5_0", 7, "0000:0000:0000:0000:0000:ffff:0a4d:0003", "");
  root.gid("mlx5_0", 8, "0000:0000:0000:0000:0000:ffff:0a4d:0004", "dum1");
  const auto ports = list_ports(root.path());
  EXPECT_TRUE(any_active_port(root.path()) && !any_active_port(root.path() / "none"));
  ASSERT_EQ(ports.size(), 1U);
  EXPECT_EQ(ports[0].gids.size(), 8U);  // the null one is no entry
  EXPECT_EQ(choose_gid(ports[0], gid("10.77.0.9"))->index, 4);
  EXPECT_EQ(choose_gid(ports[0], gid("10.78.0.9"))->index, 3);  // 10/8 is an address like others
  EXPECT_EQ(choose_gid(ports[0], gid("192.168.0.9"))->index, 3);
  EXPECT_EQ(choose_gid(ports[0], gid("fd00::9"))->index, 5);
  EXPECT_EQ(choose_ports(ports, {}, 2, gid("10.0.0.1"))->at(0).entry.index, 2);  // by force
  EXPECT_EQ(choose_ports(ports, {}, 77, gid("10.0.0.1")).error().code, ErrorCode::kNotFound);
}

TEST(Devices, AnErrorNamesEveryEntryAndItsReason) {
  FakeRoot root;
  root.netdev("eth0", "up", "0x1003");
  root.netdev("eth1", "down", "0x1002");
  root.port("mlx5_0");
  root.gid("mlx5_0", 0, "fe80:0000:0000:0000:0000:0000:0000:0001");
  root.gid("mlx5_0", 1, "fd77:0000:0000:0000:0000:0000:0000:0001");
  root.gid("mlx5_0", 2, "0000:0000:0000:0000:0000:ffff:0a00:0001", "eth0", "IB/RoCE v1");
  root.gid("mlx5_0", 3, "0000:0000:0000:0000:0000:ffff:0a00:0001", "eth1");
  root.port("mlx5_1", "1: DOWN");
  const auto error = choose_ports(list_ports(root.path()), {}, -1, gid("10.0.0.2")).error();
  EXPECT_EQ(error.code, ErrorCode::kNotFound);
  for (const char* part :
       {"not routable", "is IPv6, the peer is IPv4", "RoCE v1", "eth1", "mlx5_1 is not active"})
    EXPECT_NE(error.message.find(part), std::string::npos) << part << " in " << error.message;
  const auto unknown = choose_ports(list_ports(root.path()), {"mlx5_9"}, -1, gid("10.0.0.2"));
  EXPECT_EQ(unknown.error().code, ErrorCode::kInvalidArgument);
  EXPECT_NE(unknown.error().message.find("mlx5_0, mlx5_1"), std::string::npos);
  const auto none = choose_ports(list_ports(root.path() / "none"), {}, -1, gid("10.0.0.2"));
  EXPECT_NE(none.error().message.find("no RDMA device"), std::string::npos);
}

TEST(Devices, SeveralPortsAndInfiniBand) {
  FakeRoot root;
  root.netdev("eth0", "up", "0x1003");
  for (const char* device : {"mlx5_0", "mlx5_1", "mlx5_2"}) root.port(device);
  root.gid("mlx5_0", 0, "0000:0000:0000:0000:0000:ffff:0a00:0001");
  root.gid("mlx5_2", 0, "0000:0000:0000:0000:0000:ffff:0a00:0002");
  root.port("ib0", "4: ACTIVE", "InfiniBand");
  root.gid("ib0", 0, "fe80:0000:0000:0000:0002:c903:0000:0001", "", "");
  const auto chosen = choose_ports(list_ports(root.path()), {}, -1, gid("10.0.0.9"));
  ASSERT_TRUE(chosen.ok()) << chosen.error().message;
  ASSERT_EQ(chosen->size(), 3U);
  EXPECT_EQ(chosen->at(0).port.device, "ib0");
  EXPECT_EQ(chosen->at(1).port.device, "mlx5_0");
  EXPECT_EQ(chosen->at(2).port.device, "mlx5_2");
  EXPECT_FALSE(choose_ports(list_ports(root.path()), {"mlx5_1"}, -1, gid("10.0.0.9")).ok());
}

TEST(Counters, AreReadFromBothFolders) {
  FakeRoot root;
  const std::string folder = "class/infiniband/mlx5_0/ports/1/";
  root.write(folder + "hw_counters/rp_cnp_handled", "7");
  root.write(folder + "hw_counters/np_ecn_marked_roce_packets", "9");
  root.write(folder + "hw_counters/out_of_sequence", "2");
  root.write(folder + "hw_counters/local_ack_timeout_err", "3");
  root.write(folder + "counters/port_xmit_data", "1000");
  root.write(folder + "counters/port_rcv_packets", "11");
  const NicCounts counts = *SysfsNicCounters("mlx5_0", 1, root.path()).read();
  EXPECT_EQ(counts.congestion, 7U);
  EXPECT_TRUE(counts.tells_congestion);
  root.write("class/infiniband/rxe0/ports/1/hw_counters/sent_pkts", "5");
  EXPECT_FALSE(SysfsNicCounters("rxe0", 1, root.path()).read()->tells_congestion);
  EXPECT_EQ(counts.marked, 9U);
  EXPECT_EQ(counts.lost, 5U);
  EXPECT_EQ(counts.bytes_out, 4000U);
  EXPECT_EQ(counts.packets_in, 11U);
  EXPECT_EQ(SysfsNicCounters("mlx5_9", 1, root.path()).read().error().code, ErrorCode::kNotFound);
}

TEST(RateControl, CutsOnCongestionAndComesBack) {
  constexpr double kLine = 10e9;
  RateControl rate(kLine);
  std::int64_t now = kSecond;
  NicCounts counts{.congestion = 100};
  rate.look(counts, now);  // what happened before is nobody's fault
  EXPECT_EQ(rate.rate(), 0U);
  EXPECT_FALSE(rate.due(now + RateControl::kIntervalNs - 1));
  EXPECT_TRUE(rate.due(now + RateControl::kIntervalNs));
  counts.congestion += 1;
  rate.look(counts, now += RateControl::kIntervalNs);
  EXPECT_EQ(rate.rate(), static_cast<std::uint64_t>(kLine / 2));
  int looks = 0;
  while (rate.rate() != 0) {
    rate.look(counts, now += RateControl::kIntervalNs);
    ASSERT_LT(++looks, 100);
  }
  EXPECT_GE(looks, 50);
  for (int i = 0; i < 20; ++i) {
    counts.congestion += 5;
    rate.look(counts, now += RateControl::kIntervalNs);
  }
  EXPECT_EQ(rate.rate(), static_cast<std::uint64_t>(kLine * RateControl::kLeast));
  const std::uint64_t cuts = rate.cuts();
  rate.look({.congestion = 0}, now += RateControl::kIntervalNs);  // the device was reset
  EXPECT_EQ(rate.cuts(), cuts);
}

TEST(RateControl, SendersOfOneReceiverComeToEqualShares) {
  constexpr double kLine = 10e9;
  std::vector<RateControl> senders(4, RateControl(kLine));
  std::vector<NicCounts> counts(4);
  std::int64_t now = 0;
  for (std::size_t i = 0; i < 4; ++i) senders[i].look(counts[i], now);
  for (std::size_t i = 0; i < 3; ++i)  // an unfair beginning
    for (std::size_t k = 0; k <= i; ++k)
      senders[i].look({.congestion = ++counts[i].congestion}, now += RateControl::kIntervalNs);
  std::vector<double> sent(4, 0);
  for (int round = 0; round < 20'000; ++round) {
    now += RateControl::kIntervalNs;
    double offered = 0;
    for (const auto& s : senders) offered += s.rate() == 0 ? kLine : double(s.rate());
    for (std::size_t i = 0; i < 4; ++i) {
      counts[i].congestion += offered > kLine;  // the receiver marks everybody
      sent[i] += senders[i].rate() == 0 ? kLine : double(senders[i].rate());
      senders[i].look(counts[i], now);
    }
  }
  double sum = 0, squares = 0;
  for (const double s : sent) sum += s, squares += s * s;
  EXPECT_GE(sum * sum / (4 * squares), 0.95);  // Jain's index
}

TEST(RailHealth, ThreeErrorsRestItLongerEachTime) {
  RailHealth health;
  std::int64_t now = 100 * kSecond;
  health.on_error(now);
  health.on_error(now += 11 * kSecond);  // the first is forgotten
  health.on_error(now += kSecond);
  EXPECT_TRUE(health.usable(now));
  health.on_error(now += kSecond);
  EXPECT_FALSE(health.usable(now));
  EXPECT_EQ(health.rests_until_ns(), now + 30 * kSecond);
  health.on_error(now + kSecond);  // late news
  std::int64_t rest = 30 * kSecond;
  for (int i = 0; i < 6; ++i) {
    now = health.rests_until_ns();
    EXPECT_TRUE(health.usable(now));
    for (int k = 0; k < RailHealth::kErrors; ++k) health.on_error(now);
    rest = std::min(2 * rest, 300 * kSecond);
    EXPECT_EQ(health.rests_until_ns() - now, rest);
  }
  now = health.rests_until_ns() + 301 * kSecond;  // it has worked for long
  for (int k = 0; k < RailHealth::kErrors; ++k) health.on_error(now);
  EXPECT_EQ(health.rests_until_ns() - now, 30 * kSecond);
}

TEST(SendQueue, NeverFillsUpUnsignalled) {
  for (const std::uint32_t depth : {1U, 2U, 5U, 16U, 512U}) {
    SendQueue queue(depth);
    std::uint64_t last_signalled = 0;
    for (int i = 0; i < 2000; ++i) {
      if (queue.free() == 0) {
        ASSERT_GT(last_signalled, queue.retired()) << "depth " << depth << " is stuck";
        EXPECT_TRUE(queue.retire(last_signalled));
      }
      const auto ticket = queue.next(false);
      if (ticket.signalled) last_signalled = ticket.id;
    }
    EXPECT_FALSE(queue.retire(queue.retired()));
    EXPECT_FALSE(queue.retire(queue.posted() + 1));
    queue.abandon();
    EXPECT_TRUE(queue.drained() && !queue.silent());
    const std::uint64_t next = queue.next(true).id;
    EXPECT_EQ(next, queue.posted());
  }
}

TEST(Arrivals, CountInAnyOrderAndForgetOldAttempts) {
  ArrivalCounters counters;
  EXPECT_TRUE(counters.arrived({3, 1, 5}, 1));  // before the descriptor
  counters.expect(3, 5, 0b11);
  EXPECT_FALSE(counters.complete(3));
  EXPECT_TRUE(counters.arrived({3, 0, 4}, 0));  // of an attempt before
  EXPECT_FALSE(counters.complete(3));
  EXPECT_EQ(counters.stale(), 1U);
  EXPECT_TRUE(counters.arrived({3, 0, 5}, 0));
  EXPECT_TRUE(counters.complete(3));
  counters.forget(3);
  EXPECT_FALSE(counters.complete(3));
  counters.expect(3, 6, 0b01);  // the next operation of the slot
  EXPECT_FALSE(counters.complete(3));
  EXPECT_TRUE(counters.arrived({3, 0, 6}, 0));
  EXPECT_TRUE(counters.complete(3));
  EXPECT_FALSE(counters.arrived({kMaxSlots, 0, 0}, 0));
  EXPECT_FALSE(counters.arrived({1, 2, 0}, 1)) << "rail of the immediate and of its completion";
  EXPECT_TRUE(later_attempt(0, kAttempts - 1) && !later_attempt(kAttempts - 1, 0));
  for (const Immediate i : {Immediate{0, 0, 0}, Immediate{65535, 63, 1023}, Immediate{7, 3, 512}}) {
    const Immediate back = Immediate::unpack(i.pack());
    EXPECT_TRUE(back.slot == i.slot && back.rail == i.rail && back.attempt == i.attempt);
  }
}

// Whatever the segments: the chunks are exactly their bytes, inside the limits, on every rail once.
TEST(Chunks, CoverTheSegmentsExactly) {
  std::mt19937_64 rng(5);
  std::vector<std::byte> local(8 << 20);
  for (int round = 0; round < 60; ++round) {
    std::vector<RemoteRange> ranges = {{0, 3 << 20, 0x10000000, 1},
                                       {4 << 20, 4 << 20, 0x90000000, 2}};
    const std::uint32_t num_rails = 1 + static_cast<std::uint32_t>(rng() % 4);
    std::vector<std::vector<RemoteRange>> per_rail(num_rails, ranges);
    std::vector<RailMap> rails;
    for (std::uint32_t r = 0; r < num_rails; ++r) {
      for (auto& x : per_rail[r]) x.key += 10 * r;
      rails.push_back({r, 100 + r, 1 + static_cast<std::uint32_t>(rng() % 5), per_rail[r]});
    }
    std::vector<Segment> segments;
    std::uint64_t total = 0, remote = rng() % 1000, from = 0;
    while (segments.size() < 40 && remote < 2 << 20) {
      const std::uint64_t n = 1 + rng() % (rng() % 5 == 0 ? 900'000 : 5000);
      from += rng() % 3 == 0 ? rng() % 1000 : 0;
      segments.push_back({from, remote, n});
      from += n;
      remote += n + (rng() % 2 == 0 ? rng() % 300 : 0);
      total += n;
    }
    const auto plan = cut(local.data(), segments, total, rails);
    ASSERT_TRUE(plan.ok()) << plan.error().message;
    std::map<std::uint64_t, std::uint64_t> bytes;  // remote address -> local address, byte by byte
    std::uint64_t moved = 0;
    std::vector<int> last(num_rails, -1);
    for (std::size_t i = 0; i < plan->chunks.size(); ++i) {
      const Chunk& c = plan->chunks[i];
      EXPECT_LE(c.bytes, kMostChunkBytes);
      EXPECT_LE(c.num_pieces, std::ranges::min(rails, {}, &RailMap::max_pieces).max_pieces);
      EXPECT_EQ(c.remote_key, 10 * c.rail + (c.remote_address < 0x90000000 ? 1 : 2));
      std::uint64_t at = c.remote_address;
      for (std::uint32_t p = 0; p < c.num_pieces; ++p) {
        const LocalPiece& piece = plan->pieces[c.first_piece + p];
        EXPECT_EQ(piece.key, 100 + c.rail);
        for (std::uint64_t b = 0; b < piece.bytes; b += 97) bytes[at + b] = piece.address + b;
        at += piece.bytes;
      }
      EXPECT_EQ(at - c.remote_address, c.bytes);
      moved += c.bytes;
      if (c.last_of_rail) {
        EXPECT_EQ(last[c.rail], -1);
        last[c.rail] = static_cast<int>(i);
      } else {
        EXPECT_EQ(last[c.rail], -1) << "work after the last of its rail";
      }
    }
    EXPECT_EQ(moved, total);
    for (std::uint32_t r = 0; r < num_rails; ++r)
      EXPECT_EQ(last[r] >= 0, (plan->rails >> r & 1U) != 0);
    for (const auto& [address, source] : bytes) {
      const std::uint64_t offset =
          address < 0x90000000 ? address - 0x10000000 : address - 0x90000000 + (4 << 20);
      const auto s = std::ranges::find_if(segments, [&](const Segment& x) {
        return offset >= x.remote_offset && offset - x.remote_offset < x.bytes;
      });
      ASSERT_NE(s, segments.end());
      ASSERT_EQ(source, reinterpret_cast<std::uint64_t>(local.data()) + s->local_offset + offset -
                            s->remote_offset);
    }
  }
}

TEST(Chunks, NothingOutsideTheRangesIsCut) {
  std::vector<std::byte> local(100);
  const std::vector<RemoteRange> ranges = {{100, 50, 1000, 1}, {150, 50, 9000, 2}};
  const RailMap rail{0, 1, 4, ranges};
  const std::uint64_t max = ~std::uint64_t{0};
  for (const Segment& s : {Segment{0, 99, 2}, Segment{0, 199, 2}, Segment{0, 149, 2},
                           Segment{0, max, 2}, Segment{0, 100, max}, Segment{0, 0, 1},
                           Segment{0, max - 10, 50}, Segment{0, 1UL << 63, 1UL << 63}})
    EXPECT_EQ(cut(local.data(), {&s, 1}, s.bytes, {&rail, 1}).error().code,
              ErrorCode::kInvalidArgument);
}

std::vector<Control> samples() {
  const Endpoint endpoint{gid("10.77.0.1"), QueuePairNumber{77}, 0xabcdef, 4096};
  Mapped mapped{{1, 2}, 3, 4, {}, Rights::kWrite, {{0, 10, 5000, 6, 0}, {20, 10, 6000, 7, 0}}};
  Mapped refused{{1, 2}, 3, 4, Error{ErrorCode::kStale, "gone"}, Rights::kRead, {}};
  return {Offer{1, 2, endpoint},
          Accept{1, 2, endpoint},
          Refuse{1, 2},
          Broken{1, 2, true},
          Map{{1, 2}, 3, 4, 5},
          mapped,
          refused,
          Unmapped{{1, 2}},
          Drained{{3, 4}},
          Begin{9, 10, Priority::kPrefetch, {1, 2}, 11, 12},
          Posted{9, 10, 3},
          Verdict{9, {}},
          Verdict{9, Error{ErrorCode::kStale, "why"}},
          Abort{9},
          Text{Priority::kBackground, std::vector<std::byte>(100, std::byte{7})}};
}

TEST(Controls, AreReadAsTheyWereWritten) {
  for (const Control& control : samples()) {
    const auto bytes = encode(control);
    const auto back = decode(bytes);
    ASSERT_TRUE(back.ok()) << control.index();
    EXPECT_EQ(back->index(), control.index());
    EXPECT_EQ(encode(*back), bytes);
    for (std::size_t n = 0; n < bytes.size(); ++n) {
      const auto cut = decode(Bytes(bytes).first(n));
      // A text or a table may be shorter and still be one; nothing else may.
      if (cut.ok()) {
        EXPECT_TRUE(std::holds_alternative<Text>(control) ||
                    std::holds_alternative<Mapped>(control));
      }
    }
  }
}

TEST(Controls, NothingElseIsAccepted) {
  std::mt19937_64 rng(3);
  for (const Control& control : samples()) {
    const auto good = encode(control);
    for (std::size_t i = 0; i < good.size(); ++i) {
      for (int value = 0; value < 256; ++value) {
        auto bytes = good;
        bytes[i] = static_cast<std::byte>(value);
        const auto read = decode(bytes);
        if (!read.ok()) {
          EXPECT_EQ(read.error().code, ErrorCode::kCorrupt);
        } else {
          EXPECT_EQ(encode(*read).size(), bytes.size());
        }
      }
    }
    auto longer = good;
    longer.push_back(std::byte{0});
    const auto read = decode(longer);
    EXPECT_TRUE(!read.ok() || std::holds_alternative<Text>(control)) << control.index();
  }
  for (int i = 0; i < 100'000; ++i) {
    std::vector<std::byte> bytes(rng() % 80);
    for (auto& b : bytes) b = static_cast<std::byte>(rng());
    if (const auto read = decode(bytes); read.ok()) {
      EXPECT_EQ(encode(*read).size(), bytes.size());
    }
  }
}

TEST(Controls, TablesThatOverlapOrOverflowAreCorrupt) {
  const std::uint64_t max = ~std::uint64_t{0};
  for (const std::vector<RemoteRange>& table :
       {std::vector<RemoteRange>{{10, 10, 0, 1}, {19, 1, 0, 1}},
        {{10, 0, 0, 1}},
        {{max - 5, 10, 0, 1}},
        {{0, 10, max - 5, 1}},
        {{20, 5, 0, 1}, {10, 5, 0, 1}}}) {
    const Mapped m{{1, 2}, 0, 0, {}, Rights::kRead, table};
    EXPECT_EQ(decode(encode(m)).error().code, ErrorCode::kCorrupt);
  }
}

TEST(Path, EverySettingHasItsLimits) {
  EXPECT_TRUE(check(PathSettings{}).ok());
  const auto bad = [](auto change, const char* name) {
    PathSettings s;
    change(s);
    EXPECT_NE(check(s).error().message.find(name), std::string::npos) << name;
  };
  bad([](auto& s) { s.retry_count = 7; }, "retry_count=7 must be in [0, 6]");
  bad([](auto& s) { s.receiver_retry = 7; }, "receiver_retry=7");
  bad([](auto& s) { s.timeout = 0; }, "timeout=0");
  bad([](auto& s) { s.service_level = 16; }, "service_level=16");
  bad([](auto& s) { s.hop_limit = 0; }, "hop_limit=0");
}

// The CUDA driver, told which ways it refuses.
class FakeDevice final : public DeviceMemory {
 public:
  Result<UniqueFd> export_dmabuf(const std::byte*, std::uint64_t) override {
    if (!dmabuf) return Error{ErrorCode::kUnsupported, "the driver cannot export"};
    return UniqueFd(::dup(0));
  }
  bool peermem_loaded() override { return peermem; }
  Status copy_to_host(std::byte* to, const std::byte* from, std::uint64_t bytes) override {
    std::memcpy(to, from, bytes);
    return {};
  }
  Status copy_to_device(std::byte* to, const std::byte* from, std::uint64_t bytes) override {
    std::memcpy(to, from, bytes);
    return {};
  }
  Status flush_writes() override {
    ++flushes;
    return {};
  }
  bool dmabuf = true, peermem = true;
  int flushes = 0;
};

TEST(Memories, TheBestWayIsTakenAndWorseOnesSayWhy) {
  FakeFabric fabric(1);
  const auto nic = std::move(fabric.open({.device = "a0"})).value();
  std::vector<std::byte> region(4096, std::byte{5});
  FakeDevice device;
  auto memory = RegionMemory::make(nic.get(), region.data(), region.size(), &device);
  EXPECT_EQ(memory->way(), Way::kDmaBuf);
  EXPECT_EQ(memory->why(), "");
  EXPECT_TRUE(memory->arrived(0, 10).ok());
  EXPECT_EQ(device.flushes, 1);
  device.dmabuf = false;
  memory = RegionMemory::make(nic.get(), region.data(), region.size(), &device);
  EXPECT_EQ(memory->way(), Way::kPeerMem);
  EXPECT_NE(memory->why().find("no dma-buf: the driver cannot export"), std::string::npos);
  device.peermem = false;
  memory = RegionMemory::make(nic.get(), region.data(), region.size(), &device);
  ASSERT_EQ(memory->way(), Way::kBounce);
  EXPECT_NE(memory->why().find("no peermem"), std::string::npos);
  EXPECT_NE(memory->nic_base(), region.data());
  EXPECT_TRUE(memory->stage_out(100, 50).ok());
  EXPECT_EQ(memory->nic_base()[120], std::byte{5});
  memory->nic_base()[7] = std::byte{9};
  EXPECT_TRUE(memory->arrived(7, 1).ok());
  EXPECT_EQ(region[7], std::byte{9});
  EXPECT_EQ(memory->stage_out(4096, 1).error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(memory->arrived(~std::uint64_t{0}, 2).error().code, ErrorCode::kInvalidArgument);
  memory = RegionMemory::make(nic.get(), region.data(), region.size(), nullptr);
  EXPECT_EQ(memory->way(), Way::kHost);
  EXPECT_EQ(memory->nic_base(), region.data());
}

}  // namespace
}  // namespace kvcore::transport::rdma
