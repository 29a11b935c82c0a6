// libibverbs.so.1 as a table of functions, filled by dlopen once, so that nothing links against it
// and a machine without it runs everything else. The headers are needed at build time only; calls
// that they inline go through the device's own table and need no symbol.
// Thread rules: the table is made once and never changes.
#pragma once

#include <infiniband/verbs.h>

#include "base/result.h"

namespace kvcore::transport::rdma {

struct IbVerbs {
  decltype(&::ibv_fork_init) fork_init;
  decltype(&::ibv_get_device_list) get_device_list;
  decltype(&::ibv_free_device_list) free_device_list;
  decltype(&::ibv_get_device_name) get_device_name;
  decltype(&::ibv_open_device) open_device;
  decltype(&::ibv_close_device) close_device;
  decltype(&::ibv_query_device) query_device;
  int (*query_port)(ibv_context*, std::uint8_t, _compat_ibv_port_attr*);
  decltype(&::ibv_query_gid) query_gid;
  decltype(&::ibv_alloc_pd) alloc_pd;
  decltype(&::ibv_dealloc_pd) dealloc_pd;
  ibv_mr* (*reg_mr_iova2)(ibv_pd*, void*, std::size_t, std::uint64_t, unsigned);
  decltype(&::ibv_reg_dmabuf_mr) reg_dmabuf_mr;
  decltype(&::ibv_dereg_mr) dereg_mr;
  decltype(&::ibv_create_comp_channel) create_comp_channel;
  decltype(&::ibv_destroy_comp_channel) destroy_comp_channel;
  decltype(&::ibv_create_cq) create_cq;
  decltype(&::ibv_destroy_cq) destroy_cq;
  decltype(&::ibv_get_cq_event) get_cq_event;
  decltype(&::ibv_ack_cq_events) ack_cq_events;
  decltype(&::ibv_create_srq) create_srq;
  decltype(&::ibv_destroy_srq) destroy_srq;
  decltype(&::ibv_create_qp) create_qp;
  decltype(&::ibv_modify_qp) modify_qp;
  decltype(&::ibv_destroy_qp) destroy_qp;
  decltype(&::ibv_get_async_event) get_async_event;
  decltype(&::ibv_ack_async_event) ack_async_event;
};

// The first call prepares libibverbs for processes that fork (ibv_fork_init; RDMAV_FORK_SAFE says
// the same): without it a child's copy-on-write could take pages away from under a device. Since
// Linux 5.12 the kernel sees to that and nothing changes. Unsupported with dlopen's reason; Io: no
// fork safety.
Result<const IbVerbs*> load_ibverbs();

}  // namespace kvcore::transport::rdma
