// kvcore._core.kernels: thread pool, instruction set level, attention plan, merge, layout copies.
// Tensors arrive as addresses and strides: python/kvcore/kernels.py reads them off any CPU tensor.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/text.h"
#include "base/thread_pool.h"
#include "bindings/address.h"
#include "bindings/dlpack.h"
#include "bindings/doc.h"
#include "bindings/errors.h"
#include "kernels/attention/attention.h"
#include "kernels/bounds/bounds.h"
#include "kernels/dispatch/table.h"
#include "kernels/layout/layout.h"
#include "kernels/layout/tensor_pages.h"
#include "kernels/merge/merge.h"

namespace py = pybind11;

namespace kvcore::bindings {
namespace {

using kernels::AttentionPlan;
using kernels::TensorPages;

const PagesView& view_at(Address address) {
  return *pointer<const PagesView>("view_address", address, 1);
}

// V of tokens to be written; latent pages take none.
const char* v_pointer(const PagesView& pages, Address v, std::int64_t tokens) {
  return pointer<const char>("v", v, kernels::is_latent(pages) ? 0 : tokens);
}

// A contiguous int32 array of the given rank; the last dimension must be dense.
const std::int32_t* int32_array(const char* field, const py::array& a, py::ssize_t rank) {
  if (!a.dtype().equal(py::dtype::of<std::int32_t>()))
    throw ErrorException{invalid_argument(
        text(field, " has dtype ", std::string(py::str(a.dtype())), ": expected int32"))};
  if (a.ndim() != rank)
    throw ErrorException{
        invalid_argument(text(field, " has ", a.ndim(), " dimensions: expected ", rank))};
  if (a.shape(rank - 1) > 1 && a.strides(rank - 1) != 4)
    throw ErrorException{invalid_argument(text(field, " is not contiguous in its last dimension"))};
  return static_cast<const std::int32_t*>(a.data());
}

using Strides = std::array<std::int64_t, 3>;  // bytes: block, head, token

std::unique_ptr<TensorPages> make_tensor_pages(std::vector<Address> k_layers, Strides k_strides,
                                               std::int64_t k_dim, std::vector<Address> v_layers,
                                               Strides v_strides, std::int64_t v_dim,
                                               std::int64_t num_blocks, std::int64_t num_kv_heads,
                                               std::int64_t page_size, int dtype) {
  const auto part = [](std::vector<Address>& layers, const Strides& strides, std::int64_t dim) {
    return kernels::TensorPart{std::move(layers), strides[0], strides[1], strides[2], dim};
  };
  return unwrap(TensorPages::make(part(k_layers, k_strides, k_dim),
                                  part(v_layers, v_strides, v_dim), num_blocks, num_kv_heads,
                                  page_size, static_cast<Format>(dtype_of(dtype))));
}

void prepare(AttentionPlan& plan, const py::array& cu_seqlens_q, const py::array& context_lens,
             const py::array& block_table) {
  kernels::BatchArgs b;
  b.cu_seqlens_q = int32_array("cu_seqlens_q", cu_seqlens_q, 1);
  b.context_lens = int32_array("context_lens", context_lens, 1);
  b.block_table = int32_array("block_table", block_table, 2);
  b.num_seqs = context_lens.shape(0);
  b.max_pages = block_table.shape(1);
  b.block_table_stride = block_table.strides(0) / 4;
  if (cu_seqlens_q.shape(0) != b.num_seqs + 1)
    throw ErrorException{
        invalid_argument(text("cu_seqlens_q has ", cu_seqlens_q.shape(0),
                              " entries: expected num_seqs + 1 = ", b.num_seqs + 1))};
  if (block_table.shape(0) != b.num_seqs)
    throw ErrorException{invalid_argument(
        text("block_table has ", block_table.shape(0), " rows: expected num_seqs = ", b.num_seqs))};
  unwrap(plan.prepare(b));
}

void append(AttentionPlan& plan, std::int64_t layer, Address k, std::int64_t k_stride, Address v,
            std::int64_t v_stride, int dtype) {
  const std::int64_t n = plan.num_tokens();
  const kernels::TokenRows k_rows{pointer<const char>("k", k, n), k_stride};
  const kernels::TokenRows v_rows{v_pointer(plan.pages(), v, n), v_stride};
  const DType type = dtype_of(dtype);
  const py::gil_scoped_release release;
  unwrap(plan.append(layer, k_rows, v_rows, type));
}

kernels::AttendArgs attend_args(const AttentionPlan& plan, Address q, std::int64_t q_stride,
                                Address out, std::int64_t out_stride, Address lse, int dtype) {
  const std::int64_t n = plan.num_tokens();
  return {pointer<const void>("q", q, n), q_stride,       pointer<void>("out", out, n), out_stride,
          reinterpret_cast<float*>(lse),  dtype_of(dtype)};
}

void attend(AttentionPlan& plan, std::int64_t layer, Address q, std::int64_t q_stride, Address out,
            std::int64_t out_stride, Address lse, int dtype, Address page_scores) {
  kernels::AttendArgs args = attend_args(plan, q, q_stride, out, out_stride, lse, dtype);
  args.page_scores = reinterpret_cast<float*>(page_scores);
  const py::gil_scoped_release release;
  unwrap(plan.attend(layer, args));
}

void run(AttentionPlan& plan, std::int64_t layer, Address q, std::int64_t q_stride, Address k,
         std::int64_t k_stride, Address v, std::int64_t v_stride, Address out, Address lse,
         int dtype) {
  const std::int64_t n = plan.num_tokens();
  const std::int64_t out_stride = std::int64_t{plan.num_q_heads()} * plan.pages().head_dim_v;
  const kernels::AttendArgs args = attend_args(plan, q, q_stride, out, out_stride, lse, dtype);
  const kernels::TokenRows k_rows{pointer<const char>("k", k, n), k_stride};
  const kernels::TokenRows v_rows{v_pointer(plan.pages(), v, n), v_stride};
  const py::gil_scoped_release release;
  unwrap(plan.append(layer, k_rows, v_rows, args.dtype));
  unwrap(plan.attend(layer, args));
}

void merge_states(Address out_a, Address lse_a, Address out_b, Address lse_b, Address out,
                  Address lse, std::int64_t rows, std::int64_t dim, int dtype) {
  const kernels::MergeArgs args{pointer<const void>("out_a", out_a, rows),
                                pointer<const float>("lse_a", lse_a, rows),
                                pointer<const void>("out_b", out_b, rows),
                                pointer<const float>("lse_b", lse_b, rows),
                                pointer<void>("out", out, rows),
                                pointer<float>("lse", lse, rows),
                                rows,
                                dim,
                                dtype_of(dtype)};
  const py::gil_scoped_release release;
  unwrap(kernels::merge_states(args));
}

void append_kv(Address view, std::int64_t layer, Address k, std::int64_t k_stride, Address v,
               std::int64_t v_stride, int dtype, Address slot_mapping, std::int64_t tokens) {
  if (tokens < 0) throw ErrorException{invalid_argument(text("tokens=", tokens, " is negative"))};
  const kernels::TokenRows k_rows{pointer<const char>("k", k, tokens), k_stride};
  const kernels::TokenRows v_rows{v_pointer(view_at(view), v, tokens), v_stride};
  const auto* slots = pointer<const std::int64_t>("slot_mapping", slot_mapping, tokens);
  const DType type = dtype_of(dtype);
  const PagesView& pages = view_at(view);
  const py::gil_scoped_release release;
  unwrap(kernels::append_kv(pages, layer, k_rows, v_rows, type,
                            {slots, static_cast<std::size_t>(tokens)}));
}

void pack_slice(Address view, std::int64_t page, std::int64_t layer, std::int64_t first,
                std::int64_t count, Address k, std::int64_t k_stride, Address v,
                std::int64_t v_stride, int dtype) {
  unwrap(kernels::pack_slice(view_at(view), page, layer, first, count,
                             {pointer<const char>("k", k, count), k_stride},
                             {v_pointer(view_at(view), v, count), v_stride}, dtype_of(dtype)));
}

void unpack_slice(Address view, std::int64_t page, std::int64_t layer, std::int64_t first,
                  std::int64_t count, Address k, std::int64_t k_stride, Address v,
                  std::int64_t v_stride, int dtype) {
  unwrap(kernels::unpack_slice(view_at(view), page, layer, first, count,
                               {pointer<char>("k", k, count), k_stride},
                               {pointer<char>("v", v, count), v_stride}, dtype_of(dtype)));
}

void copy_pages(Address view, const std::vector<std::int64_t>& from,
                const std::vector<std::int64_t>& to) {
  const py::gil_scoped_release release;
  unwrap(kernels::copy_pages(view_at(view), from, to));
}

std::span<const std::int32_t> int32_span(const char* field, const py::array& a) {
  return {int32_array(field, a, 1), static_cast<std::size_t>(a.shape(0))};
}

void page_bounds(Address view, std::int64_t layer, const py::array& page_ids,
                 const py::array& valid_tokens, Address out) {
  const PagesView& pages = view_at(view);
  kernels::PageBoundsArgs args;
  args.layer = layer;
  args.page_ids = int32_span("page_ids", page_ids);
  args.valid_tokens = int32_span("valid_tokens", valid_tokens);
  args.out = pointer<float>("out", out, page_ids.shape(0));
  const py::gil_scoped_release release;
  unwrap(kernels::page_bounds(pages, args));
}

void page_score_bounds(Address q, std::int64_t q_stride, int dtype, std::int64_t rows,
                       std::int64_t num_q_heads, Address bounds, std::int64_t pages,
                       std::int64_t num_kv_heads, std::int64_t head_dim, double scale,
                       Address out) {
  kernels::BoundScoresArgs args;
  args.q = pointer<const void>("q", q, rows * num_q_heads);
  args.q_stride = q_stride;
  args.dtype = dtype_of(dtype);
  args.rows = rows;
  args.num_q_heads = num_q_heads;
  args.bounds = pointer<const float>("bounds", bounds, pages * num_kv_heads);
  args.pages = pages;
  args.num_kv_heads = num_kv_heads;
  args.head_dim = head_dim;
  args.scale = scale;
  args.out = pointer<float>("out", out, rows * num_kv_heads * pages);
  const py::gil_scoped_release release;
  unwrap(kernels::page_score_bounds(args));
}

void bind_plan(py::module_& m) {
  py::class_<ThreadPool>(m, "ThreadPool")
      .def(py::init([](std::int64_t num_threads, std::optional<std::vector<std::int32_t>> cpus) {
             return unwrap(
                 ThreadPool::make(num_threads, cpus.value_or(std::vector<std::int32_t>{})));
           }),
           py::arg("num_threads"), py::arg("cpus") = py::none())
      .def_property_readonly("num_threads", &ThreadPool::num_threads,
                             doc("kernels.ThreadPool.num_threads"))
      .def_property_readonly("spins", &ThreadPool::spins, doc("kernels.ThreadPool.spins"));
  py::class_<TensorPages>(m, "TensorPages")
      .def(py::init(&make_tensor_pages), py::arg("k_layers"), py::arg("k_strides"),
           py::arg("k_dim"), py::arg("v_layers"), py::arg("v_strides"), py::arg("v_dim"),
           py::arg("num_blocks"), py::arg("num_kv_heads"), py::arg("page_size"), py::arg("dtype"))
      .def_property_readonly("view_address", [](const TensorPages& t) {
        return reinterpret_cast<Address>(&t.view());
      });
  py::class_<AttentionPlan, std::shared_ptr<AttentionPlan>>(m, "AttentionPlan")
      .def(py::init([](Address view, std::int64_t num_q_heads, double scale, ThreadPool* threads,
                       std::vector<std::int64_t> windows, double soft_cap) {
             return std::shared_ptr<AttentionPlan>(unwrap(AttentionPlan::make(
                 &view_at(view), num_q_heads, scale, threads, {std::move(windows), soft_cap})));
           }),
           py::arg("view_address"), py::arg("num_q_heads"), py::arg("scale") = 0.0,
           py::arg("threads") = py::none(), py::arg("windows") = std::vector<std::int64_t>{},
           py::arg("soft_cap") = 0.0, py::keep_alive<1, 5>())
      .def("prepare", &prepare, py::arg("cu_seqlens_q"), py::arg("context_lens"),
           py::arg("block_table"))
      .def("append_ptr", &append, py::arg("layer"), py::arg("k_ptr"), py::arg("k_stride"),
           py::arg("v_ptr"), py::arg("v_stride"), py::arg("dtype"),
           doc("kernels.AttentionPlan.append_ptr"))
      .def("attend_ptr", &attend, py::arg("layer"), py::arg("q_ptr"), py::arg("q_stride"),
           py::arg("out_ptr"), py::arg("out_stride"), py::arg("lse_ptr"), py::arg("dtype"),
           py::arg("page_scores_ptr") = 0, doc("kernels.AttentionPlan.attend_ptr"))
      .def("run_ptr", &run, py::arg("layer"), py::arg("q_ptr"), py::arg("q_stride"),
           py::arg("k_ptr"), py::arg("k_stride"), py::arg("v_ptr"), py::arg("v_stride"),
           py::arg("out_ptr"), py::arg("lse_ptr"), py::arg("dtype"),
           doc("kernels.AttentionPlan.run_ptr"))
      .def_property_readonly("num_seqs", &AttentionPlan::num_seqs,
                             doc("kernels.AttentionPlan.num_seqs"))
      .def_property_readonly("num_tokens", &AttentionPlan::num_tokens,
                             doc("kernels.AttentionPlan.num_tokens"))
      .def_property_readonly("max_pages", &AttentionPlan::max_pages,
                             doc("kernels.AttentionPlan.max_pages"))
      .def_property_readonly("num_q_heads", &AttentionPlan::num_q_heads,
                             doc("kernels.AttentionPlan.num_q_heads"));
}

}  // namespace

void bind_kernels(py::module_ m) {
  bind_plan(m);
  m.def("isa", [] { return std::string(unwrap(kernels::kernel_table())->name); });
  m.def(
      "set_isa", [](const std::string& name) { unwrap(kernels::set_isa(name)); }, py::arg("name"));
  m.def("available_isas", &kernels::available_isas);
  m.def("describe_dlpack", &describe_dlpack, py::arg("capsule"));
  m.def("merge_states_ptr", &merge_states, py::arg("out_a"), py::arg("lse_a"), py::arg("out_b"),
        py::arg("lse_b"), py::arg("out"), py::arg("lse"), py::arg("rows"), py::arg("dim"),
        py::arg("dtype"), doc("kernels.merge_states_ptr"));
  m.def("append_kv_ptr", &append_kv, py::arg("view_address"), py::arg("layer"), py::arg("k_ptr"),
        py::arg("k_stride"), py::arg("v_ptr"), py::arg("v_stride"), py::arg("dtype"),
        py::arg("slot_mapping_ptr"), py::arg("num_tokens"), doc("kernels.append_kv_ptr"));
  m.def("pack_slice_ptr", &pack_slice, py::arg("view_address"), py::arg("page"), py::arg("layer"),
        py::arg("first"), py::arg("count"), py::arg("k_ptr"), py::arg("k_stride"), py::arg("v_ptr"),
        py::arg("v_stride"), py::arg("dtype"));
  m.def("unpack_slice_ptr", &unpack_slice, py::arg("view_address"), py::arg("page"),
        py::arg("layer"), py::arg("first"), py::arg("count"), py::arg("k_ptr"), py::arg("k_stride"),
        py::arg("v_ptr"), py::arg("v_stride"), py::arg("dtype"));
  m.def("copy_pages", &copy_pages, py::arg("view_address"), py::arg("from_pages"),
        py::arg("to_pages"));
  m.def("page_bounds_ptr", &page_bounds, py::arg("view_address"), py::arg("layer"),
        py::arg("page_ids"), py::arg("valid_tokens"), py::arg("out_ptr"),
        doc("kernels.page_bounds_ptr"));
  m.def("page_score_bounds_ptr", &page_score_bounds, py::arg("q_ptr"), py::arg("q_stride"),
        py::arg("dtype"), py::arg("rows"), py::arg("num_q_heads"), py::arg("bounds_ptr"),
        py::arg("num_pages"), py::arg("num_kv_heads"), py::arg("head_dim"), py::arg("scale"),
        py::arg("out_ptr"), doc("kernels.page_score_bounds_ptr"));
}

}  // namespace kvcore::bindings
