// Page keys between Python (bytes of 32) and C++.
#pragma once

#include <pybind11/pybind11.h>

#include <span>
#include <vector>

#include "pages/keys.h"

namespace kvcore::bindings {

pybind11::list key_list(std::span<const pages::Key> keys);
// Raises InvalidArgument naming `field` and the position of an entry that is not 32 bytes.
std::vector<pages::Key> keys_of(const char* field, const pybind11::iterable& keys);

}  // namespace kvcore::bindings
