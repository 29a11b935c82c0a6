#include "bindings/key_list.h"

#include <cstring>
#include <string_view>

#include "base/text.h"
#include "bindings/errors.h"

namespace py = pybind11;

namespace kvcore::bindings {

py::list key_list(std::span<const pages::Key> keys) {
  py::list out(keys.size());
  for (std::size_t i = 0; i < keys.size(); ++i)
    out[i] = py::bytes(reinterpret_cast<const char*>(keys[i].data()), keys[i].size());
  return out;
}

std::vector<pages::Key> keys_of(const char* field, const py::iterable& keys) {
  std::vector<pages::Key> out;
  for (const py::handle item : keys) {
    const bool is_bytes = py::isinstance<py::bytes>(item);
    const auto bytes = is_bytes ? item.cast<std::string_view>() : std::string_view();
    if (bytes.size() != sizeof(pages::Key))
      throw ErrorException{invalid_argument(
          text(field, "[", out.size(), "] is ",
               is_bytes ? text(bytes.size(), " bytes") : "not bytes", ": allowed 32 bytes"))};
    std::memcpy(out.emplace_back().data(), bytes.data(), sizeof(pages::Key));
  }
  return out;
}

}  // namespace kvcore::bindings
