// What a row does not see of a step, and the soft cap of scores.
#pragma once

#include "kernels/attention/tile_impl.h"

namespace kvcore::kernels::KVCORE_ISA_NS {
namespace {

struct Seen {  // tokens [from, to) of a step
  std::int64_t from, to;
};

enum class Mask { kNone, kBehind, kRange };  // all lanes are seen; those before `to`; [from, to)

// x in the lanes of vector j that are seen, `other` elsewhere.
template <Mask kMask>
inline F masked(F x, int j, Seen seen, F other) {
  if constexpr (kMask != Mask::kNone)
    x = first_n(static_cast<std::int32_t>(seen.to) - j * kW, x, other);
  if constexpr (kMask == Mask::kRange)
    x = first_n(static_cast<std::int32_t>(seen.from) - j * kW, other, x);
  return x;
}

// tanh(y / (2 log2 e)) = (1 - 2^-|y|) / (1 + 2^-|y|) with the sign of y. The error is below 2e-7,
// absolute: a small y loses digits that the cap's share of the score does not have either.
inline F tanh_of(F y) {
  const F e = exp2(sub(set1(0.f), vabs(y)));
  const F size = sub(set1(1.f), e) / add(set1(1.f), e);
  return as_float(as_int(size) | (as_int(y) & as_int(set1(-0.f))));
}

[[gnu::noinline]] void cap_scores(float cap_log2, float (*scores)[kStepTokens], int rows) {
  for (int m = 0; m < rows; ++m)
    for (int j = 0; j < kStepTokens; j += kW)
      store(&scores[m][j], tanh_of(mul(load(&scores[m][j]), set1(cap_log2))));
}

}  // namespace
}  // namespace kvcore::kernels::KVCORE_ISA_NS
