"""Bounds of pages: the least and the largest key of each channel, and scores that come of them.

Source: Tang et al. 2024, Quest: query-aware sparsity (2406.10774), section 3.2.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def page_bounds(k: Array, valid_tokens: int) -> Array:
    """Least and largest number of each channel of a page's first tokens.

    Args:
        k: [page_size, H, Dk], keys as attention reads them.
        valid_tokens: how many of them there are.
    Returns:
        [H, 2, Dk]: least, largest; (+inf, -inf) without tokens.
    """
    seen = k[:valid_tokens]
    low, high = seen.min(axis=0, initial=np.inf), seen.max(axis=0, initial=-np.inf)
    return np.stack([low, high], axis=1)


def page_score_bounds(q: Array, bounds: Array, scale: float) -> Array:
    """What queries can at most score on pages.

    Args:
        q: [T, Hq, Dk]; query head h reads KV head h // (Hq // H).
        bounds: [pages, H, 2, Dk] of :func:`page_bounds`.
        scale: softmax scale.
    Returns:
        [T, H, pages]: scale * max over the group's heads of sum of max(q low, q high); -inf for
        pages without tokens.
    """
    rows, num_q_heads, dims = q.shape
    pages, heads = bounds.shape[:2]
    out = np.full((rows, heads, pages), -np.inf)
    grouped = q.reshape(rows, heads, num_q_heads // heads, dims)
    for page in range(pages):
        low, high = bounds[page, :, 0], bounds[page, :, 1]
        if (low <= high).all():
            best = np.maximum(grouped * low[:, None], grouped * high[:, None]).sum(axis=3)
            out[:, :, page] = scale * best.max(axis=2)
    return out
