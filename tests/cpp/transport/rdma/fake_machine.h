// A machine of fake NICs under real transports: everything of an rdma link runs but the hardware.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "base/random.h"
#include "fake_verbs.h"
#include "transport/core/io_transport.h"
#include "transport/rdma/rdma_scheme.h"

namespace kvcore::transport::rdma {

class FakeMachine {
 public:
  struct Congestion final : NicCounters {
    Result<NicCounts> read() override {
      NicCounts counts;
      counts.congestion = *marks;
      counts.tells_congestion = true;
      return counts;
    }
    std::shared_ptr<std::atomic<std::uint64_t>> marks;
  };
  struct Randomness final : RandomSource {
    Status fill(std::span<std::byte> out) override {
      if (fails) return Error{ErrorCode::kIo, "no random bytes"};
      return system.fill(out);
    }
    std::atomic<bool> fails{false};
    SystemRandom system;
  };

  explicit FakeMachine(std::uint32_t num_nics = 2) : num_nics_(num_nics) {
    fabric.runs_by_itself = true;
  }

  HostSystem system() {
    return {[] { return Status{}; }, [this]() -> Result<Verbs*> { return &fabric; },
            [this] { return ports(); },
            [this](const Port&) -> std::unique_ptr<NicCounters> {
              auto counters = std::make_unique<Congestion>();
              counters->marks = marks;
              return counters;
            },
            &random};
  }
  Result<std::unique_ptr<Transport>> make_transport(TransportOptions options) {
    Schemes schemes;
    schemes.push_back(make_rdma_scheme(options.rdma, !options.key.empty(), system()));
    return IoTransport::make(std::move(options), std::move(schemes));
  }

  FakeFabric fabric{1};
  Randomness random;
  std::shared_ptr<std::atomic<std::uint64_t>> marks =
      std::make_shared<std::atomic<std::uint64_t>>(0);
  double rate_gbps = 100;

 private:
  std::vector<Port> ports() const {
    std::vector<Port> out;
    for (std::uint32_t i = 0; i < num_nics_; ++i)
      out.push_back({text("fake", i),
                     1,
                     true,
                     true,
                     {{0, *gid_of_address("10.77.0.1"), "RoCE v2", "eth0", true}},
                     rate_gbps});
    return out;
  }
  std::uint32_t num_nics_;
};

}  // namespace kvcore::transport::rdma
