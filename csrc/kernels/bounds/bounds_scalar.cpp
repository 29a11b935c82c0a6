#define KVCORE_ISA_NS scalar
#include "kernels/attention/unit.h"
#include "kernels/dispatch/levels.h"
#include "kernels/simd/scalar.h"
//
#include "kernels/simd/int_scalar.h"
//
#include "kernels/simd/codes_scalar.h"
//
#include "kernels/simd/elements.h"
//
#include "kernels/bounds/bounds_impl.h"

namespace kvcore::kernels::scalar {

void widen_bounds_entry(const WidenBounds& bounds) { widen_bounds(bounds); }
void score_bounds_entry(const ScoreBounds& scores) { score_bounds(scores); }

}  // namespace kvcore::kernels::scalar
