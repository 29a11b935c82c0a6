// Docstrings of what is bound. Their text stands once, in the stubs (python/kvcore/_core/*.pyi),
// where editors read it; docstrings.py makes a table of it when the extension is built, and here
// help() gets it: .def("alloc", ..., doc("pages.Pool.alloc")).
#pragma once

#include <string_view>

namespace kvcore::bindings {

struct Docstring {
  std::string_view name;  // "room.function", "room.Class" or "room.Class.member"
  const char* text;
};

// Throws std::logic_error, so that the module cannot be imported, for a name without a text.
const char* doc(std::string_view name);

}  // namespace kvcore::bindings
