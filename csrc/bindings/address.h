// Tensors that cross the bindings as addresses: the checks that every one of them gets.
#pragma once

#include <cstdint>

#include "base/dtype.h"
#include "base/text.h"
#include "bindings/errors.h"

namespace kvcore::bindings {

using Address = std::uintptr_t;

inline DType dtype_of(int code) {
  if (code < 0 || code > 2)
    throw ErrorException{invalid_argument(
        text("dtype=", code, " is unknown: allowed 0 (float32), 1 (float16), 2 (bfloat16)"))};
  return static_cast<DType>(code);
}

// A null address is allowed where there are no elements.
template <class T>
T* pointer(const char* field, Address address, std::int64_t elements) {
  if (address == 0 && elements > 0)
    throw ErrorException{invalid_argument(text(field, " is a null pointer"))};
  return reinterpret_cast<T*>(address);
}

}  // namespace kvcore::bindings
