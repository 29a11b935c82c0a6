#define KVCORE_ISA_NS avx2
#include "kernels/dispatch/levels.h"
#include "kernels/simd/avx2.h"
//
#include "kernels/elementwise/elementwise_impl.h"

namespace kvcore::kernels::avx2 {

void norm_rows_entry(const NormRows& rows) { norm_rows(rows); }
void rope_rows_entry(const RopeRows& rows) { rope_rows(rows); }
void silu_mul_rows_entry(const SiluMulRows& rows) { silu_mul_rows(rows); }

}  // namespace kvcore::kernels::avx2
