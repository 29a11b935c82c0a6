"""The plain model the stateful tests compare the pool and the radix tree with.

Pages are stamped with H(namespace, prefix): what a live request sees must be what was written for
exactly its tokens, whoever wrote it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from kvcore.pages import PageSpec, Pool

PAGE = 16  # the smallest page size


def make_pool(num_frames: int, extent_pages: int) -> Pool:
    spec = PageSpec(1, 1, 16, page_size=PAGE, extent_pages=extent_pages, format="f32")
    return Pool(spec, num_frames, huge_pages=False)


def expand(words: Sequence[int]) -> np.ndarray:
    """One word per page becomes a page of tokens; a negative word stands for a part of a page."""
    parts = [np.full(PAGE if w >= 0 else -w, max(w, 0), np.int32) for w in words]
    return np.concatenate(parts) if parts else np.zeros(0, np.int32)


def stamp(namespace: bytes, prefix: np.ndarray) -> np.ndarray:
    """The content of the page that ends ``prefix``: [PAGE, 1, 16] float32 from a hash."""
    seed = hashlib.blake2b(namespace + b"|" + prefix.tobytes(), digest_size=8).digest()
    value = np.float32(int.from_bytes(seed[:3], "little"))
    return np.full((PAGE, 1, 16), value, np.float32)


def write_stamp(pool: Pool, page: int, namespace: bytes, prefix: np.ndarray) -> None:
    content = stamp(namespace, prefix)
    pool.write_slice(page, 0, content, content)


def shows_stamp(pool: Pool, page: int, namespace: bytes, prefix: np.ndarray) -> bool:
    k, v = pool.read_slice(page, 0)
    want = stamp(namespace, prefix)
    return bool(np.array_equal(k, want) and np.array_equal(v, want))
