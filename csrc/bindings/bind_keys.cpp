// kvcore._core.keys: namespace digests and page keys; python/kvcore/keys.py is the public face.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "base/text.h"
#include "bindings/errors.h"
#include "bindings/key_list.h"
#include "bindings/tokens.h"
#include "pages/keys.h"

namespace py = pybind11;

namespace kvcore::bindings {
namespace {

using pages::Key;
using pages::KeyChain;
using pages::KeyMaker;

Digest32 digest_of(const std::string& bytes) {
  Digest32 digest;
  if (bytes.size() != digest.size())
    throw ErrorException{
        invalid_argument(text("namespace digest has ", bytes.size(), " bytes: allowed 32"))};
  std::memcpy(digest.data(), bytes.data(), digest.size());
  return digest;
}

KeyChain make_chain(const std::string& secret, const std::string& digest, std::int64_t unit) {
  return KeyChain(unwrap(KeyMaker::make(std::as_bytes(std::span(secret)), unit)),
                  digest_of(digest));
}

py::list extend(KeyChain& chain, const py::object& tokens) {
  const TokenArray array = token_array(tokens);
  const std::size_t added = [&] {
    py::gil_scoped_release release;
    return chain.extend(token_span(array));
  }();
  return key_list(std::span(chain.keys()).last(added));
}

py::bytes namespace_digest(const std::vector<std::pair<std::string, std::string>>& fields) {
  std::vector<pages::NamespaceField> views;
  for (const auto& [tag, value] : fields) views.push_back({tag, value});
  const Digest32 digest = pages::namespace_digest(views);
  return py::bytes(reinterpret_cast<const char*>(digest.data()), digest.size());
}

}  // namespace

void bind_keys(py::module_ m) {
  m.def("namespace_digest", &namespace_digest, py::arg("fields"));
  py::class_<KeyChain>(m, "KeyChain")
      .def(py::init(&make_chain), py::arg("secret"), py::arg("namespace_digest"), py::arg("unit"))
      .def("extend", &extend, py::arg("tokens"))
      .def_property_readonly("keys", [](const KeyChain& c) { return key_list(c.keys()); })
      .def_property_readonly("num_keys", [](const KeyChain& c) { return c.keys().size(); })
      .def_property_readonly("num_tokens", &KeyChain::num_tokens);
}

}  // namespace kvcore::bindings
