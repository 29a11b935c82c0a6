#include "kernels/formats/formats.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/text.h"
#include "kernels/dispatch/table.h"
#include "kernels/formats/block.h"
#include "kernels/layout/convert.h"

namespace kvcore::kernels {
namespace {

struct Name {
  Format format;
  const char* name;
  bool k, v;  // which parts it is for
};
constexpr Name kCodecs[] = {{Format::kInt8, "int8", true, true},
                            {Format::kFp8, "fp8", true, true},
                            {Format::kK4, "k4", true, false},
                            {Format::kV4, "v4", false, true},
                            {Format::kV3, "v3", false, true}};

Status check_codec(Format format, Part part) {
  for (const Name& codec : kCodecs) {
    if (codec.format != format) continue;
    if (part == Part::kK ? codec.k : codec.v) return {};
    return invalid_argument(text("format ", codec.name, " is for ", codec.k ? "keys" : "values",
                                 " only: part=", part == Part::kK ? "k" : "v", " is not allowed"));
  }
  return invalid_argument(text("format ", static_cast<int>(format),
                               " is not a compressed format: allowed int8, fp8, k4, v4, v3"));
}

Status check_spec(const BlockSpec& s) {
  KVCORE_RETURN_IF_ERROR(check_codec(s.format, s.part));
  if (s.tokens != 16 && s.tokens != 32 && s.tokens != 64 && s.tokens != 128)
    return invalid_argument(text("tokens=", s.tokens, " is not allowed: 16, 32, 64 or 128"));
  if (s.dim < 8 || s.dim > kMaxCodecDim || s.dim % 8 != 0)
    return invalid_argument(
        text("dim=", s.dim, " is not allowed: multiples of 8 from 8 to ", kMaxCodecDim));
  return {};
}

BlockArrays arrays_of(const BlockSpec& s) {
  return block_arrays(s.format, s.part, s.tokens, s.dim);
}

Status check_call(const BlockSpec& s, std::size_t bytes, std::int64_t stride) {
  KVCORE_RETURN_IF_ERROR(check_spec(s));
  const std::int64_t wanted = arrays_of(s).bytes;
  if (static_cast<std::int64_t>(bytes) != wanted)
    return invalid_argument(text("block has ", bytes, " bytes: expected ", wanted));
  if (stride < s.dim)
    return invalid_argument(
        text("rows have a token stride of ", stride, " elements: expected at least dim = ", s.dim));
  return {};
}

Status check_count(const BlockSteps& steps) {
  if (steps.count >= 0) return {};
  return invalid_argument(text("count=", steps.count, " is out of range: allowed from 0"));
}

constexpr float kMaxMagnitude = 65504.f;

// The error for the first number that the encoder refused.
Error out_of_range(const EncodeBlock& a) {
  const char* part = a.part == Part::kK ? "k" : "v";
  for (std::int64_t t = 0; t < a.tokens; ++t)
    for (std::int64_t d = 0; d < a.dim; ++d) {
      float value = 0;
      visit_dtype(a.dtype,
                  [&](auto type) { value = load_value<type>(a.rows + t * a.stride_bytes, d); });
      if (!(std::abs(value) <= kMaxMagnitude))
        return invalid_argument(text(part, "[token ", t, "][dim ", d, "]=", value,
                                     " cannot be compressed: allowed -65504 to 65504"));
    }
  return {ErrorCode::kInternal, "an encoder refused numbers that are in range"};
}

Error damaged(const char* array, std::int64_t place, float value, const char* allowed) {
  return {ErrorCode::kCorrupt,
          text(array, "[", place, "]=", value, " is not allowed: expected ", allowed)};
}

Status check_f16(const char* array, const char* from, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    const float value = load_value<DType::kF16>(from, i);
    if (!(value > 0 && std::isfinite(value)))
      return damaged(array, i, value, "a finite number above 0");
  }
  return {};
}

Status check_codes(const char* array, const char* from, std::int64_t count, bool zero_allowed) {
  for (std::int64_t i = 0; i < count; ++i) {
    const int code = static_cast<unsigned char>(from[i]);
    if ((code & 0x7f) == 0x7f || (!zero_allowed && (code == 0 || code > 0x7f)))
      return damaged(array, i, static_cast<float>(code),
                     zero_allowed ? "an e4m3 code that is a number" : "an e4m3 code above 0");
  }
  return {};
}

}  // namespace

