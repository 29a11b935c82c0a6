#include "transport/rdma/system_nic.h"

#include <fcntl.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "base/text.h"

namespace kvcore::transport::rdma {
namespace {

constexpr std::size_t kBatch = 16;  // completions taken from the device at once

Error refused(std::string_view what, int error) {
  std::string hint;
  if (error == ENOMEM) hint = " (is the limit of locked memory too low? see ulimit -l)";
  return {ErrorCode::kIo, text(what, ": ", std::strerror(error), hint)};
}

std::uint32_t mtu_bytes(ibv_mtu mtu) { return 128U << static_cast<unsigned>(mtu); }
ibv_mtu mtu_code(std::uint32_t bytes) {
  unsigned code = 1;
  while (code < 5 && 128U << (code + 1) <= bytes) ++code;
  return static_cast<ibv_mtu>(code);
}

class SystemMemory final : public RegisteredMemory {
 public:
  SystemMemory(const IbVerbs* verbs, ibv_mr* mr) : verbs_(verbs), mr_(mr) {}
  ~SystemMemory() override { verbs_->dereg_mr(mr_); }
  std::uint32_t local_key() const noexcept override { return mr_->lkey; }
  ibv_mr* mr() const { return mr_; }

 private:
  const IbVerbs* verbs_;
  ibv_mr* mr_;
};

class SystemWindow final : public Window {
 public:
  explicit SystemWindow(ibv_mw* mw) : mw_(mw), key_(mw->rkey) {}
  ~SystemWindow() override { ::ibv_dealloc_mw(mw_); }
  std::uint32_t key() const noexcept override { return key_; }
  ibv_mw* mw() const { return mw_; }

 private:
  ibv_mw* mw_;
  std::uint32_t key_;
};

WorkStatus status_of(ibv_wc_status status) {
  switch (status) {
    case IBV_WC_SUCCESS:
      return WorkStatus::kOk;
    case IBV_WC_WR_FLUSH_ERR:
      return WorkStatus::kFlushed;
    case IBV_WC_REM_ACCESS_ERR:
    case IBV_WC_REM_OP_ERR:
    case IBV_WC_REM_INV_REQ_ERR:
      return WorkStatus::kRemoteAccess;
    case IBV_WC_RETRY_EXC_ERR:
      return WorkStatus::kRetry;
    case IBV_WC_RNR_RETRY_EXC_ERR:
      return WorkStatus::kReceiverNotReady;
    case IBV_WC_FATAL_ERR:
      return WorkStatus::kFatal;
    default:
      return WorkStatus::kLocal;
  }
}

class SystemPair final : public QueuePair {
 public:
  SystemPair(const Device* device, ibv_qp* qp, Endpoint local)
      : device_(device), qp_(qp), local_(local) {}
  ~SystemPair() override { device_->verbs->destroy_qp(qp_); }
  const Endpoint& local() const noexcept override { return local_; }
  Status connect(const Endpoint& remote, const PathSettings& settings) override;
  Status post(std::span<const Work> work, std::size_t* posted) override;
  Status initialise();

 private:
  Status modify(ibv_qp_attr* attr, int mask, std::string_view what) {
    const int error = device_->verbs->modify_qp(qp_, attr, mask);
    if (error != 0) return refused(what, error);
    return {};
  }
  Status ready_to_receive(const Endpoint& remote, const PathSettings& settings);
  Status ready_to_send(const PathSettings& settings);

