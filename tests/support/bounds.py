"""How far a kernel may be from the float64 oracle, derived from the formats it works in.

With S = sum p|v|, W = sum (p v)^2, A = max scale * sum |q_d k_d| (all from the oracle, per row):

scores   A sum of head_dim products in float32: its error is at most (head_dim + 4) * 2^-24 * A.
         A soft cap c adds 3e-7 c, the error of its tanh.
         Where q (f32 or f16) must be rounded to bf16 for bf16 dot products, 2^-8 * A on top.
weights  exp in float32, by polynomial: relative error below 2^-20.
         For bf16 pages weights are rounded to bf16 before the product with V: relative 2^-8.
sum      A float32 sum over n tokens in a fixed tree of segments: relative n * 2^-24 at worst.
out      One rounding to the output's dtype: UNIT_ROUNDOFF * |out|.

worst    |out - ref| <= (e_weight + 2 e_score) S + u_out |ref|: no input can break it.
typical  Roundings of weights are independent, so the error of a row is about e_weight * sqrt(W),
         not e_weight * S. A rounding is at most e_weight, and 0.4 of it in the mean square, so
         the root mean square over head_dim_v values stays below 1.5 of these: reached only where
         one token has all the weight.
         This one is tight enough to notice a single wrongly masked token among thousands.
"""

from __future__ import annotations

import numpy as np
import torch
from kvcore import reference as ref

EXP_ERROR = 2.0**-20
SINGLE = 2.0**-24
TINY = 1e-37  # below it float32 denormals may be flushed


def score_error(result: ref.Attention, head_dim: int, fmt: str, dtype: str) -> np.ndarray:
    """Bound on the error of any scaled score of a row, [rows, Hq]."""
    error = (head_dim + 4) * SINGLE
    if fmt == "bf16" and dtype != "bf16":
        error += ref.UNIT_ROUNDOFF["bf16"]
    return error * result.score_abs


def weight_error(fmt: str, tokens: int) -> float:
    """Bound on the relative error of a weight p, sums over ``tokens`` included."""
    rounding = ref.UNIT_ROUNDOFF["bf16"] if fmt == "bf16" else 0.0
    return rounding + EXP_ERROR + tokens * SINGLE


def excess(
    out: torch.Tensor,
    lse: torch.Tensor,
    want: ref.Attention,
    *,
    fmt: str,
    dtype: str,
    head_dim: int,
    tokens: int,
    soft_cap: float = 0.0,
) -> dict[str, float]:
    """Largest error in units of its bound, per bound; every value must be <= 1.

    Args:
        out [rows, Hq, Dv], lse [rows, Hq]: the kernel's. want: the oracle's.
        fmt: format of pages. dtype: of q and out. head_dim: of K. tokens: longest context.
    """
    got, got_lse = out.double().numpy(), lse.double().numpy()
    empty = np.isneginf(want.lse)
    assert np.array_equal(np.isneginf(got_lse), empty), "rows that see nothing differ"
    assert (got[empty] == 0).all(), "a row that sees nothing is not 0"
    if empty.all():
        return {"worst": 0.0, "typical": 0.0, "lse": 0.0}
    assert np.isfinite(got).all() and np.isfinite(got_lse[~empty]).all(), "not finite"
    scores = score_error(want, head_dim, fmt, dtype)[..., None] + 3e-7 * soft_cap
    weight, unit = weight_error(fmt, tokens), ref.UNIT_ROUNDOFF[dtype]
    error = np.abs(got - want.out)
    worst = (weight + 2 * scores) * want.weight_abs + unit * np.abs(want.out) + TINY
    rounding = ref.UNIT_ROUNDOFF["bf16"] if fmt == "bf16" else EXP_ERROR
    deviation = (rounding + 2 * scores) ** 2 * want.weight_square + (unit * want.out) ** 2
    deviation += (tokens * SINGLE * want.weight_abs) ** 2 + TINY
    typical = 1.5 * np.sqrt(deviation.mean(axis=-1))
    rms = np.sqrt((error**2).mean(axis=-1))
    lse_bound = scores[..., 0] + EXP_ERROR + tokens * SINGLE + 2 * SINGLE * np.abs(want.lse)
    lse_error = np.abs(got_lse[~empty] - want.lse[~empty])
    return {
        "worst": float((error / worst)[~empty].max()),
        "typical": float((rms / typical)[~empty].max()),
        "lse": float((lse_error / lse_bound[~empty]).max()),
    }
