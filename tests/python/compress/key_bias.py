"""Keys, values and queries of a model with a strong key bias, made from a seed.

Shaped as Qwen2-0.5B (24 layers, 14 query heads on 2 KV heads of 64). In five layers the keys are
nearly constant: one channel is 100 times the median, as the projection's bias makes it there. A
few heads look for few tokens (sharp attention), the others average.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

LAYERS, HEADS, GROUP, DIM, PAGE, PAGES, ROWS = 24, 2, 7, 64, 64, 6, 24
BIASED = (0, 1, 2, 4, 8)
SHARP = ((1, 0), (5, 1), (8, 1), (13, 0), (18, 1), (22, 0))
SCALE = DIM**-0.5


@dataclass(frozen=True)
class Tensors:
    """k, v: float32 [layers, heads, pages, page, dim]; q: [layers, heads, group, rows, dim]."""

    k: np.ndarray
    v: np.ndarray
    q: np.ndarray


def make(seed: int = 7) -> Tensors:
    """The recorded tensors."""
    rng = np.random.default_rng(seed)
    tokens = PAGES * PAGE
    k = np.empty((LAYERS, HEADS, tokens, DIM), np.float32)
    v, q = np.empty_like(k), np.empty((LAYERS, HEADS, GROUP, ROWS, DIM), np.float32)
    for layer in range(LAYERS):
        for head in range(HEADS):
            spread = np.exp(rng.normal(0, 0.5, DIM))
            moving = rng.normal(size=(tokens, DIM)) * spread
            mean = rng.normal(0, 1, DIM)
            if layer in BIASED:
                mean[rng.integers(DIM)] = 100 * np.median(np.abs(mean))
            k[layer, head] = moving + mean
            v[layer, head] = rng.normal(size=(tokens, DIM)) + 1.5 * rng.normal(size=DIM)
            # Scores of this standard deviation: the best tokens stand out, or nothing does.
            score = 10.0 if (layer, head) in SHARP else 1.0
            q[layer, head] = rng.normal(size=(GROUP, ROWS, DIM)) / spread * score
    shape = (LAYERS, HEADS, PAGES, PAGE, DIM)
    return Tensors(k.reshape(shape), v.reshape(shape), q)


def outputs(t: Tensors, layer: int, head: int, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Attention of one KV head's queries over k, v [tokens, dim]: [group, rows, dim], float64."""
    scores = SCALE * t.q[layer, head].astype(np.float64) @ k.astype(np.float64).T
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return (p / p.sum(-1, keepdims=True)) @ v.astype(np.float64)