  const Device* device_;
  ibv_qp* qp_;
  Endpoint local_;
};

Status SystemPair::initialise() {
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_INIT;
  attr.port_num = device_->request.port;
  attr.qp_access_flags = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_MW_BIND;
  return modify(&attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS,
                "queue pair to init");
}

Status SystemPair::ready_to_receive(const Endpoint& remote, const PathSettings& settings) {
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_RTR;
  attr.path_mtu = mtu_code(std::min(local_.mtu_bytes, remote.mtu_bytes));
  attr.dest_qp_num = static_cast<std::uint32_t>(remote.number);
  attr.rq_psn = remote.first_packet;
  attr.max_dest_rd_atomic = static_cast<std::uint8_t>(std::clamp(
      std::min(int{settings.outstanding_reads}, device_->limits.max_qp_rd_atom), 1, 255));
  attr.min_rnr_timer = settings.receiver_wait;
  attr.ah_attr.is_global = 1;
  std::memcpy(attr.ah_attr.grh.dgid.raw, remote.gid.bytes.data(), remote.gid.bytes.size());
  attr.ah_attr.grh.sgid_index = static_cast<std::uint8_t>(device_->request.gid_index);
  attr.ah_attr.grh.hop_limit = settings.hop_limit;
  attr.ah_attr.grh.traffic_class = settings.traffic_class;
  attr.ah_attr.sl = settings.service_level;
  attr.ah_attr.port_num = device_->request.port;
  return modify(&attr,
                IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                    IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER,
                text("queue pair to ready-to-receive from ", to_string(remote.gid)));
}

Status SystemPair::ready_to_send(const PathSettings& settings) {
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_RTS;
  attr.timeout = settings.timeout;
  attr.retry_cnt = settings.retry_count;
  attr.rnr_retry = settings.receiver_retry;
  attr.sq_psn = local_.first_packet;
  attr.max_rd_atomic = static_cast<std::uint8_t>(std::clamp(
      std::min(int{settings.outstanding_reads}, device_->limits.max_qp_init_rd_atom), 1, 255));
  return modify(&attr,
                IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                    IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC,
                "queue pair to ready-to-send");
}

Status SystemPair::connect(const Endpoint& remote, const PathSettings& settings) {
  KVCORE_RETURN_IF_ERROR(check(settings));
  KVCORE_RETURN_IF_ERROR(ready_to_receive(remote, settings));
  return ready_to_send(settings);
}

// One piece of work in the device's words. `pieces` holds its gather list until it is posted.
void translate(const Work& work, std::vector<ibv_sge>* pieces, ibv_send_wr* wr) {
  wr->wr_id = work.id;
  wr->send_flags = work.signalled ? unsigned{IBV_SEND_SIGNALED} : 0U;
  switch (work.kind) {
    case WorkKind::kBind:
      wr->opcode = IBV_WR_BIND_MW;
      wr->bind_mw.mw = static_cast<SystemWindow*>(work.window)->mw();
      wr->bind_mw.rkey = work.remote_key;
      wr->bind_mw.bind_info.mr = static_cast<const SystemMemory*>(work.memory)->mr();
      wr->bind_mw.bind_info.addr = work.remote_address;
      wr->bind_mw.bind_info.length = work.window_bytes;
      wr->bind_mw.bind_info.mw_access_flags =
          (work.remote_read ? unsigned{IBV_ACCESS_REMOTE_READ} : 0U) |
          (work.remote_write ? unsigned{IBV_ACCESS_REMOTE_WRITE} : 0U);
      return;
    case WorkKind::kInvalidate:
      wr->opcode = IBV_WR_LOCAL_INV;
      wr->invalidate_rkey = work.remote_key;
      return;
    case WorkKind::kRead:
      wr->opcode = IBV_WR_RDMA_READ;
      break;
    case WorkKind::kWriteImmediate:
      wr->opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
      wr->imm_data = htobe32(work.immediate);
      break;
    default:
      wr->opcode = IBV_WR_RDMA_WRITE;
      break;
  }
  pieces->clear();
  for (const LocalPiece& p : work.pieces) pieces->push_back({p.address, p.bytes, p.key});
  wr->sg_list = pieces->data();
  wr->num_sge = static_cast<int>(pieces->size());
  wr->wr.rdma.remote_addr = work.remote_address;
  wr->wr.rdma.rkey = work.remote_key;
}

Status SystemPair::post(std::span<const Work> work, std::size_t* posted) {
  *posted = 0;
  std::vector<ibv_sge> pieces;
  for (const Work& w : work) {
    ibv_send_wr wr{};
    ibv_send_wr* bad = nullptr;
    translate(w, &pieces, &wr);
    const int error = ::ibv_post_send(qp_, &wr, &bad);
    if (error != 0) return refused("post to a queue pair", error);
    ++*posted;
  }
  return {};
}

Status make_queues(Device* d) {
  const IbVerbs& v = *d->verbs;
  d->domain = v.alloc_pd(d->context);
  if (d->domain == nullptr) return refused("protection domain", errno);
  d->channel = v.create_comp_channel(d->context);
  if (d->channel == nullptr) return refused("completion channel", errno);
  for (const int fd : {d->channel->fd, d->context->async_fd})
    if (::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_NONBLOCK) != 0)
      return refused("completion channel", errno);
  // What does not fit is a fatal overrun: every receive, and the signalled work of many links. Work
  // is signalled once in 16, so that 512 deep queues of some 250 links fit.
  const int depth = std::min(d->limits.max_cqe, static_cast<int>(d->request.receives) + 8192);
  d->completions = v.create_cq(d->context, depth, nullptr, d->channel, 0);
  if (d->completions == nullptr) return refused("completion queue", errno);
  ibv_srq_init_attr srq{};
  srq.attr.max_wr = d->request.receives;
  srq.attr.max_sge = 1;
  d->receives = v.create_srq(d->domain, &srq);
  if (d->receives == nullptr) return refused("shared receive queue", errno);
  return {};
}

Status open_context(Device* d) {
  const IbVerbs& v = *d->verbs;
  int count = 0;
  ibv_device** list = v.get_device_list(&count);
  if (list == nullptr) return refused("list of RDMA devices", errno);
  for (int i = 0; i < count; ++i)
    if (d->context == nullptr && d->request.device == v.get_device_name(list[i]))
      d->context = v.open_device(list[i]);
  v.free_device_list(list);
  if (d->context == nullptr)
    return Error{ErrorCode::kNotFound,
                 text("RDMA device '", d->request.device, "' is not there or cannot be opened")};
  if (const int error = v.query_device(d->context, &d->limits); error != 0)
    return refused("attributes of the RDMA device", error);
  const int error =
      v.query_port(d->context, d->request.port, reinterpret_cast<_compat_ibv_port_attr*>(&d->port));
  if (error != 0) return refused("attributes of the RDMA port", error);
  return {};
}

}  // namespace

