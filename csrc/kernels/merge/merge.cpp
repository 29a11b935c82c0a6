#include "kernels/merge/merge.h"

#include <cmath>
#include <limits>

#include "base/block_arrays.h"
#include "base/text.h"
#include "kernels/dispatch/table.h"
#include "kernels/layout/convert.h"

namespace kvcore::kernels {
namespace {

void merge_one(const MergeArgs& a, const KernelTable& table, std::int64_t row) {
  const float empty = -std::numeric_limits<float>::infinity();
  alignas(64) float x[kMaxHeadDim], y[kMaxHeadDim];
  const std::int64_t offset = row * a.dim * size_of(a.dtype);
  convert_row(static_cast<const char*>(a.out_a) + offset, a.dtype, reinterpret_cast<char*>(x),
              DType::kF32, a.dim);
  convert_row(static_cast<const char*>(a.out_b) + offset, a.dtype, reinterpret_cast<char*>(y),
              DType::kF32, a.dim);
  float lse_x = a.lse_a[row], lse_y = a.lse_b[row];
  if (lse_x == empty && lse_y == empty)
    for (std::int64_t d = 0; d < a.dim; ++d) x[d] = 0;
  table.merge_rows({x, &lse_x, y, &lse_y, x, &lse_x, 1, static_cast<std::int32_t>(a.dim)});
  convert_row(reinterpret_cast<const char*>(x), DType::kF32, static_cast<char*>(a.out) + offset,
              a.dtype, a.dim);
  a.lse[row] = lse_x;
}

}  // namespace

Status merge_states(const MergeArgs& args) {
  if (args.dim < 16 || args.dim > kMaxHeadDim || args.dim % 16 != 0)
    return invalid_argument(
        text("dim=", args.dim, " is not allowed: multiples of 16 up to ", kMaxHeadDim));
  if (args.rows < 0) return invalid_argument(text("rows=", args.rows, " must not be negative"));
  KVCORE_ASSIGN_OR_RETURN(const KernelTable* table, kernel_table());
  for (std::int64_t row = 0; row < args.rows; ++row) merge_one(args, *table, row);
  return {};
}

}  // namespace kvcore::kernels
