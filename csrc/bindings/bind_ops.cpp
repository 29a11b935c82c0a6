// What python/kvcore/ops.py needs beyond the kernels: the same pages seen in another copy of their arena.
// Compilers of tensor programs may hand an operator a clone of a tensor that it declares to change;
// the operator must then work in the clone's bytes, not in the pool's.
#include <pybind11/pybind11.h>

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "base/text.h"
#include "bindings/dl_exchange.h"
#include "bindings/errors.h"
#include "kernels/attention/attention.h"
#include "stream/layer_step.h"

namespace py = pybind11;

namespace kvcore::bindings {
namespace {

using Address = std::uintptr_t;

PagesView moved(Address view, Address arena) {
  if (view == 0 || arena == 0)
    throw ErrorException{invalid_argument("view_address and arena_address must not be null")};
  PagesView pages = *reinterpret_cast<const PagesView*>(view);
  pages.arena = reinterpret_cast<std::byte*>(arena);
  return pages;
}

// A pool's pages with their bytes elsewhere. The pool must outlive it: records and classes are its own.
class MovedPages {
 public:
  MovedPages(Address view, Address arena) : view_(std::make_unique<PagesView>(moved(view, arena))) {}
  const PagesView* view() const { return view_.get(); }

 private:
  std::unique_ptr<PagesView> view_;
};

// A plan over `pages` with the batch and the scale of another plan, run by the calling thread.
std::shared_ptr<kernels::AttentionPlan> plan_like(const kernels::AttentionPlan& plan,
                                                  const MovedPages& pages) {
  std::vector<std::int32_t> cu{0}, context, table;
  std::int64_t max_pages = 0;
  const std::int64_t page = plan.pages().page_size;
  for (std::int64_t s = 0; s < plan.num_seqs(); ++s) {
    cu.push_back(static_cast<std::int32_t>(cu.back() + plan.q_len(s)));
    context.push_back(static_cast<std::int32_t>(plan.context_len(s)));
    max_pages = std::max(max_pages, (plan.context_len(s) + page - 1) / page);
  }
  table.assign(static_cast<std::size_t>(plan.num_seqs() * max_pages), -1);
  for (std::int64_t s = 0; s < plan.num_seqs(); ++s)
    std::copy_n(plan.page_ids(s), (plan.context_len(s) + page - 1) / page,
                table.begin() + s * max_pages);
  std::shared_ptr<kernels::AttentionPlan> copy =
      unwrap(kernels::AttentionPlan::make(pages.view(), plan.num_q_heads(), plan.scale(),
                                           nullptr, plan.options()));
  unwrap(copy->prepare({plan.num_seqs(), cu.data(), context.data(), table.data(), max_pages, max_pages}));
  return copy;
}

// One plan or step, called once per layer: what an operator's call costs is what it asks of Python, so
// this asks nothing.
class LayerCall {
 public:
  LayerCall(const py::object& exchange, std::shared_ptr<kernels::AttentionPlan> plan, Address arena)
      : exchange_(exchange), plan_(std::move(plan)), arena_(arena) {}
  LayerCall(const py::object& exchange, std::shared_ptr<stream::LayerStep> step, Address arena)
      : exchange_(exchange), step_(std::move(step)), arena_(arena) {}

