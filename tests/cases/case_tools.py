"""Small helpers of the fault cases: pools with tiny pages, token rows, content stamps."""

from __future__ import annotations

import hashlib

import numpy as np
from kvcore.pages import PageSpec, Pool
from kvcore.prefix import RadixTree

NS = b"n" * 32


def make_pool(num_pages: int, page_size: int = 16, extent_pages: int = 1) -> Pool:
    """A pool of `num_pages` pages of one tiny float32 layer."""
    spec = PageSpec(
        1, 1, 16, page_size=page_size, extent_pages=extent_pages, format="f32", layout="canonical"
    )
    return Pool(spec, num_pages // extent_pages, huge_pages=False)


def tokens(n: int, seed: int = 0) -> np.ndarray:
    """`n` random tokens, int32; two seeds differ from the first page on."""
    return np.random.default_rng(seed).integers(0, 50_000, n).astype(np.int32)


def put(pool: Pool, tree: RadixTree, row: np.ndarray, namespace: bytes = NS) -> list[int]:
    """Computes `row` as a request would: match, alloc the rest, stamp it, insert, end.

    Returns the page ids the request used. Raises OutOfPages when the pool cannot hold it.
    """
    page_size = pool.spec.page_size
    match = tree.match(namespace, row)
    try:
        fresh = pool.alloc(-(-len(row) // page_size) - len(match.pages))
    except MemoryError:
        pool.decref(match.pages)
        raise
    pages = match.pages + fresh
    for i in range(len(match.pages), len(row) // page_size):
        write_stamp(pool, pages[i], row[: (i + 1) * page_size], namespace)
    tree.insert(namespace, row, pages)
    pool.decref(pages)
    return pages


def stamp(prefix: np.ndarray, page_size: int, namespace: bytes = NS) -> np.ndarray:
    """[page_size, 1, 16] float32 that only this (namespace, prefix, slot) has."""
    seed = hashlib.blake2b(namespace + prefix.tobytes(), digest_size=4).digest()
    value = np.float32(int.from_bytes(seed[:3], "little"))
    slots = np.arange(page_size, dtype=np.float32)[:, None, None]
    return np.broadcast_to(value + slots / 256, (page_size, 1, 16)).copy()


def write_stamp(pool: Pool, page: int, prefix: np.ndarray, namespace: bytes = NS) -> None:
    content = stamp(prefix, pool.spec.page_size, namespace)
    pool.write_slice(page, 0, content, -content)


def shows_stamp(pool: Pool, page: int, prefix: np.ndarray, namespace: bytes = NS) -> bool:
    content = stamp(prefix, pool.spec.page_size, namespace)
    k, v = pool.read_slice(page, 0)
    return bool(np.array_equal(k, content) and np.array_equal(v, -content))