const char* codec_name(Format format) noexcept {
  for (const Name& codec : kCodecs)
    if (codec.format == format) return codec.name;
  return "elements";
}

Result<std::int64_t> block_bytes(const BlockSpec& spec) {
  KVCORE_RETURN_IF_ERROR(check_spec(spec));
  return arrays_of(spec).bytes;
}

Status encode_page_block(const BlockSpec& s, const void* rows, std::int64_t stride, DType dtype,
                         std::span<std::byte> block) {
  return encode_page_blocks(s, rows, stride, dtype, block, {});
}

Status encode_page_blocks(const BlockSpec& s, const void* rows, std::int64_t stride, DType dtype,
                          std::span<std::byte> first, const BlockSteps& steps) {
  KVCORE_RETURN_IF_ERROR(check_call(s, first.size(), stride));
  KVCORE_RETURN_IF_ERROR(check_count(steps));
  KVCORE_ASSIGN_OR_RETURN(const KernelTable* table, kernel_table());
  const BlockArrays at = arrays_of(s);
  const std::int64_t end = at.codes + code_bytes(s.format, s.tokens, s.dim);
  const std::int64_t step_bytes = steps.rows * size_of(dtype);
  EncodeBlock args{static_cast<const char*>(rows),
                   stride * size_of(dtype),
                   dtype,
                   s.format,
                   s.part,
                   static_cast<std::int32_t>(s.tokens),
                   static_cast<std::int32_t>(s.dim),
                   reinterpret_cast<char*>(first.data()),
                   step_bytes,
                   steps.block};
  for (std::int64_t i = 0; i < steps.count; ++i) {
    std::memset(args.block, 0, static_cast<std::size_t>(at.codes));
    std::memset(args.block + end, 0, static_cast<std::size_t>(at.bytes - end));
    if (!table->encode_block(args)) return out_of_range(args);
    args.rows += step_bytes;
    args.block += steps.block;
  }
  return {};
}

Status decode_page_block(const BlockSpec& s, std::span<const std::byte> block, void* rows,
                         std::int64_t stride, DType dtype) {
  return decode_page_blocks(s, block, rows, stride, dtype, {});
}

Status decode_page_blocks(const BlockSpec& s, std::span<const std::byte> first, void* rows,
                          std::int64_t stride, DType dtype, const BlockSteps& steps) {
  KVCORE_RETURN_IF_ERROR(check_call(s, first.size(), stride));
  KVCORE_RETURN_IF_ERROR(check_count(steps));
  KVCORE_ASSIGN_OR_RETURN(const KernelTable* table, kernel_table());
  const std::int64_t step_bytes = steps.rows * size_of(dtype);
  DecodeBlock args{reinterpret_cast<const char*>(first.data()),
                   s.format,
                   s.part,
                   static_cast<std::int32_t>(s.tokens),
                   static_cast<std::int32_t>(s.dim),
                   0,
                   static_cast<std::int32_t>(s.tokens),
                   dtype,
                   static_cast<char*>(rows),
                   stride * size_of(dtype),
                   step_bytes,
                   steps.block};
  for (std::int64_t i = 0; i < steps.count; ++i) {
    table->decode_block(args);
    args.rows += step_bytes;
    args.block += steps.block;
  }
  return {};
}

Status check_block(const BlockSpec& s, std::span<const std::byte> block) {
  KVCORE_RETURN_IF_ERROR(check_call(s, block.size(), s.dim));
  const BlockArrays at = arrays_of(s);
  const char* data = reinterpret_cast<const char*>(block.data());
  if (s.format == Format::kK4) {
    KVCORE_RETURN_IF_ERROR(check_f16("grid", data + at.grid, 2));
    return check_codes("scale", data + at.scale, s.dim, false);
  }
  if (s.part == Part::kK)
    for (std::int64_t d = 0; d < s.dim; ++d) {
      const float mean = load_value<DType::kBf16>(data + at.mean, d);
      if (!std::isfinite(mean)) return damaged("mean", d, mean, "a finite number");
    }
  const bool rotated = s.format == Format::kV4 || s.format == Format::kV3;
  const bool one = s.format == Format::kFp8;
  KVCORE_RETURN_IF_ERROR(
      check_f16(rotated ? "norm" : "scale", data + at.scale, one ? 1 : s.tokens));
  return one ? check_codes("codes", data + at.codes, s.tokens * s.dim, true) : Status{};
}

}  // namespace kvcore::kernels
