#define KVCORE_ISA_NS avx512
#include "kernels/attention/unit.h"
#include "kernels/dispatch/levels.h"
#include "kernels/simd/avx512.h"
//
#include "kernels/simd/int_avx512.h"
//
#include "kernels/simd/codes_avx512.h"
//
#include "kernels/simd/elements.h"
//
#include "kernels/bounds/bounds_impl.h"

namespace kvcore::kernels::avx512 {

void widen_bounds_entry(const WidenBounds& bounds) { widen_bounds(bounds); }
void score_bounds_entry(const ScoreBounds& scores) { score_bounds(scores); }

}  // namespace kvcore::kernels::avx512
