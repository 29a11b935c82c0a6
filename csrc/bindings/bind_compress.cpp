// kvcore._core.compress: sealing pages; python/kvcore/compress.py is the public face.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <vector>

#include "bindings/errors.h"
#include "compress/seal.h"

namespace py = pybind11;

namespace kvcore::bindings {
namespace {

void bind_seal(py::module_& m) {
  m.def(
      "seal_pages",
      [](pages::Pool& pool, const std::vector<std::int32_t>& pages, std::int32_t class_number) {
        const py::gil_scoped_release release;
        unwrap(compress::seal_pages(pool, pages, class_number));
      },
      py::arg("pool"), py::arg("pages"), py::arg("class_number"));
}

}  // namespace

void bind_compress(py::module_ m) { bind_seal(m); }

}  // namespace kvcore::bindings
