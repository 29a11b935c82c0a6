#include "bindings/tokens.h"

#include <limits>
#include <string>

#include "base/text.h"
#include "bindings/errors.h"

namespace py = pybind11;

namespace kvcore::bindings {
namespace {

[[noreturn]] void refuse(const std::string& message) {
  throw ErrorException{invalid_argument(message)};
}

TokenArray narrowed(const py::array& given) {
  const auto wide =
      py::array_t<std::int64_t, py::array::c_style | py::array::forcecast>::ensure(given);
  if (!wide) throw py::error_already_set();
  TokenArray out(wide.size());
  for (py::ssize_t i = 0; i < wide.size(); ++i) {
    const std::int64_t value = wide.data()[i];
    if (value < 0 || value > std::numeric_limits<std::int32_t>::max())
      refuse(text("tokens[", i, "]=", value, " is out of range: allowed 0 to 2147483647"));
    out.mutable_data()[i] = static_cast<std::int32_t>(value);
  }
  return out;
}

}  // namespace

TokenArray token_array(const py::object& tokens) {
  const py::array given = py::array::ensure(tokens);
  if (!given) {
    PyErr_Clear();
    refuse("tokens must be a one-dimensional array of integers");
  }
  if (given.ndim() != 1) refuse(text("tokens has ", given.ndim(), " dimensions: allowed 1"));
  if (given.size() == 0) return TokenArray(0);
  const char kind = given.dtype().kind();
  if (kind != 'i' && kind != 'u')
    refuse(text("tokens has dtype ", std::string(py::str(given.dtype())), ": allowed integers"));
  if (kind == 'i' && given.itemsize() == 4) {
    TokenArray same = TokenArray::ensure(given);
    for (const std::int32_t token : token_span(same)) {
      if (token < 0) refuse(text("tokens contain ", token, ": allowed 0 to 2147483647"));
    }
    return same;
  }
  return narrowed(given);
}

}  // namespace kvcore::bindings
