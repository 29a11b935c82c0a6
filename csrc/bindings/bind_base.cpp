// kvcore._core.base: hashes and fault plans, for tests and tools.
#include <pybind11/pybind11.h>

#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "base/blake2b.h"
#include "base/fault.h"
#include "base/xxh3.h"
#include "bindings/errors.h"

namespace py = pybind11;

namespace kvcore::bindings {
namespace {

std::span<const std::byte> span_of(std::string_view bytes) {
  return {reinterpret_cast<const std::byte*>(bytes.data()), bytes.size()};
}

py::bytes blake2b(std::string_view data, std::string_view key, std::size_t digest_bytes) {
  Blake2b hash = unwrap(Blake2b::make(digest_bytes, span_of(key)));
  hash.update(span_of(data));
  std::string out(digest_bytes, '\0');
  hash.finish({reinterpret_cast<std::byte*>(out.data()), out.size()});
  return py::bytes(out);
}

std::uint64_t xxh3_of_pieces(const py::iterable& pieces) {
  Xxh3 hash;
  for (const py::handle piece : pieces) hash.update(span_of(piece.cast<std::string_view>()));
  return hash.digest();
}

}  // namespace

void bind_base(py::module_ m) {
  m.def(
      "xxh3_64", [](std::string_view data) { return xxh3_64(span_of(data)); }, py::arg("data"));
  m.def("xxh3_64_of_pieces", &xxh3_of_pieces, py::arg("pieces"));
  m.def("blake2b", &blake2b, py::arg("data"), py::arg("key") = std::string_view(),
        py::arg("digest_bytes") = 32);
  py::class_<FaultPlan, std::shared_ptr<FaultPlan>>(m, "FaultPlan")
      .def(py::init<std::uint64_t>(), py::arg("seed") = 0)
      .def(
          "fail_nth",
          [](FaultPlan& f, const std::string& p, std::int64_t n) { unwrap(f.fail_nth(p, n)); },
          py::arg("point"), py::arg("n"))
      .def(
          "fail_randomly",
          [](FaultPlan& f, const std::string& p, double q) { unwrap(f.fail_randomly(p, q)); },
          py::arg("point"), py::arg("probability"))
      .def("clear", &FaultPlan::clear)
      .def(
          "hit", [](FaultPlan& f, const std::string& p) { return f.hit(p); }, py::arg("point"))
      .def(
          "calls", [](const FaultPlan& f, const std::string& p) { return f.calls(p); },
          py::arg("point"))
      .def(
          "failures", [](const FaultPlan& f, const std::string& p) { return f.failures(p); },
          py::arg("point"));
}

}  // namespace kvcore::bindings
