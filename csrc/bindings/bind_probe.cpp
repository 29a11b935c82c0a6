// Machine limits for benchmarks: kvcore._core.probe.
#include <pybind11/pybind11.h>

#include <tuple>

#include "bindings/errors.h"
#include "kernels/probe/probe.h"

namespace py = pybind11;

namespace kvcore::bindings {

void bind_probe(py::module_ m) {
  using kernels::ReadProbe;
  py::class_<ReadProbe>(m, "ReadProbe")
      .def(py::init([](std::int64_t bytes) { return unwrap(ReadProbe::make(bytes)); }), py::arg("bytes"))
      .def_property_readonly("bytes", &ReadProbe::bytes)
      .def(
          "read",
          [](const ReadProbe& self, std::int64_t offset, std::int64_t n) {
            return unwrap(self.read(offset, n));
          },
          py::arg("offset_bytes"), py::arg("num_bytes"), py::call_guard<py::gil_scoped_release>())
      .def(
          "read_runs",
          [](const ReadProbe& self, std::int64_t offset, std::int64_t n, std::int64_t run) {
            return unwrap(self.read_runs(offset, n, run));
          },
          py::arg("offset_bytes"), py::arg("num_bytes"), py::arg("run_bytes"),
          py::call_guard<py::gil_scoped_release>());
  m.def(
      "fma_f32_peak",
      [](std::int64_t iterations) {
        const kernels::FlopProbe p = kernels::fma_f32_peak(iterations);
        return std::tuple(p.seconds, p.flops);
      },
      py::arg("iterations"), py::call_guard<py::gil_scoped_release>());
  m.def(
      "dot_bf16_peak",
      [](std::int64_t iterations) {
        const kernels::FlopProbe p = unwrap(kernels::dot_bf16_peak(iterations));
        return std::tuple(p.seconds, p.flops);
      },
      py::arg("iterations"), py::call_guard<py::gil_scoped_release>());
}

}  // namespace kvcore::bindings
