// kvcore._core.kernels: the row-wise operations of a decoder layer, by address.
#include <pybind11/pybind11.h>

#include "base/text.h"
#include "bindings/errors.h"
#include "kernels/elementwise/elementwise.h"

namespace py = pybind11;

namespace kvcore::bindings {
namespace {

using Address = std::uintptr_t;

DType dtype_of(int code) {
  if (code < 0 || code > 2)
    throw ErrorException{invalid_argument(
        text("dtype=", code, " is unknown: allowed 0 (float32), 1 (float16), 2 (bfloat16)"))};
  return static_cast<DType>(code);
}

void* needed(const char* field, Address address, std::int64_t rows) {
  if (address == 0 && rows > 0)
    throw ErrorException{invalid_argument(text(field, " is a null pointer"))};
  return reinterpret_cast<void*>(address);
}

void rms_norm(Address x, std::int64_t x_stride, Address delta, Address weight, Address out,
              std::int64_t rows, std::int64_t dim, float eps, int dtype) {
  const kernels::NormRows args{needed("x", x, rows),
                               x_stride,
                               reinterpret_cast<const void*>(delta),
                               needed("weight", weight, rows),
                               needed("out", out, rows),
                               rows,
                               dim,
                               eps,
                               dtype_of(dtype)};
  const py::gil_scoped_release release;
  unwrap(kernels::rms_norm(args));
}

void rope(Address x, std::int64_t x_stride, Address rotation, Address q_weight, Address k_weight,
          std::int64_t rows, std::int64_t q_heads, std::int64_t k_heads, std::int64_t dim, float eps,
          int dtype) {
  const kernels::RopeRows args{needed("x", x, rows),
                               x_stride,
                               static_cast<const float*>(needed("rotation", rotation, rows)),
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
  const kernels::SiluMulRows args{needed("gate_up", gate_up, rows), needed("out", out, rows), rows, dim,
                                  dtype_of(dtype)};
  const py::gil_scoped_release release;
  unwrap(kernels::silu_mul(args));
}

}  // namespace

void bind_elementwise(py::module_ m) {
  m.def("rms_norm_ptr", &rms_norm, py::arg("x"), py::arg("x_stride"), py::arg("delta"),
        py::arg("weight"), py::arg("out"), py::arg("rows"), py::arg("dim"), py::arg("eps"),
        py::arg("dtype"));
  m.def("rope_ptr", &rope, py::arg("x"), py::arg("x_stride"), py::arg("rotation"),
        py::arg("q_weight"), py::arg("k_weight"), py::arg("rows"), py::arg("q_heads"),
        py::arg("k_heads"), py::arg("dim"), py::arg("eps"), py::arg("dtype"));
  m.def("silu_mul_ptr", &silu_mul, py::arg("gate_up"), py::arg("out"), py::arg("rows"),
        py::arg("dim"), py::arg("dtype"));
}

}  // namespace kvcore::bindings
