#include "bindings/errors.h"

#include <pybind11/pybind11.h>

#include <string>

namespace py = pybind11;

namespace kvcore::bindings {

void register_errors() {
  py::register_exception_translator([](std::exception_ptr p) {
    try {
      if (p) std::rethrow_exception(p);
    } catch (const ErrorException& e) {
      const std::string name(to_string(e.error.code));
      py::object type = py::module_::import("kvcore.errors").attr(name.c_str());
      py::set_error(type, e.error.message.c_str());
    }
  });
}

}  // namespace kvcore::bindings
