"""Stamped pages: contents that say which hand-over, layer and page they belong to."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from kvcore.pages import PageSpec, Pool

SPEC = dict(num_layers=6, num_kv_heads=2, head_dim_k=32, page_size=16, extent_pages=2)


def make_pool(num_frames: int = 32, **changes: int) -> Pool:
    return Pool(PageSpec(**{**SPEC, **changes}), num_frames, huge_pages=False)


def slice_of(pool: Pool, stamp: int, layer: int, slot: int) -> tuple[np.ndarray, np.ndarray]:
    s = pool.spec
    rng = np.random.default_rng([stamp, layer, slot])
    shape = (s.page_size, s.num_kv_heads, s.head_dim_k)
    k = rng.integers(0, 1 << 15, shape, dtype=np.uint16)
    return k, k ^ np.uint16(0x55AA)


def stamp_slice(pool: Pool, page: int, stamp: int, layer: int, slot: int) -> None:
    pool.write_slice(page, layer, *slice_of(pool, stamp, layer, slot))


def stamp_pages(pool: Pool, pages: Sequence[int], stamp: int) -> None:
    for layer in range(pool.spec.num_layers):
        for slot, page in enumerate(pages):
            stamp_slice(pool, page, stamp, layer, slot)


def wrong_slices(pool: Pool, pages: Sequence[int], stamp: int) -> int:
    wrong = 0
    for layer in range(pool.spec.num_layers):
        for slot, page in enumerate(pages):
            k, v = pool.read_slice(page, layer)
            want_k, want_v = slice_of(pool, stamp, layer, slot)
            wrong += not (np.array_equal(k, want_k) and np.array_equal(v, want_v))
    return wrong


def alloc(pool: Pool, num_tokens: int) -> tuple[list[int], list[int]]:
    """The pages of ``num_tokens`` tokens, and all that were allocated for them."""
    n = -(-num_tokens // pool.spec.page_size)
    pages = list(pool.alloc(n))
    return pages[:n], pages
