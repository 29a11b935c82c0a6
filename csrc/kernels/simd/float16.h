// Scalar conversions between float and the 16-bit formats, round to nearest even.
// `static`: files compiled with wider instructions must not hand their copies to other files.
#pragma once

#include <cstdint>
#include <cstring>

namespace kvcore::kernels {

[[maybe_unused]] static inline float bf16_to_float(std::uint16_t h) noexcept {
  const std::uint32_t u = static_cast<std::uint32_t>(h) << 16;
  float f;
  std::memcpy(&f, &u, sizeof f);
  return f;
}

[[maybe_unused]] static inline std::uint16_t float_to_bf16(float f) noexcept {
  std::uint32_t u;
  std::memcpy(&u, &f, sizeof u);
  if ((u & 0x7fffffffu) > 0x7f800000u)  // a quiet NaN: rounding could turn it into infinity
    return static_cast<std::uint16_t>((u >> 16) | 0x40u);
  return static_cast<std::uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

[[maybe_unused]] static inline float f16_to_float(std::uint16_t h) noexcept {
  const std::uint32_t sign = static_cast<std::uint32_t>(h & 0x8000u) << 16;
  std::uint32_t u = static_cast<std::uint32_t>(h & 0x7fffu) << 13;
  if ((h & 0x7c00u) == 0x7c00u) {
    u |= 0x7f800000u;
    if ((h & 0x3ffu) != 0) u |= 0x400000u;
  } else {
    float f;  // exponent rebias by an exact multiplication; subnormals come out right as well
    std::memcpy(&f, &u, sizeof f);
    f *= 0x1p112f;
    std::memcpy(&u, &f, sizeof u);
  }
  u |= sign;
  float f;
  std::memcpy(&f, &u, sizeof f);
  return f;
}

[[maybe_unused]] static inline std::uint16_t float_to_f16(float f) noexcept {
  std::uint32_t u;
  std::memcpy(&u, &f, sizeof u);
  const std::uint16_t sign = static_cast<std::uint16_t>((u >> 16) & 0x8000u);
  u &= 0x7fffffffu;
  if (u > 0x7f800000u)  // NaN: keep the top of its payload, as the hardware conversion does
    return static_cast<std::uint16_t>(sign | 0x7e00u | ((u >> 13) & 0x3ffu));
  if (u >= 0x477ff000u) return static_cast<std::uint16_t>(sign | 0x7c00u);  // rounds to infinity
  if (u < 0x38800000u) {  // below the normal range: let float addition do the rounding
    float g;
    std::memcpy(&g, &u, sizeof g);
    g += 0.5f;
    std::uint32_t v;
    std::memcpy(&v, &g, sizeof v);
    return static_cast<std::uint16_t>(sign | (v - 0x3f000000u));
  }
  const std::uint32_t rounded = u + 0xfffu + ((u >> 13) & 1u) - 0x38000000u;
  return static_cast<std::uint16_t>(sign | (rounded >> 13));
}

}  // namespace kvcore::kernels
