"""Pages of one head for tests of compressed blocks, and how far a decoded page may be from them.

Bounds come from the definitions in docs/formats.md, with float64 numbers of the page itself:

int8  a token's step is at most m / 127 (1 + 2^-10) + 2^-24, m = its largest magnitude (K: after the
      channel's mean is taken off, which bf16 rounds by 2^-8 of itself); the error is half a step.
fp8   4 bits of significand: 2^-4 of a number, or 2^-10 of a step below 2^-6 steps; the step is at
      most m / 448 (1 + 2^-10) + 2^-24, m = the page's largest magnitude.
k4    a channel's step is its range, plus one grid step of the minima, over 15, rounded up to e4m3
      (1/8 of itself, or 2^-9 of the grid); the error is half a step.
v4    the decoded row keeps its norm. Its distance is largest when all energy falls on one rotated
v3    value: with levels a (smallest) and b (largest) the cosine is b / sqrt(b^2 + (n - 1) a^2),
      n = the Hadamard block, times the other blocks' zeros, which also decode to a.
SINGLE covers the float32 operations in between.
"""

from __future__ import annotations

import numpy as np
from kvcore import reference as ref
from kvcore.reference import codecs
from numpy.typing import NDArray

Array = NDArray[np.float64]

CODECS = [(fmt, part) for fmt, parts in ref.CODEC_PARTS.items() for part in parts]
DIMS = [8, 24, 64, 80, 96, 112, 120, 128, 192, 256]
PAGES = [16, 32, 64, 128]
KINDS = [
    "normal", "constant", "zeros", "outlier_channel", "outlier_values", "wide", "subnormal",
    "largest", "one_function",
]  # fmt: skip
SINGLE = 2.0**-20
STEP_UP, LEAST = 1 + 2.0**-10, 2.0**-24


def page(kind: str, tokens: int, dims: int, seed: int = 0) -> NDArray[np.float32]:
    """Rows [tokens, dims] of one kind, float32, within +-65504."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(tokens, dims))
    if kind == "constant":
        x = np.broadcast_to(100 * x[:1], x.shape).copy()
    elif kind == "zeros":
        x *= 0
    elif kind == "outlier_channel":
        x[:, dims // 2] += 100
    elif kind == "outlier_values":
        x[tokens // 2, dims // 3], x[1, 0] = 6e4, -6e4
    elif kind == "wide":
        x *= np.exp2(rng.integers(-140, 14, x.shape))
    elif kind == "subnormal":
        x *= 2.0**-130
    elif kind == "largest":
        x = np.where(x > 0, 65504.0, -65504.0)
    elif kind == "one_function":  # all energy of a row on one rotated value
        spikes = np.zeros((tokens, dims), np.float32)
        spikes[np.arange(tokens), rng.integers(0, dims, tokens)] = 1
        x = ref.codecs.hadamard(spikes) * codecs.sign_of_dims(dims)
    return np.clip(x, -65504, 65504).astype(np.float32)


def _step(largest: Array, codes: int) -> Array:
    return largest / codes * STEP_UP + LEAST


def _centred(x: Array) -> tuple[Array, Array]:
    mean = x.mean(axis=0)
    slack = 2.0**-8 * np.abs(mean) + len(x) * SINGLE * np.abs(x).max(axis=0)
    return np.abs(x - mean) + slack, np.abs(mean)


def error_bound(fmt: str, part: str, rows: NDArray[np.float32]) -> Array:
    """Largest error allowed for each value, float64 [tokens, dims]; int8, fp8, k4 only."""
    x = rows.astype(np.float64)
    size = np.abs(x)
    if fmt == "k4":
        low, high = x.min(axis=0), x.max(axis=0)
        grid = _step(np.abs(low).max(), 127)
        span = (high - low + grid) / 15
        step = span * (1 + 1 / 8) + 2.0**-9 * _step(span.max(), 448)
        return np.broadcast_to(step / 2 + SINGLE * (size.max(axis=0) + grid + 15 * step), x.shape)
    moved, mean = _centred(x) if part == "k" else (size, np.zeros(x.shape[1]))
    rest = SINGLE * (size + mean + moved)
    if fmt == "int8":
        return _step(moved.max(axis=1, keepdims=True), 127) / 2 * (1 + SINGLE) + rest
    return np.maximum(2.0**-4 * moved, 2.0**-10 * _step(moved.max(), 448)) + rest


def distance_bound(fmt: str, dims: int) -> float:
    """Largest ||decoded - row|| / ||row|| of v4 and v3, for rows well above the least norm."""
    levels = codecs.LEVELS[fmt]
    cosine = levels[-1] / np.sqrt(levels[-1] ** 2 + (dims - 1) * levels[0] ** 2)
    return float(np.sqrt(2 - 2 * cosine)) + 2.0**-9