  // The result, in `into` unless that is None; None for tensors that do not lie as they should: the
  // caller copies them, or says why not.
  py::object run(py::handle q_rows, py::handle k_rows, py::handle v_rows, py::handle arena,
                 std::int64_t layer, const py::object& into) {
    kernels::AttentionPlan& plan = step_ ? step_->plan() : *plan_;
    const PagesView& p = plan.pages();
    DlTensor q{}, k{}, v{}, bytes{};
    if (!exchange_.describe(q_rows, q) || !exchange_.describe(k_rows, k) ||
        !exchange_.describe(v_rows, v) || !exchange_.describe(arena, bytes))
      throw py::error_already_set();
    const std::int64_t tokens = plan.num_tokens();
    const int dtype = code_of(q);
    if (dtype < 0 || code_of(k) != dtype || code_of(v) != dtype ||
        !fits(q, tokens, plan.num_q_heads(), p.head_dim_k) ||
        !fits(k, tokens, p.num_kv_heads, p.head_dim_k) ||
        !fits(v, tokens, p.num_kv_heads, p.head_dim_v) || address(bytes) != arena_)
      return py::none();
    std::int64_t shape[] = {tokens, plan.num_q_heads(), p.head_dim_v};
    DlTensor like = q;
    like.shape = shape;
    like.strides = nullptr;
    py::object out = into.is_none() ? exchange_.allocate(like) : into;
    DlTensor o{};
    if (!exchange_.describe(out, o)) throw py::error_already_set();
    if (code_of(o) != dtype || !fits(o, tokens, shape[1], shape[2])) return py::none();
    const kernels::TokenRows keys{reinterpret_cast<const char*>(address(k)), k.strides[0]},
        values{reinterpret_cast<const char*>(address(v)), v.strides[0]};
    const kernels::AttendArgs args{.q = reinterpret_cast<const void*>(address(q)),
                                   .q_stride = q.strides[0],
                                   .out = reinterpret_cast<void*>(address(o)),
                                   .out_stride = o.strides[0],
                                   .dtype = static_cast<DType>(dtype)};
    {
      py::gil_scoped_release release;
      Status done;
      if (step_) {
        done = step_->run(layer, keys, values, args);
      } else {
        done = plan.append(layer, keys, values, args.dtype);
        if (done.ok()) done = plan.attend(layer, args);
      }
      unwrap(done);
    }
    return out;
  }

 private:
  static Address address(const DlTensor& t) {
    return reinterpret_cast<Address>(t.data) + t.byte_offset;
  }
  // The DType's code of a CPU tensor of floats; -1 for any other.
  static int code_of(const DlTensor& t) {
    constexpr std::int32_t kCpu = 1;
    constexpr std::uint8_t kFloat = 2, kBfloat = 4;
    if (t.device_type != kCpu || t.lanes != 1) return -1;
    if (t.code == kFloat && t.bits == 32) return static_cast<int>(DType::kF32);
    if (t.code == kFloat && t.bits == 16) return static_cast<int>(DType::kF16);
    return t.code == kBfloat && t.bits == 16 ? static_cast<int>(DType::kBf16) : -1;
  }
  static bool fits(const DlTensor& t, std::int64_t tokens, std::int64_t heads, std::int64_t dim) {
    return t.ndim == 3 && t.shape[0] == tokens && t.shape[1] == heads && t.shape[2] == dim &&
           t.strides != nullptr && t.strides[2] == 1 && t.strides[1] == dim;
  }

  DlExchange exchange_;
  std::shared_ptr<kernels::AttentionPlan> plan_;
  std::shared_ptr<stream::LayerStep> step_;
  Address arena_;
};

}  // namespace

void bind_ops(py::module_ m) {
  py::class_<MovedPages>(m, "MovedPages")
      .def(py::init<Address, Address>(), py::arg("view_address"), py::arg("arena_address"))
      .def_property_readonly("view_address", [](const MovedPages& p) {
        return reinterpret_cast<Address>(p.view());
      });
  py::class_<LayerCall>(m, "LayerCall")
      .def(py::init<const py::object&, std::shared_ptr<kernels::AttentionPlan>, Address>(),
           py::arg("exchange"), py::arg("plan").none(false), py::arg("arena_address"))
      .def(py::init<const py::object&, std::shared_ptr<stream::LayerStep>, Address>(),
           py::arg("exchange"), py::arg("step").none(false), py::arg("arena_address"))
      .def("__call__", &LayerCall::run, py::arg("q"), py::arg("k"), py::arg("v"), py::arg("arena"),
           py::arg("layer"), py::arg("out") = py::none());
  m.def("plan_like", &plan_like, py::arg("plan"), py::arg("pages"), py::keep_alive<0, 2>());
}

}  // namespace kvcore::bindings
