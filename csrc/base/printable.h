// Words of a peer, made fit for logs, messages and Python strings.
#pragma once

#include <string>
#include <string_view>

namespace kvcore {

// What is not printable ASCII becomes '?'.
inline std::string printable(std::string_view words) {
  std::string out(words);
  for (char& c : out)
    if (c < ' ' || c > '~') c = '?';
  return out;
}

}  // namespace kvcore
