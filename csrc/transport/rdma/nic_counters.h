// What a NIC says about congestion and loss, as an interface: sysfs in production, a fake in tests.
// Thread rules: one thread at a time. Units: events since the device came up.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "base/result.h"

namespace kvcore::transport::rdma {

struct NicCounts {
  std::uint64_t congestion = 0;   // CNPs handled here: somebody marked what we sent
  bool tells_congestion = false;  // there is such a counter (rxe has none)
  std::uint64_t marked = 0;       // ECN-marked packets received: somebody sends us too much
  std::uint64_t lost = 0;         // out of sequence, retransmissions, acknowledgement timeouts
  std::uint64_t packets_out = 0;  // rxe counts packets and no bytes
  std::uint64_t packets_in = 0;
  std::uint64_t bytes_out = 0;  // 0 where the device does not say
  std::uint64_t bytes_in = 0;
};

class NicCounters {
 public:
  virtual ~NicCounters() = default;
  virtual Result<NicCounts> read() = 0;
};

// <root>/class/infiniband/<device>/ports/<port>/{counters,hw_counters}. A counter that this kind of
// device does not have stays 0; NotFound when neither folder is there.
class SysfsNicCounters final : public NicCounters {
 public:
  SysfsNicCounters(const std::string& device, int port, const std::filesystem::path& root = "/sys");
  Result<NicCounts> read() override;

 private:
  std::filesystem::path folder_;
};

}  // namespace kvcore::transport::rdma
