// Rows of f32, f16 or bf16 elements read and written as vectors of floats; simd/<isa>.h comes
// first.
#pragma once

#include <cstdint>

namespace kvcore::kernels::KVCORE_ISA_NS {
namespace {

struct F32Elements {
  static constexpr std::int64_t kBytes = 4;
  static F get(const void* p) { return load_f32(p); }
  static void put(void* p, F v) { store_f32(p, v); }
};
struct F16Elements {
  static constexpr std::int64_t kBytes = 2;
  static F get(const void* p) { return load_f16(p); }
  static void put(void* p, F v) { store_f16(p, v); }
};
struct Bf16Elements {
  static constexpr std::int64_t kBytes = 2;
  static F get(const void* p) { return load_bf16(p); }
  static void put(void* p, F v) { store_bf16(p, v); }
};

// Element access with a whole vector, or the first `n` lanes of one (the others read as zero).
template <class E>
struct Row {
  char* base;

  // Of the first n lanes, 0 < n < kW; the mask says so to the compiler.
  static unsigned long bytes(std::int64_t n) {
    return static_cast<unsigned long>((n & (kW - 1)) * E::kBytes);
  }
  F get(std::int64_t i) const { return E::get(base + i * E::kBytes); }
  void put(std::int64_t i, F v) const { E::put(base + i * E::kBytes, v); }
  F get(std::int64_t i, std::int64_t n) const {
    if (n >= kW) return get(i);
    alignas(64) char lanes[kW * 4] = {};
    __builtin_memcpy(lanes, base + i * E::kBytes, bytes(n));
    return E::get(lanes);
  }
  void put(std::int64_t i, std::int64_t n, F v) const {
    if (n >= kW) return put(i, v);
    alignas(64) char lanes[kW * 4];
    E::put(lanes, v);
    __builtin_memcpy(base + i * E::kBytes, lanes, bytes(n));
  }
};

template <class E>
Row<E> row_at(const void* p, std::int64_t element) {
  return {const_cast<char*>(static_cast<const char*>(p)) + element * E::kBytes};
}

}  // namespace
}  // namespace kvcore::kernels::KVCORE_ISA_NS
