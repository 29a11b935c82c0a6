// Builds messages: text("head_dim_k=", 63, " must be even"). gcc 12 has no <format>.
#pragma once

#include <sstream>
#include <string>

namespace kvcore {

template <class... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return std::move(out).str();
}

}  // namespace kvcore
