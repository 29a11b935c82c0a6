// One table of kernels per instruction set level, and the level in use.
// The level is chosen once from cpuid and KVCORE_ISA; set_isa() changes it for calls that start
// later (tests run at every level). Thread rules: reading is free; set_isa() from any thread.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "kernels/attention/unit.h"
#include "kernels/bounds/rows.h"
#include "kernels/elementwise/rows.h"
#include "kernels/formats/block.h"

namespace kvcore::kernels {

struct KernelTable {
  const char* name;  // "scalar", "avx2", "avx512"
  void (*attend_unit)(const AttendUnit&);
  void (*fold_unit)(const AttendUnit&);
  void (*score_pages)(const ScorePages&);
  void (*merge_rows)(const MergeRows&);
  void (*norm_rows)(const NormRows&);
  void (*rope_rows)(const RopeRows&);
  void (*silu_mul_rows)(const SiluMulRows&);
  bool (*encode_block)(const EncodeBlock&);  // false: a value is not finite or above 65504
  void (*decode_block)(const DecodeBlock&);
  void (*widen_bounds)(const WidenBounds&);
  void (*score_bounds)(const ScoreBounds&);
};

// The table in use; fails if KVCORE_ISA names a level that is unknown or not available here.
Result<const KernelTable*> kernel_table();
Status set_isa(std::string_view name);
// Levels this machine and build can run, slowest first.
std::vector<std::string> available_isas();

}  // namespace kvcore::kernels
