// The two entry points of one instruction set: every format, part and element type.
#pragma once

#include "kernels/formats/int8_fp8_impl.h"
#include "kernels/formats/k4_impl.h"
#include "kernels/formats/rotated_impl.h"

namespace kvcore::kernels::KVCORE_ISA_NS {
namespace {

template <class E>
bool encode_of(const EncodeBlock& a) {
  const bool k = a.part == Part::kK;
  switch (a.format) {
    case Format::kInt8:
      return k ? encode_int8_k<E>(a) : encode_int8_v<E>(a);
    case Format::kFp8:
      return k ? encode_fp8_k<E>(a) : encode_fp8_v<E>(a);
    case Format::kK4:
      return encode_k4<E>(a);
    default:
      return encode_rotated<E>(a);
  }
}

template <class E>
void decode_of(const DecodeBlock& a) {
  const bool k = a.part == Part::kK;
  switch (a.format) {
    case Format::kInt8:
      return k ? decode_int8_k<E>(a) : decode_int8_v<E>(a);
    case Format::kFp8:
      return k ? decode_fp8_k<E>(a) : decode_fp8_v<E>(a);
    case Format::kK4:
      return decode_k4<E>(a);
    default:
      return decode_rotated<E>(a);
  }
}

#define KVCORE_BY_DTYPE(function, args)   \
  switch ((args).dtype) {                 \
    case DType::kF32:                     \
      return function<F32Elements>(args); \
    case DType::kF16:                     \
      return function<F16Elements>(args); \
    case DType::kBf16:                    \
      break;                              \
  }                                       \
  return function<Bf16Elements>(args);

bool encode_block(const EncodeBlock& args) { KVCORE_BY_DTYPE(encode_of, args) }
void decode_block(const DecodeBlock& args) { KVCORE_BY_DTYPE(decode_of, args) }

#undef KVCORE_BY_DTYPE

}  // namespace
}  // namespace kvcore::kernels::KVCORE_ISA_NS