Device::~Device() {
  if (receives != nullptr) verbs->destroy_srq(receives);
  if (completions != nullptr) verbs->destroy_cq(completions);
  if (channel != nullptr) verbs->destroy_comp_channel(channel);
  if (domain != nullptr) verbs->dealloc_pd(domain);
  if (context != nullptr) verbs->close_device(context);
}

Result<std::unique_ptr<Nic>> SystemNic::open(const IbVerbs* verbs, const NicRequest& request) {
  auto device = std::make_unique<Device>(verbs);
  device->request = request;
  KVCORE_RETURN_IF_ERROR(open_context(device.get()));
  if ((device->limits.device_cap_flags & IBV_DEVICE_MEM_WINDOW_TYPE_2B) == 0)
    return Error{ErrorCode::kUnsupported,
                 text("RDMA device ", request.device,
                      " has no type 2B memory windows, by which grants are opened and revoked")};
  KVCORE_RETURN_IF_ERROR(make_queues(device.get()));
  NicInfo info;
  info.name = request.device;
  info.gid_index = request.gid_index;
  ibv_gid gid{};
  if (verbs->query_gid(device->context, request.port, request.gid_index, &gid) != 0)
    return refused(text("GID ", request.gid_index, " of ", request.device), errno);
  std::memcpy(info.gid.bytes.data(), gid.raw, info.gid.bytes.size());
  info.mtu_bytes = mtu_bytes(device->port.active_mtu);
  info.send_depth = request.send_depth;
  info.max_pieces = static_cast<std::uint32_t>(std::clamp(device->limits.max_sge, 1, 16));
  info.windows = true;
  auto nic = std::make_unique<SystemNic>(std::move(device), std::move(info));
  KVCORE_RETURN_IF_ERROR(nic->post_receives(request.receives));
  return std::unique_ptr<Nic>(std::move(nic));
}

SystemNic::~SystemNic() = default;

Result<std::unique_ptr<RegisteredMemory>> SystemNic::register_memory(const MemoryRequest& r) {
  // Windows decide what peers may do; the registration itself lets nobody in.
  unsigned access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND;
  if (r.relaxed_ordering) access |= IBV_ACCESS_RELAXED_ORDERING;
  const auto address = reinterpret_cast<std::uint64_t>(r.base);
  const IbVerbs& v = *device_->verbs;
  ibv_mr* mr = r.dmabuf_fd >= 0 ? v.reg_dmabuf_mr(device_->domain, 0, r.bytes, address, r.dmabuf_fd,
                                                  static_cast<int>(access))
                                : v.reg_mr_iova2(device_->domain, r.base, r.bytes, address, access);
  if (mr == nullptr)
    return refused(text("registration of ", r.bytes, " bytes with ", info_.name), errno);
  return std::unique_ptr<RegisteredMemory>(new SystemMemory(device_->verbs, mr));
}

