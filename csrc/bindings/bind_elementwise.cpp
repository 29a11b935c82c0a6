// kvcore._core.kernels: the row-wise operations of a decoder layer, by address.
#include <pybind11/pybind11.h>

#include "base/text.h"
#include "bindings/address.h"
#include "bindings/doc.h"
#include "bindings/errors.h"
#include "kernels/elementwise/elementwise.h"

namespace py = pybind11;

namespace kvcore::bindings {
namespace {

void rms_norm(Address x, std::int64_t x_stride, Address delta, Address weight, Address out,
              std::int64_t rows, std::int64_t dim, float eps, int dtype) {
  const kernels::NormRows args{pointer<void>("x", x, rows),
                               x_stride,
                               reinterpret_cast<const void*>(delta),
                               pointer<void>("weight", weight, rows),
                               pointer<void>("out", out, rows),
                               rows,
                               dim,
                               eps,
                               dtype_of(dtype)};
  const py::gil_scoped_release release;
  unwrap(kernels::rms_norm(args));
}

void rope(Address x, std::int64_t x_stride, Address rotation, Address q_weight, Address k_weight,
          std::int64_t rows, std::int64_t q_heads, std::int64_t k_heads, std::int64_t dim,
          float eps, int dtype) {
  const kernels::RopeRows args{pointer<void>("x", x, rows),
                               x_stride,
                               static_cast<const float*>(pointer<void>("rotation", rotation, rows)),
                               reinterpret_cast<const void*>(q_weight),
                               reinterpret_cast<const void*>(k_weight),
                               rows,
                               q_heads,
                               k_heads,
                               dim,
                               eps,
                               dtype_of(dtype)};
  const py::gil_scoped_release release;
  unwrap(kernels::rope(args));
}

void silu_mul(Address gate_up, Address out, std::int64_t rows, std::int64_t dim, int dtype) {
  const kernels::SiluMulRows args{pointer<void>("gate_up", gate_up, rows),
                                  pointer<void>("out", out, rows), rows, dim, dtype_of(dtype)};
  const py::gil_scoped_release release;
  unwrap(kernels::silu_mul(args));
}

}  // namespace

void bind_elementwise(py::module_ m) {
  m.def("rms_norm_ptr", &rms_norm, py::arg("x"), py::arg("x_stride"), py::arg("delta"),
        py::arg("weight"), py::arg("out"), py::arg("rows"), py::arg("dim"), py::arg("eps"),
        py::arg("dtype"), doc("kernels.rms_norm_ptr"));
  m.def("rope_ptr", &rope, py::arg("x"), py::arg("x_stride"), py::arg("rotation"),
        py::arg("q_weight"), py::arg("k_weight"), py::arg("rows"), py::arg("q_heads"),
        py::arg("k_heads"), py::arg("dim"), py::arg("eps"), py::arg("dtype"),
        doc("kernels.rope_ptr"));
  m.def("silu_mul_ptr", &silu_mul, py::arg("gate_up"), py::arg("out"), py::arg("rows"),
        py::arg("dim"), py::arg("dtype"), doc("kernels.silu_mul_ptr"));
}

}  // namespace kvcore::bindings
