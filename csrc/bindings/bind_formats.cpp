// kvcore._core.kernels: compressed head blocks, by address.
#include <pybind11/pybind11.h>

#include <string>
#include <utility>

#include "base/text.h"
#include "bindings/address.h"
#include "bindings/doc.h"
#include "bindings/errors.h"
#include "kernels/formats/formats.h"
#include "pages/page_spec.h"

namespace py = pybind11;

namespace kvcore::bindings {
namespace {

using kernels::BlockSpec;

constexpr Format kCodecs[] = {Format::kInt8, Format::kFp8, Format::kK4, Format::kV4, Format::kV3};

BlockSpec spec_of(const std::string& format, const std::string& part, std::int64_t tokens,
                  std::int64_t dim) {
  if (part != "k" && part != "v")
    throw ErrorException{invalid_argument(text("part='", part, "' is unknown: allowed k, v"))};
  for (const Format value : kCodecs)
    if (format == pages::name_of(value))
      return {value, part == "k" ? Part::kK : Part::kV, tokens, dim};
  throw ErrorException{invalid_argument(
      text("format='", format, "' is not a compressed format: allowed int8, fp8, k4, v4, v3"))};
}

std::size_t size_of_block(std::int64_t bytes) {
  if (bytes < 0)
    throw ErrorException{invalid_argument(text("block has ", bytes, " bytes: allowed from 0"))};
  return static_cast<std::size_t>(bytes);
}

std::int64_t block_bytes(const std::string& format, const std::string& part, std::int64_t tokens,
                         std::int64_t dim) {
  return unwrap(kernels::block_bytes(spec_of(format, part, tokens, dim)));
}

// Heads of a page one after the other: block i reads rows + i * rows_step elements and writes
// block + i * block_step bytes.
void encode_block(const std::string& format, const std::string& part, std::int64_t tokens,
                  std::int64_t dim, Address rows, std::int64_t stride, int dtype, Address block,
                  std::int64_t bytes, std::int64_t count, std::int64_t rows_step,
                  std::int64_t block_step) {
  const BlockSpec spec = spec_of(format, part, tokens, dim);
  const void* from = pointer<const void>("rows", rows, 1);
  std::byte* to = pointer<std::byte>("block", block, 1);
  const DType type = dtype_of(dtype);
  const py::gil_scoped_release release;
  unwrap(kernels::encode_page_blocks(spec, from, stride, type, {to, size_of_block(bytes)},
                                     {count, rows_step, block_step}));
}

void decode_block(const std::string& format, const std::string& part, std::int64_t tokens,
                  std::int64_t dim, Address block, std::int64_t bytes, Address rows,
                  std::int64_t stride, int dtype, std::int64_t count, std::int64_t rows_step,
                  std::int64_t block_step) {
  const BlockSpec spec = spec_of(format, part, tokens, dim);
  const std::byte* from = pointer<const std::byte>("block", block, 1);
  char* to = pointer<char>("rows", rows, 1);
  const DType type = dtype_of(dtype);
  const py::gil_scoped_release release;
  unwrap(kernels::decode_page_blocks(spec, {from, size_of_block(bytes)}, to, stride, type,
                                     {count, rows_step, block_step}));
}

void check_block(const std::string& format, const std::string& part, std::int64_t tokens,
                 std::int64_t dim, Address block, std::int64_t bytes) {
  const BlockSpec spec = spec_of(format, part, tokens, dim);
  const std::byte* from = pointer<const std::byte>("block", block, 1);
  const py::gil_scoped_release release;
  unwrap(kernels::check_block(spec, {from, size_of_block(bytes)}));
}

}  // namespace

void bind_formats(py::module_ m) {
  m.def("block_bytes", &block_bytes, py::arg("format"), py::arg("part"), py::arg("tokens"),
        py::arg("dim"), doc("kernels.block_bytes"));
  m.def("encode_block_ptr", &encode_block, py::arg("format"), py::arg("part"), py::arg("tokens"),
        py::arg("dim"), py::arg("rows_ptr"), py::arg("stride"), py::arg("dtype"),
        py::arg("block_ptr"), py::arg("bytes"), py::arg("count") = 1, py::arg("rows_step") = 0,
        py::arg("block_step") = 0, doc("kernels.encode_block_ptr"));
  m.def("decode_block_ptr", &decode_block, py::arg("format"), py::arg("part"), py::arg("tokens"),
        py::arg("dim"), py::arg("block_ptr"), py::arg("bytes"), py::arg("rows_ptr"),
        py::arg("stride"), py::arg("dtype"), py::arg("count") = 1, py::arg("rows_step") = 0,
        py::arg("block_step") = 0, doc("kernels.decode_block_ptr"));
  m.def("check_block_ptr", &check_block, py::arg("format"), py::arg("part"), py::arg("tokens"),
        py::arg("dim"), py::arg("block_ptr"), py::arg("bytes"), doc("kernels.check_block_ptr"));
}

}  // namespace kvcore::bindings
