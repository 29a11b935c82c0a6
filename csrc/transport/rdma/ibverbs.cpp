#include "transport/rdma/ibverbs.h"

#include <dlfcn.h>

#include <cstring>

#include "base/text.h"

namespace kvcore::transport::rdma {
namespace {

// Fills one entry; false and a reason when the library is older than the function.
class Symbols {
 public:
  explicit Symbols(void* library) : library_(library) {}
  template <class F>
  Symbols& take(F* slot, const char* name) {
    *slot = reinterpret_cast<F>(::dlsym(library_, name));
    if (*slot == nullptr && missing_ == nullptr) missing_ = name;
    return *this;
  }
  const char* missing() const { return missing_; }

 private:
  void* library_;
  const char* missing_ = nullptr;
};

Result<IbVerbs> load() {
  // Never closed: providers keep threads and handlers of their own.
  void* library = ::dlopen("libibverbs.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr)
    return Error{ErrorCode::kUnsupported, text("no libibverbs: ", ::dlerror())};
  IbVerbs v{};
  Symbols s(library);
  s.take(&v.fork_init, "ibv_fork_init")
      .take(&v.get_device_list, "ibv_get_device_list")
      .take(&v.free_device_list, "ibv_free_device_list")
      .take(&v.get_device_name, "ibv_get_device_name")
      .take(&v.open_device, "ibv_open_device")
      .take(&v.close_device, "ibv_close_device")
      .take(&v.query_device, "ibv_query_device")
      .take(&v.query_port, "ibv_query_port")
      .take(&v.query_gid, "ibv_query_gid")
      .take(&v.alloc_pd, "ibv_alloc_pd")
      .take(&v.dealloc_pd, "ibv_dealloc_pd")
      .take(&v.reg_mr_iova2, "ibv_reg_mr_iova2")
      .take(&v.reg_dmabuf_mr, "ibv_reg_dmabuf_mr")
      .take(&v.dereg_mr, "ibv_dereg_mr")
      .take(&v.create_comp_channel, "ibv_create_comp_channel")
      .take(&v.destroy_comp_channel, "ibv_destroy_comp_channel")
      .take(&v.create_cq, "ibv_create_cq")
      .take(&v.destroy_cq, "ibv_destroy_cq")
      .take(&v.get_cq_event, "ibv_get_cq_event")
      .take(&v.ack_cq_events, "ibv_ack_cq_events")
      .take(&v.create_srq, "ibv_create_srq")
      .take(&v.destroy_srq, "ibv_destroy_srq")
      .take(&v.create_qp, "ibv_create_qp")
      .take(&v.modify_qp, "ibv_modify_qp")
      .take(&v.destroy_qp, "ibv_destroy_qp")
      .take(&v.get_async_event, "ibv_get_async_event")
      .take(&v.ack_async_event, "ibv_ack_async_event");
  if (s.missing() != nullptr)
    return Error{ErrorCode::kUnsupported, text("libibverbs is too old: it has no ", s.missing())};
  if (const int error = v.fork_init(); error != 0)
    return Error{ErrorCode::kIo, text("ibv_fork_init: ", std::strerror(error))};
  return v;
}

}  // namespace

Result<const IbVerbs*> load_ibverbs() {
  static const Result<IbVerbs> table = load();
  if (!table) return table.error();
  return &table.value();
}

}  // namespace kvcore::transport::rdma
