#include "base/check.h"

#include "base/text.h"

namespace kvcore {

Status check_range(std::string_view field, std::int64_t value, std::int64_t low,
                   std::int64_t high) {
  if (value >= low && value <= high) return {};
  return invalid_argument(text(field, "=", value, " is out of range: allowed ", low, " to ", high));
}

}  // namespace kvcore
