#include "transport/rdma/memory.h"

#include "base/text.h"

namespace kvcore::transport::rdma {

std::string_view to_string(Way way) noexcept {
  switch (way) {
    case Way::kHost:
      return "host";
    case Way::kDmaBuf:
      return "dma-buf";
    case Way::kPeerMem:
      return "peermem";
    case Way::kBounce:
      return "bounce";
  }
  return "unknown";
}

Result<RegionMemory> RegionMemory::make(Nic* nic, std::byte* base, std::uint64_t bytes,
                                        DeviceMemory* memory, bool relaxed_ordering) {
  RegionMemory region(base, bytes, memory);
  const MemoryRequest request{base, bytes, -1, relaxed_ordering};
  if (memory != nullptr) {
    KVCORE_RETURN_IF_ERROR(region.register_device(nic, request));
    return region;
  }
  KVCORE_ASSIGN_OR_RETURN(region.registered_, nic->register_memory(request));
  return region;
}

Status RegionMemory::register_device(Nic* nic, const MemoryRequest& request) {
  const auto refused = [&](Way way, const std::string& reason) {
    why_ += text(why_.empty() ? "" : "; ", "no ", to_string(way), ": ", reason);
  };
  const auto attempt = [&](Way way, const MemoryRequest& r) {
    auto registered = nic->register_memory(r);
    if (!registered) {
      refused(way, registered.error().message);
      return false;
    }
    registered_ = std::move(registered).value();
    way_ = way;
    return true;
  };
  MemoryRequest by_file = request;
  if (const auto file = memory_->export_dmabuf(base_, bytes_); !file) {
    refused(Way::kDmaBuf, file.error().message);
  } else {
    by_file.dmabuf_fd = file->get();  // the registration holds what it needs of it
    if (attempt(Way::kDmaBuf, by_file)) return {};
  }
  if (!memory_->peermem_loaded())
    refused(Way::kPeerMem, "the module nvidia-peermem is not loaded");
  else if (attempt(Way::kPeerMem, request))
    return {};
  bounce_.resize(bytes_);
  MemoryRequest copy = request;
  copy.base = bounce_.data();
  if (attempt(Way::kBounce, copy)) return {};
  return Error{ErrorCode::kIo, text("device memory cannot be registered: ", why_)};
}

Status RegionMemory::inside(std::uint64_t offset, std::uint64_t bytes) const {
  if (offset <= bytes_ && bytes <= bytes_ - offset) return {};
  return invalid_argument(
      text("offset=", offset, " bytes=", bytes, " must lie inside the region of ", bytes_));
}

Status RegionMemory::stage_out(std::uint64_t offset, std::uint64_t bytes) {
  KVCORE_RETURN_IF_ERROR(inside(offset, bytes));
  if (way_ != Way::kBounce) return {};
  return memory_->copy_to_host(bounce_.data() + offset, base_ + offset, bytes);
}

Status RegionMemory::arrived(std::uint64_t offset, std::uint64_t bytes) {
  KVCORE_RETURN_IF_ERROR(inside(offset, bytes));
  if (way_ == Way::kHost) return {};
  if (way_ == Way::kBounce)
    return memory_->copy_to_device(base_ + offset, bounce_.data() + offset, bytes);
  return memory_->flush_writes();
}

}  // namespace kvcore::transport::rdma
