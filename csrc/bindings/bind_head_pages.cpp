// kvcore._core.compress: pruned sequences; python/kvcore/head_pages.py is the public face.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <vector>

#include "base/text.h"
#include "bindings/address.h"
#include "bindings/doc.h"
#include "bindings/errors.h"
#include "compress/head_attention.h"
#include "compress/head_pages.h"

namespace py = pybind11;

namespace kvcore::bindings {
namespace {

using compress::HeadAttention;
using compress::HeadPages;
using Positions = py::array_t<std::int32_t, py::array::c_style>;
using Offsets = py::array_t<std::int64_t, py::array::c_style>;

std::shared_ptr<HeadPages> compact(const pages::Pool& source,
                                   const std::vector<std::int32_t>& pages, std::int64_t num_tokens,
                                   const Positions& positions, const Offsets& offsets,
                                   std::shared_ptr<pages::Pool> head_pool) {
  const compress::KeptTokens kept{{positions.data(), static_cast<std::size_t>(positions.size())},
                                  {offsets.data(), static_cast<std::size_t>(offsets.size())}};
  const py::gil_scoped_release release;
  return unwrap(compress::compact(source, pages, num_tokens, kept, std::move(head_pool)));
}

py::array_t<std::int64_t> num_tokens(const HeadPages& heads) {
  py::array_t<std::int64_t> out({heads.num_layers(), heads.num_kv_heads()});
  for (std::size_t i = 0; i < heads.num_heads(); ++i) out.mutable_data()[i] = heads.num_tokens(i);
  return out;
}

const std::vector<std::int32_t>& pages_of(const HeadPages& heads, std::int32_t layer,
                                          std::int32_t head) {
  if (layer < 0 || layer >= heads.num_layers() || head < 0 || head >= heads.num_kv_heads())
    throw ErrorException{
        invalid_argument(text("layer=", layer, ", head=", head, " is out of range: allowed 0 to ",
                              heads.num_layers() - 1, ", 0 to ", heads.num_kv_heads() - 1))};
  return heads.pages(static_cast<std::size_t>(layer * heads.num_kv_heads() + head));
}

void append(HeadAttention& plan, std::int64_t layer, Address k, std::int64_t k_stride, Address v,
            std::int64_t v_stride, int dtype) {
  const std::int64_t n = plan.num_tokens();
  const kernels::TokenRows k_rows{pointer<const char>("k", k, n), k_stride};
  const kernels::TokenRows v_rows{pointer<const char>("v", v, n), v_stride};
  const DType type = dtype_of(dtype);
  const py::gil_scoped_release release;
  unwrap(plan.append(layer, k_rows, v_rows, type));
}

void attend(HeadAttention& plan, std::int64_t layer, Address q, std::int64_t q_stride, Address out,
            std::int64_t out_stride, Address lse, int dtype) {
  const std::int64_t n = plan.num_tokens();
  const kernels::AttendArgs args{pointer<const void>("q", q, n), q_stride,
                                 pointer<void>("out", out, n),   out_stride,
                                 reinterpret_cast<float*>(lse),  dtype_of(dtype)};
  const py::gil_scoped_release release;
  unwrap(plan.attend(layer, args));
}

void bind_pages(py::module_& m) {
  py::class_<HeadPages, std::shared_ptr<HeadPages>>(m, "HeadPages", doc("compress.HeadPages"))
      .def(py::init([](std::shared_ptr<pages::Pool> pool, std::int32_t layers, std::int32_t heads) {
             return unwrap(HeadPages::make(std::move(pool), layers, heads));
           }),
           py::arg("pool").none(false), py::arg("num_layers"), py::arg("num_kv_heads"))
      .def(
          "grow", [](HeadPages& h, std::int64_t n) { unwrap(h.grow(n)); }, py::arg("num_tokens"),
          doc("compress.HeadPages.grow"))
      .def(
          "seal",
          [](HeadPages& h, const std::vector<std::int32_t>& class_numbers) {
            const py::gil_scoped_release release;
            return unwrap(h.seal(class_numbers));
          },
          py::arg("class_numbers"), doc("compress.HeadPages.seal"))
      .def("release", &HeadPages::release, doc("compress.HeadPages.release"))
      .def("pages", &pages_of, py::arg("layer"), py::arg("head"), doc("compress.HeadPages.pages"))
      .def_property_readonly("num_layers", &HeadPages::num_layers,
                             doc("compress.HeadPages.num_layers"))
      .def_property_readonly("num_kv_heads", &HeadPages::num_kv_heads,
                             doc("compress.HeadPages.num_kv_heads"))
      .def_property_readonly("num_tokens", &num_tokens, doc("compress.HeadPages.num_tokens"))
      .def_property_readonly("num_pages", &HeadPages::num_pages,
                             doc("compress.HeadPages.num_pages"))
      .def_property_readonly("released", &HeadPages::released, doc("compress.HeadPages.released"));
  m.def("compact", &compact, py::arg("pool"), py::arg("pages"), py::arg("num_tokens"),
        py::arg("positions"), py::arg("offsets"), py::arg("head_pool").none(false));
}

void bind_attention(py::module_& m) {
  py::class_<HeadAttention>(m, "HeadAttention")
      .def(py::init([](std::shared_ptr<pages::Pool> pool, std::int32_t layers, std::int32_t heads,
                       std::int64_t num_q_heads, double scale, ThreadPool* threads) {
             return unwrap(
                 HeadAttention::make(std::move(pool), layers, heads, num_q_heads, scale, threads));
           }),
           py::arg("pool").none(false), py::arg("num_layers"), py::arg("num_kv_heads"),
           py::arg("num_q_heads"), py::arg("scale") = 0.0, py::arg("threads") = py::none(),
           py::keep_alive<1, 7>())
      .def(
          "prepare",
          [](HeadAttention& plan, const std::vector<std::shared_ptr<HeadPages>>& sequences,
             const std::vector<std::int32_t>& cu_seqlens_q) {
            for (const auto& heads : sequences) {
              if (heads == nullptr) throw ErrorException{invalid_argument("a sequence is None")};
            }
            unwrap(plan.prepare(sequences, cu_seqlens_q));
          },
          py::arg("sequences"), py::arg("cu_seqlens_q"))
      .def("append_ptr", &append, py::arg("layer"), py::arg("k_ptr"), py::arg("k_stride"),
           py::arg("v_ptr"), py::arg("v_stride"), py::arg("dtype"),
           doc("compress.HeadAttention.append_ptr"))
      .def("attend_ptr", &attend, py::arg("layer"), py::arg("q_ptr"), py::arg("q_stride"),
           py::arg("out_ptr"), py::arg("out_stride"), py::arg("lse_ptr"), py::arg("dtype"),
           doc("compress.HeadAttention.attend_ptr"))
      .def_property_readonly("num_seqs", &HeadAttention::num_seqs,
                             doc("compress.HeadAttention.num_seqs"))
      .def_property_readonly("num_tokens", &HeadAttention::num_tokens,
                             doc("compress.HeadAttention.num_tokens"))
      .def_property_readonly("num_layers", &HeadAttention::num_layers,
                             doc("compress.HeadAttention.num_layers"))
      .def_property_readonly("num_kv_heads", &HeadAttention::num_kv_heads,
                             doc("compress.HeadAttention.num_kv_heads"))
      .def_property_readonly("num_q_heads", &HeadAttention::num_q_heads,
                             doc("compress.HeadAttention.num_q_heads"));
}

}  // namespace

void bind_head_pages(py::module_ m) {
  bind_pages(m);
  bind_attention(m);
}

}  // namespace kvcore::bindings
