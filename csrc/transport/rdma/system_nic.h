// A real device behind the interfaces of verbs.h: context, protection domain, one completion queue,
// one shared receive queue. Thread rules: as verbs.h says.
#pragma once

#include <deque>
#include <memory>

#include "transport/rdma/ibverbs.h"
#include "transport/rdma/verbs.h"

namespace kvcore::transport::rdma {

// The handles of one open device, closed in the right order, whatever part of it was made.
struct Device {
  explicit Device(const IbVerbs* v) : verbs(v) {}
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  const IbVerbs* verbs;
  ibv_context* context = nullptr;
  ibv_pd* domain = nullptr;
  ibv_comp_channel* channel = nullptr;
  ibv_cq* completions = nullptr;
  ibv_srq* receives = nullptr;
  ibv_device_attr limits{};
  ibv_port_attr port{};
  NicRequest request;
};

class SystemNic final : public Nic {
 public:
  static Result<std::unique_ptr<Nic>> open(const IbVerbs* verbs, const NicRequest& request);

  SystemNic(std::unique_ptr<Device> device, NicInfo info)
      : device_(std::move(device)), info_(std::move(info)) {}
  ~SystemNic() override;

  const NicInfo& info() const noexcept override { return info_; }
  Result<std::unique_ptr<RegisteredMemory>> register_memory(const MemoryRequest& r) override;
  Result<std::unique_ptr<Window>> make_window() override;
  Result<std::unique_ptr<QueuePair>> make_queue_pair(std::uint32_t first_packet) override;
  Status post_receives(std::uint32_t count) override;
  Result<std::size_t> poll(std::span<WorkDone> done) override;
  int completion_fd() const noexcept override { return device_->channel->fd; }
  Status arm() override;
  int event_fd() const noexcept override { return device_->context->async_fd; }
  std::vector<NicEvent> take_events() override;

 private:
  std::unique_ptr<Device> device_;
  NicInfo info_;
};

}  // namespace kvcore::transport::rdma
