// Element types of tensors that cross the API. Formats of pages (what a page's bytes mean) are in
// base/page_layout.h: a tensor has a dtype, a page has a format.
#pragma once

#include <cstdint>
#include <cstring>

namespace kvcore {

enum class DType : std::uint8_t { kF32 = 0, kF16 = 1, kBf16 = 2 };

constexpr std::int64_t size_of(DType t) noexcept { return t == DType::kF32 ? 4 : 2; }

constexpr const char* name_of(DType t) noexcept {
  return t == DType::kF32 ? "float32" : t == DType::kF16 ? "float16" : "bfloat16";
}

// Storage types: bit patterns only, converted where needed.
struct Bf16 { std::uint16_t bits; };
struct F16 { std::uint16_t bits; };

}  // namespace kvcore
