// Token lists as they come from Python: int32 arrays are taken as they are, other integers are
// converted with a range check, anything else is refused by name.
#pragma once

#include <pybind11/numpy.h>

#include <cstdint>
#include <span>

namespace kvcore::bindings {

using TokenArray = pybind11::array_t<std::int32_t, pybind11::array::c_style>;

// Raises InvalidArgument unless `tokens` is one-dimensional and every value fits int32 and is >= 0.
TokenArray token_array(const pybind11::object& tokens);

inline std::span<const std::int32_t> token_span(const TokenArray& tokens) {
  return {tokens.data(), static_cast<std::size_t>(tokens.size())};
}

}  // namespace kvcore::bindings