Result<std::unique_ptr<Window>> SystemNic::make_window() {
  ibv_mw* mw = ::ibv_alloc_mw(device_->domain, IBV_MW_TYPE_2);
  if (mw == nullptr) return refused(text("memory window of ", info_.name), errno);
  return std::unique_ptr<Window>(new SystemWindow(mw));
}

Result<std::unique_ptr<QueuePair>> SystemNic::make_queue_pair(std::uint32_t first_packet) {
  ibv_qp_init_attr init{};
  init.send_cq = init.recv_cq = device_->completions;
  init.srq = device_->receives;
  init.qp_type = IBV_QPT_RC;
  init.sq_sig_all = 0;
  init.cap.max_send_wr = info_.send_depth;
  init.cap.max_send_sge = info_.max_pieces;
  ibv_qp* qp = device_->verbs->create_qp(device_->domain, &init);
  if (qp == nullptr) return refused(text("queue pair of ", info_.name), errno);
  const Endpoint local{info_.gid, QueuePairNumber{qp->qp_num}, first_packet & 0xffffffU,
                       info_.mtu_bytes};
  auto pair = std::make_unique<SystemPair>(device_.get(), qp, local);
  KVCORE_RETURN_IF_ERROR(pair->initialise());
  return std::unique_ptr<QueuePair>(std::move(pair));
}

Status SystemNic::post_receives(std::uint32_t count) {
  for (std::uint32_t i = 0; i < count; ++i) {
    ibv_recv_wr wr{};
    ibv_recv_wr* bad = nullptr;
    const int error = ::ibv_post_srq_recv(device_->receives, &wr, &bad);
    if (error != 0) return refused("post to the shared receive queue", error);
  }
  return {};
}

Result<std::size_t> SystemNic::poll(std::span<WorkDone> done) {
  std::array<ibv_wc, kBatch> completions;
  const int wanted = static_cast<int>(std::min(done.size(), kBatch));
  const int n = ::ibv_poll_cq(device_->completions, wanted, completions.data());
  if (n < 0) return refused("poll of the completion queue", -n);
  for (int i = 0; i < n; ++i) {
    const ibv_wc& wc = completions[static_cast<std::size_t>(i)];
    WorkDone& d = done[static_cast<std::size_t>(i)];
    d = {wc.wr_id, QueuePairNumber{wc.qp_num}, WorkKind::kWrite, status_of(wc.status), 0};
    // The opcode of work that failed is undefined: whose it was is told by the queue pair.
    if (wc.status == IBV_WC_SUCCESS && (wc.opcode & IBV_WC_RECV) != 0) {
      d.kind = WorkKind::kReceive;
      d.immediate = be32toh(wc.imm_data);
    }
  }
  return static_cast<std::size_t>(n);
}

Status SystemNic::arm() {
  ibv_cq* cq = nullptr;
  void* context = nullptr;
  unsigned events = 0;
  while (device_->verbs->get_cq_event(device_->channel, &cq, &context) == 0) ++events;
  if (events > 0) device_->verbs->ack_cq_events(device_->completions, events);
  const int error = ::ibv_req_notify_cq(device_->completions, 0);
  if (error != 0) return refused("arming of the completion queue", error);
  return {};
}

std::vector<NicEvent> SystemNic::take_events() {
  std::vector<NicEvent> out;
  ibv_async_event event;
  while (device_->verbs->get_async_event(device_->context, &event) == 0) {
    switch (event.event_type) {
      case IBV_EVENT_PORT_ERR:
        out.push_back(NicEvent::kPortDown);
        break;
      case IBV_EVENT_PORT_ACTIVE:
        out.push_back(NicEvent::kPortUp);
        break;
      case IBV_EVENT_GID_CHANGE:
        out.push_back(NicEvent::kGidChanged);
        break;
      case IBV_EVENT_DEVICE_FATAL:
      case IBV_EVENT_CQ_ERR:
        out.push_back(NicEvent::kFatal);
        break;
      default:
        break;  // of one queue pair: its completions say the same
    }
    device_->verbs->ack_async_event(&event);
  }
  return out;
}

}  // namespace kvcore::transport::rdma
