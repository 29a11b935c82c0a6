// How a region is made known to a NIC: host memory as it is, device memory by the best way there
// is.
//
//   dma-buf   the driver exports the range, the NIC maps it (Linux >= 5.12, open kernel modules)
//   peermem   nvidia-peermem is loaded: the device address is registered as it is
//   bounce    neither: a host copy of the region is registered instead, and each operation copies.
//             It works and is slow, so it is said aloud: the reason stands in the registration.
//
// Bytes that arrived in device memory are visible to kernels there only after flush_writes: the
// NIC's completion is in host memory, another ordering domain.
//
// Thread rules: register_region from any thread; stage_* and arrived by the I/O thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/result.h"
#include "transport/core/unique_fd.h"
#include "transport/rdma/verbs.h"

namespace kvcore::transport::rdma {

// What the CUDA driver does for us; a fake in tests.
class DeviceMemory {
 public:
  virtual ~DeviceMemory() = default;
  virtual Result<UniqueFd> export_dmabuf(const std::byte* base, std::uint64_t bytes) = 0;
  virtual bool peermem_loaded() = 0;
  virtual Status copy_to_host(std::byte* to, const std::byte* from, std::uint64_t bytes) = 0;
  virtual Status copy_to_device(std::byte* to, const std::byte* from, std::uint64_t bytes) = 0;
  virtual Status flush_writes() = 0;
};

enum class Way : std::uint8_t { kHost, kDmaBuf, kPeerMem, kBounce };
std::string_view to_string(Way way) noexcept;

class RegionMemory {
 public:
  // memory: null for host memory. Io with every way's refusal when not even a bounce could be
  // registered.
  static Result<RegionMemory> make(Nic* nic, std::byte* base, std::uint64_t bytes,
                                   DeviceMemory* memory, bool relaxed_ordering = true);

  Way way() const noexcept { return way_; }
  // Why no better way: one reason per way that was refused. Empty for host memory and dma-buf.
  const std::string& why() const noexcept { return why_; }
  const RegisteredMemory& registered() const noexcept { return *registered_; }
  // Where the NIC reads and writes: the region, or its bounce copy.
  std::byte* nic_base() noexcept { return way_ == Way::kBounce ? bounce_.data() : base_; }

  // Before a write leaves (bytes of ours to the NIC); nothing to do but on a bounce.
  Status stage_out(std::uint64_t offset, std::uint64_t bytes);
  // After bytes came in, before anybody is told: out of the bounce, and the flush on a device.
  Status arrived(std::uint64_t offset, std::uint64_t bytes);

 private:
  RegionMemory(std::byte* base, std::uint64_t bytes, DeviceMemory* memory)
      : base_(base), bytes_(bytes), memory_(memory) {}
  Status register_device(Nic* nic, const MemoryRequest& request);
  Status inside(std::uint64_t offset, std::uint64_t bytes) const;

  std::byte* base_;
  std::uint64_t bytes_;
  DeviceMemory* memory_;
  Way way_ = Way::kHost;
  std::string why_;
  std::vector<std::byte> bounce_;
  std::unique_ptr<RegisteredMemory> registered_;  // goes before the bounce
};

}  // namespace kvcore::transport::rdma
