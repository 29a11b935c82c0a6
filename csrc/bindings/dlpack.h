// Reads what a DLPack capsule describes. Only the fields kvcore needs of the stable, unversioned
// DLManagedTensor; the capsule stays the owner, so nothing is freed or renamed here.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

#include "base/text.h"
#include "bindings/errors.h"

namespace kvcore::bindings {

struct DlTensor {
  void* data;
  std::int32_t device_type;
  std::int32_t device_id;
  std::int32_t ndim;
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
  std::int64_t* shape;
  std::int64_t* strides;  // elements; null: C order
  std::uint64_t byte_offset;
};

// (address, shape, strides in elements, dtype name) of a CPU tensor, e.g. (…, (2, 3), (3, 1),
// "float32").
inline pybind11::tuple describe_dlpack(const pybind11::object& capsule) {
  namespace py = pybind11;
  if (PyCapsule_IsValid(capsule.ptr(), "dltensor") == 0)
    throw ErrorException{invalid_argument("expected an unused DLPack capsule named 'dltensor'")};
  const auto& t = *static_cast<const DlTensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"));
  constexpr std::int32_t kCpu = 1;
  if (t.device_type != kCpu)
    throw ErrorException{invalid_argument(
        text("the tensor is on DLPack device type ", t.device_type, ": expected 1 (CPU)"))};
  py::tuple shape(t.ndim), strides(t.ndim);
  std::int64_t dense = 1;
  for (std::int32_t i = t.ndim; i-- > 0;) {
    shape[static_cast<std::size_t>(i)] = t.shape[i];
    strides[static_cast<std::size_t>(i)] = t.strides == nullptr ? dense : t.strides[i];
    dense *= t.shape[i];
  }
  constexpr const char* kKinds[] = {"int", "uint", "float", "opaque", "bfloat"};
  const std::string kind = t.code < 5 ? kKinds[t.code] : text("code", int{t.code}, "_");
  return py::make_tuple(
      reinterpret_cast<std::uintptr_t>(t.data) + t.byte_offset, shape, strides,
      t.lanes == 1 ? text(kind, int{t.bits}) : text(kind, int{t.bits}, "x", t.lanes));
}

}  // namespace kvcore::bindings
