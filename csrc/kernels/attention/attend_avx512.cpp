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
#include "kernels/formats/rotated_impl.h"
//
#include "kernels/attention/attend_impl.h"

namespace kvcore::kernels::avx512 {

void attend_unit_entry(const AttendUnit& unit) { attend_unit(unit); }
void fold_unit_entry(const AttendUnit& unit) { fold_unit(unit); }
void score_pages_entry(const ScorePages& scores) { score_pages(scores); }
void merge_rows_entry(const MergeRows& rows) { merge_rows(rows); }

}  // namespace kvcore::kernels::avx512
