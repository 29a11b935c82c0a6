// The only bridge from Result to exceptions: unwrap() throws, a translator raises kvcore.errors.<name>.
#pragma once

#include <utility>

#include "base/result.h"

namespace kvcore::bindings {

struct ErrorException {
  Error error;
};

template <class T>
T unwrap(Result<T> result) {
  if (!result) throw ErrorException{result.error()};
  return std::move(result).value();
}
inline void unwrap(Status status) {
  if (!status) throw ErrorException{status.error()};
}

void register_errors();

}  // namespace kvcore::bindings
