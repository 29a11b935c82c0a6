// Tensors of a framework as C sees them, without a Python call each: the part of DLPack's exchange
// table that kvcore needs (DLPack 1.3, dlpack.h: DLPackExchangeAPI). A framework publishes the table
// on its tensor class, as a capsule named "dlpack_exchange_api" under __dlpack_c_exchange_api__.
// Thread rules: with the GIL held. A described tensor is valid while its object is.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

#include "base/text.h"
#include "bindings/dlpack.h"
#include "bindings/errors.h"

namespace kvcore::bindings {

struct DlExchangeTable {
  std::uint32_t major, minor;
  const DlExchangeTable* previous;  // of an older major version
  using SetError = void (*)(void*, const char* kind, const char* message);
  int (*allocate)(const DlTensor* prototype, void** out, void* context, SetError set_error);
  int (*own)(void* object, void** out);
  int (*to_object)(void* managed, void** out);  // takes `managed` over
  int (*describe)(void* object, DlTensor* out);
  int (*work_stream)(std::int32_t device_type, std::int32_t device_id, void** out);
};

class DlExchange {
 public:
  explicit DlExchange(const pybind11::object& capsule) {
    constexpr const char* kName = "dlpack_exchange_api";
    if (PyCapsule_IsValid(capsule.ptr(), kName) == 0)
      throw ErrorException{invalid_argument(text("expected a capsule named '", kName, "'"))};
    table_ = static_cast<const DlExchangeTable*>(PyCapsule_GetPointer(capsule.ptr(), kName));
    while (table_ != nullptr && table_->major != 1) table_ = table_->previous;
    if (table_ == nullptr || table_->describe == nullptr)
      throw ErrorException{Error{ErrorCode::kUnsupported, "the table has no version 1 of DLPack"}};
  }

  // False, with a Python error set, for what is no tensor of this framework.
  bool describe(pybind11::handle object, DlTensor& out) const {
    return table_->describe(object.ptr(), &out) == 0;
  }

  // A new tensor with the prototype's type, device and shape.
  pybind11::object allocate(const DlTensor& prototype) const {
    void *managed = nullptr, *object = nullptr;
    const auto fail = [](void*, const char*, const char* message) {
      PyErr_SetString(PyExc_MemoryError, message);
    };
    if (table_->allocate(&prototype, &managed, nullptr, fail) != 0 ||
        table_->to_object(managed, &object) != 0)
      throw pybind11::error_already_set();
    return pybind11::reinterpret_steal<pybind11::object>(static_cast<PyObject*>(object));
  }

 private:
  const DlExchangeTable* table_;
};

}  // namespace kvcore::bindings
