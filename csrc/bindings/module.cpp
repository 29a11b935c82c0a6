// kvcore._core: one submodule per room; each bind_<room>.cpp fills its own.
#include <pybind11/pybind11.h>

#include "bindings/errors.h"

namespace py = pybind11;

namespace kvcore::bindings {
void bind_base(py::module_ m);
void bind_compress(py::module_ m);
void bind_head_pages(py::module_ m);
void bind_keys(py::module_ m);
void bind_kernels(py::module_ m);
void bind_elementwise(py::module_ m);
void bind_formats(py::module_ m);
void bind_ops(py::module_ m);
void bind_pages(py::module_ m);
void bind_prefix(py::module_ m);
void bind_sched(py::module_ m);
void bind_transport(py::module_ m);
void bind_wire(py::module_ m);
void bind_probe(py::module_ m);
void bind_stream(py::module_ m);
}  // namespace kvcore::bindings

PYBIND11_MODULE(_core, m) {
  using namespace kvcore::bindings;
  m.attr("__version__") = KVCORE_VERSION;
  m.attr("__build__") = KVCORE_BUILD;
  register_errors();
  bind_base(m.def_submodule("base"));
  bind_keys(m.def_submodule("keys"));
  bind_kernels(m.def_submodule("kernels"));
  bind_elementwise(m.attr("kernels"));
  bind_formats(m.attr("kernels"));
  bind_ops(m.def_submodule("ops"));
  bind_pages(m.def_submodule("pages"));
  bind_compress(m.def_submodule("compress"));
  bind_head_pages(m.attr("compress"));
  bind_prefix(m.def_submodule("prefix"));
  bind_sched(m.def_submodule("sched"));
  bind_transport(m.def_submodule("transport"));
  bind_wire(m.def_submodule("wire"));
  bind_probe(m.def_submodule("probe"));
  bind_stream(m.def_submodule("stream"));
}
