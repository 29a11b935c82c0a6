// The one merge of partial attention results (normalised out, natural-log lse): used for segments,
// and by merge_states for split, shared or tiered partials.
#pragma once

namespace kvcore::kernels::KVCORE_ISA_NS {
namespace {

constexpr float kLog2e = 1.44269504088896340736f;
constexpr float kLn2 = 0.69314718055994530942f;

inline void scale_row(float* out, const float* in, float factor, std::int32_t dim) {
  for (std::int32_t d = 0; d < dim; d += kW) store(out + d, mul(load(in + d), set1(factor)));
}

// (oa, la) and (ob * scale_b, lb) -> (o, l). Empty is neutral bit for bit; o may be oa or ob.
inline void merge_row(const float* oa, float la, const float* ob, float scale_b, float lb, float* o,
                      float* l, std::int32_t dim) {
  const float inf = __builtin_inff();
  if (lb == -inf || la == -inf) {
    const bool a = lb == -inf;
    if (!a || oa != o) scale_row(o, a ? oa : ob, a ? 1.f : scale_b, dim);
    *l = a ? la : lb;
    return;
  }
  const float top = la > lb ? la : lb;
  const float wa = __builtin_expf(la - top), wb = __builtin_expf(lb - top);
  const float sum = wa + wb;
  const F fa = set1(wa / sum), fb = set1(wb / sum);
  for (std::int32_t d = 0; d < dim; d += kW)
    store(o + d, add(mul(load(oa + d), fa), mul(mul(load(ob + d), set1(scale_b)), fb)));
  *l = top + __builtin_logf(sum);
}

void merge_rows(const MergeRows& a) {
  for (std::int64_t r = 0; r < a.rows; ++r)
    merge_row(a.out_a + r * a.dim, a.lse_a[r], a.out_b + r * a.dim, 1.f, a.lse_b[r],
              a.out + r * a.dim, a.lse + r, a.dim);
}

}  // namespace
}  // namespace kvcore::kernels::KVCORE_ISA_NS
