// One end of a pair on two hosts: `two_hosts owner FOLDER` grants and checks, `two_hosts writer
// FOLDER ADDRESS` writes. They meet over a shared FOLDER (the address, the rounds to do) and the
// rdma link between them; the exit code says whether all was as it must be. Run by
// tests/rdma/test_guests.py, with loss, a partition or a death in the network between.
#include <gtest/gtest.h>

#include <cstdio>
#include <fstream>
#include <thread>

#include "../fixture.h"

namespace kvcore::transport {
namespace {

constexpr std::size_t kBytes = 4UL * 1024 * 1024;
constexpr std::int64_t kSecond = 1000 * kMs;

TransportOptions options() {
  TransportOptions o;
  o.key = std::string(32, 'k');
  o.keepalive_ns = 4 * kSecond;
  o.handshake_ns = 20 * kSecond;
  return o;
}

void stamp(std::byte* data, std::uint64_t round) {
  for (std::size_t i = 0; i < kBytes; ++i)
    data[i] = static_cast<std::byte>((i * 2654435761U + round * 40503U) >> 7);
}

int fail(const std::string& what) {
  std::printf("FAILED: %s\n", what.c_str());
  return 1;
}

// Each round: a fresh grant, one write of everything, the stamp checked, the grant revoked and
// fenced. Then "end", and an orderly close.
int owner(const std::string& folder, const std::string& rounds) {
  SharedMemory memory(kBytes), expected(kBytes);
  Node node(take(make_transport(options())));
  const auto address = node.transport->listen("rdma:10.77.0.1:0");
  if (!address.ok()) return fail(address.error().message);
  std::ofstream(folder + "/address.new") << *address;
  std::filesystem::rename(folder + "/address.new", folder + "/address");
  const RegionId region = *node.transport->register_region(memory.data(), kBytes, memory.fd());
  const auto up = node.next<Up>(120'000);  // the other guest boots
  if (!up) return fail("nobody came");
  const auto link = node.transport->link(up->link);
  const Range all{0, kBytes};
  for (std::uint64_t round = 1; round <= std::stoull(rounds); ++round) {
    const Grant grant = *node.transport->create_grant(region, {&all, 1}, Rights::kWrite);
    if (!link->send(std::as_bytes(std::span(&grant.ref, 1))).ok()) return fail("send");
    std::optional<Arrival> arrival;
    const std::int64_t end = now_ns() + 60 * kSecond;
    while (!(arrival = node.next<Arrival>(50)) && now_ns() < end)
      if (const auto down = node.next<Down>(1)) {
        std::printf("DOWN: %s\n", message_of(down->status).c_str());
        return 3;
      }
    if (!arrival) return fail("no arrival");
    stamp(expected.data(), round);
    if (std::memcmp(memory.data(), expected.data(), kBytes) != 0) return fail("wrong bytes");
    if (node.transport->revoke_grant(grant.ref) == Fence::kPending && !node.next<Fenced>(10'000))
      return fail("no fence");
    std::ofstream(folder + "/round") << round << std::flush;
  }
  std::printf("OWNER: %s rounds\n", rounds.c_str());
  link->close();
  return node.next<Down>(5000) ? 0 : fail("no end");
}

int writer(const std::string& folder) {
  const std::int64_t limit = now_ns() + 60 * kSecond;
  while (!std::filesystem::exists(folder + "/address")) {
    if (now_ns() > limit) return fail("no address");
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  std::string address;
  std::ifstream(folder + "/address") >> address;
  SharedMemory memory(kBytes);
  Node node(take(make_transport(options())));
  const RegionId region = *node.transport->register_region(memory.data(), kBytes, memory.fd());
  const auto link = *node.transport->connect(address);
  for (std::uint64_t round = 1;; ++round) {
    std::optional<Message> message;
    while (!(message = node.next<Message>(50)))
      if (const auto down = node.next<Down>(1)) {
        std::printf("DOWN after %llu: %s\n", static_cast<unsigned long long>(round - 1),
                    message_of(down->status).c_str());
        return down->status.ok() ? 0 : 3;
      }
    GrantRef grant;
    std::memcpy(&grant, message->bytes.data(), sizeof grant);
    stamp(memory.data(), round);
    const Segment s{0, 0, kBytes};
    const auto op = link->write(region, {&s, 1}, grant, round);
    if (!op.ok()) return fail(op.error().message);
    const auto done = node.next<Completion>(60'000);
    if (!done) return fail("a write that does not end");
    if (!done->status.ok()) {
      std::printf("WRITE: %s\n", message_of(done->status).c_str());
      return 3;
    }
  }
}

}  // namespace
}  // namespace kvcore::transport

int main(int argc, char** argv) {
  const std::vector<std::string> args(argv + 1, argv + argc);
  if (args.size() == 3 && args[0] == "owner") return kvcore::transport::owner(args[1], args[2]);
  if (args.size() == 2 && args[0] == "writer") return kvcore::transport::writer(args[1]);
  std::printf("usage: two_hosts owner FOLDER ROUNDS | writer FOLDER\n");
  return 2;
}
