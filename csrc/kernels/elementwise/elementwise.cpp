#include "kernels/elementwise/elementwise.h"

#include "base/text.h"
#include "kernels/dispatch/table.h"

namespace kvcore::kernels {
namespace {

Status at_least(const char* field, std::int64_t value, std::int64_t least) {
  if (value >= least) return {};
  return invalid_argument(text(field, "=", value, " is out of range: allowed from ", least));
}

}  // namespace

Status rms_norm(const NormRows& args) {
  KVCORE_RETURN_IF_ERROR(at_least("rows", args.rows, 0));
  KVCORE_RETURN_IF_ERROR(at_least("dim", args.dim, 1));
  KVCORE_RETURN_IF_ERROR(at_least("x_stride", args.x_stride, args.dim));
  KVCORE_ASSIGN_OR_RETURN(const KernelTable* table, kernel_table());
  table->norm_rows(args);
  return {};
}

Status rope(const RopeRows& args) {
  KVCORE_RETURN_IF_ERROR(at_least("rows", args.rows, 0));
  KVCORE_RETURN_IF_ERROR(at_least("q_heads", args.q_heads, 0));
  KVCORE_RETURN_IF_ERROR(at_least("k_heads", args.k_heads, 0));
  if (args.dim < 2 || args.dim > kMaxRopeDim || args.dim % 2 != 0)
    return invalid_argument(
        text("dim=", args.dim, " is not allowed: even numbers from 2 to ", kMaxRopeDim));
  KVCORE_RETURN_IF_ERROR(
      at_least("x_stride", args.x_stride, (args.q_heads + args.k_heads) * args.dim));
  KVCORE_ASSIGN_OR_RETURN(const KernelTable* table, kernel_table());
  table->rope_rows(args);
  return {};
}

Status silu_mul(const SiluMulRows& args) {
  KVCORE_RETURN_IF_ERROR(at_least("rows", args.rows, 0));
  KVCORE_RETURN_IF_ERROR(at_least("dim", args.dim, 1));
  KVCORE_ASSIGN_OR_RETURN(const KernelTable* table, kernel_table());
  table->silu_mul_rows(args);
  return {};
}

}  // namespace kvcore::kernels
