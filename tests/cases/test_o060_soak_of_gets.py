"""O60: every get kept a reference until the pool ran dry (LMCache/LMCache PR#3884)."""

from __future__ import annotations

import resource
from pathlib import Path

from case_tools import NS, make_pool, put, tokens
from kvcore.prefix import RadixTree


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_a_million_gets_on_a_pool_of_64() -> None:
    pool = make_pool(64)
    tree = RadixTree(pool)
    rows = [tokens(65, seed=i) for i in range(8)]
    for row in rows:
        put(pool, tree, row)
    before = [pool.refs(page) for page in range(64)]
    half = 0
    for i in range(1_000_000):
        match = tree.match(NS, rows[i & 7])
        pool.decref(match.pages)
        if i == 500_000:
            half = resident_bytes()
    assert resident_bytes() - half < 0.01 * half
    assert [pool.refs(page) for page in range(64)] == before
    assert tree.stats().hits == 1_000_000
    tree.clear()
    assert pool.stats().free_frames == 64
