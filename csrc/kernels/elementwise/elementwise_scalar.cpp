#define KVCORE_ISA_NS scalar
#include "kernels/dispatch/levels.h"
#include "kernels/simd/scalar.h"
//
#include "kernels/elementwise/elementwise_impl.h"

namespace kvcore::kernels::scalar {

void norm_rows_entry(const NormRows& rows) { norm_rows(rows); }
void rope_rows_entry(const RopeRows& rows) { rope_rows(rows); }
void silu_mul_rows_entry(const SiluMulRows& rows) { silu_mul_rows(rows); }

}  // namespace kvcore::kernels::scalar
