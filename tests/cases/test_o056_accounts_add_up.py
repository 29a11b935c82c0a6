"""O56: shared pages were counted twice as evictable (sgl-project/sglang#35270)."""

from __future__ import annotations

import random

import pytest
from case_tools import NS, make_pool, put, tokens
from kvcore.prefix import RadixTree


@pytest.mark.parametrize("extent", [1, 4])
@pytest.mark.parametrize("seed", range(8))
def test_sums_hold_after_every_step(extent: int, seed: int) -> None:
    rng = random.Random(seed)
    pool = make_pool(64, extent_pages=extent)
    tree = RadixTree(pool)
    base = tokens(200, seed)
    pinned: list[list[int]] = []
    locked: list[int] = []
    for step in range(300):
        kind = rng.randrange(6)
        row = base[: rng.randrange(1, 200)].copy()
        cut = rng.randrange(len(row))
        row[cut:] = row[cut:] + rng.randrange(2)  # a branch, so that nodes split
        if kind <= 1:
            try:
                put(pool, tree, row)
            except MemoryError:
                tree.evict(8)
        elif kind == 2:
            pinned.append(tree.match(NS, row).pages)
        elif kind == 3 and pinned:
            pool.decref(pinned.pop(rng.randrange(len(pinned))))
        elif kind == 4:
            match = tree.match(NS, row)
            pool.decref(match.pages)
            if match.node is not None:
                tree.lock(match.node)
                locked.append(match.node)
        elif kind == 5:
            if locked and step % 2:
                tree.unlock(locked.pop())
            tree.evict(rng.randrange(4))
        stats, radix = pool.stats(), tree.stats()
        referenced = {page // extent for page in range(pool.num_pages) if pool.refs(page) != (0, 0)}
        assert stats.free_frames + len(referenced) == stats.num_frames
        assert radix.evictable_pages + radix.protected_pages == radix.pages
        assert radix.pages <= stats.held_pages <= stats.num_pages
        assert (radix.protected_pages > 0) == bool(locked)
    for node in locked:
        tree.unlock(node)
    for pages in pinned:
        pool.decref(pages)
    assert tree.stats().evictable_pages == tree.stats().pages == pool.stats().held_pages
    tree.evict(1 << 20)
    assert pool.stats().free_frames == pool.stats().num_frames
