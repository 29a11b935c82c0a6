// The functions each per-ISA file provides; only the dispatch table and those files see this.
#pragma once

#include "kernels/attention/unit.h"
#include "kernels/bounds/rows.h"
#include "kernels/elementwise/rows.h"
#include "kernels/formats/block.h"

namespace kvcore::kernels {

#define KVCORE_DECLARE_LEVEL(level)               \
  namespace level {                               \
  void attend_unit_entry(const AttendUnit&);      \
  void fold_unit_entry(const AttendUnit&);        \
  void score_pages_entry(const ScorePages&);      \
  void merge_rows_entry(const MergeRows&);        \
  void norm_rows_entry(const NormRows&);          \
  void rope_rows_entry(const RopeRows&);          \
  void silu_mul_rows_entry(const SiluMulRows&);   \
  bool encode_block_entry(const EncodeBlock&);    \
  void decode_block_entry(const DecodeBlock&);    \
  void widen_bounds_entry(const WidenBounds&);    \
  void score_bounds_entry(const ScoreBounds&);    \
  }

KVCORE_DECLARE_LEVEL(scalar)
KVCORE_DECLARE_LEVEL(avx2)
KVCORE_DECLARE_LEVEL(avx512)

}  // namespace kvcore::kernels
