// Rows of values between tensor dtypes and page formats.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "base/dtype.h"
#include "base/page_layout.h"
#include "kernels/simd/float16.h"

namespace kvcore::kernels {

// Whether a page of this format holds numbers one by one, and not codes of a whole page.
inline bool holds_elements(Format f) noexcept { return f <= Format::kBf16; }

inline std::int64_t size_of(Format f) noexcept { return f == Format::kF32 ? 4 : 2; }

inline DType dtype_of(Format f) noexcept {
  return f == Format::kF32 ? DType::kF32 : f == Format::kF16 ? DType::kF16 : DType::kBf16;
}

template <DType kType>
inline float load_value(const char* p, std::int64_t i) noexcept {
  if constexpr (kType == DType::kF32) {
    float f;
    std::memcpy(&f, p + 4 * i, 4);
    return f;
  } else {
    std::uint16_t h;
    std::memcpy(&h, p + 2 * i, 2);
    return kType == DType::kF16 ? f16_to_float(h) : bf16_to_float(h);
  }
}

template <DType kType>
inline void store_value(char* p, std::int64_t i, float f) noexcept {
  if constexpr (kType == DType::kF32) {
    std::memcpy(p + 4 * i, &f, 4);
  } else {
    const std::uint16_t h = kType == DType::kF16 ? float_to_f16(f) : float_to_bf16(f);
    std::memcpy(p + 2 * i, &h, 2);
  }
}

// Calls fn(std::integral_constant<DType, t>) for the run-time dtype.
template <class Fn>
inline void visit_dtype(DType t, Fn fn) {
  switch (t) {
    case DType::kF32:
      return fn(std::integral_constant<DType, DType::kF32>{});
    case DType::kF16:
      return fn(std::integral_constant<DType, DType::kF16>{});
    case DType::kBf16:
      return fn(std::integral_constant<DType, DType::kBf16>{});
  }
}

inline void convert_row(const char* in, DType from, char* out, DType to, std::int64_t n) {
  if (from == to) {
    std::memcpy(out, in, static_cast<std::size_t>(n * size_of(from)));
    return;
  }
  visit_dtype(from, [&](auto f) {
    visit_dtype(to, [&](auto t) {
      for (std::int64_t i = 0; i < n; ++i) store_value<t>(out, i, load_value<f>(in, i));
    });
  });
}

}  // namespace kvcore::kernels
