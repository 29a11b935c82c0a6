// libFuzzer's entry into a target.
#include "fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  kvcore::fuzz::run({reinterpret_cast<const std::byte*>(data), size});
  return 0;
}
