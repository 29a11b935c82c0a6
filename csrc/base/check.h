// What more than one room checks of what it is given, in one wording.
#pragma once

#include <cstdint>
#include <string_view>

#include "base/result.h"

namespace kvcore {

// InvalidArgument names the field, its value and [low, high] when the value lies outside.
Status check_range(std::string_view field, std::int64_t value, std::int64_t low, std::int64_t high);

}  // namespace kvcore
