#include <pybind11/pybind11.h>

#include "bindings/errors.h"
#include "pages/page_spec.h"

namespace py = pybind11;

namespace kvcore::bindings {

void bind_pages(py::module_ m) {
  m.def("usable_prefix", &pages::usable_prefix, py::arg("num_tokens"), py::arg("page_size"));
}

}  // namespace kvcore::bindings
