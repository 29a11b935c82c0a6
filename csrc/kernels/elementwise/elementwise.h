// What lies between the matrix products of a decoder layer: residual add with RMS norm, rotary
// embedding with optional per-head norm, SiLU gate. A row's bits depend on that row alone.
// Thread rules: none, pure functions on caller memory.
#pragma once

#include "base/result.h"
#include "kernels/elementwise/rows.h"

namespace kvcore::kernels {

Status rms_norm(const NormRows& args);
Status rope(const RopeRows& args);
Status silu_mul(const SiluMulRows& args);

}  // namespace kvcore::kernels
