"""O106: decref before unpin never freed; negative counts "set back to 0" (LMCache/LMCache#1130)."""

from __future__ import annotations

from itertools import permutations

import pytest
from case_tools import NS, make_pool, put, tokens
from kvcore.errors import InvalidArgument, KvcoreError
from kvcore.prefix import RadixTree

STEPS = ("decref", "unpin", "evict", "get", "unlock")


@pytest.mark.parametrize("order", list(permutations(STEPS)), ids="-".join)
def test_every_order_ends_with_everything_free(order: tuple[str, ...]) -> None:
    pool = make_pool(5)
    tree = RadixTree(pool)
    row = tokens(65)
    put(pool, tree, row)
    match = tree.match(NS, row)  # the owner refs
    pool.io_acquire(match.pages)  # the pins of a transfer
    assert match.node is not None
    tree.lock(match.node)
    waiting = {"decref", "unpin", "unlock"}
    for step in order:
        if step == "decref":
            pool.decref(match.pages)
        elif step == "unpin":
            pool.io_release(match.pages)
        elif step == "unlock":
            tree.unlock(match.node)
        elif step == "evict":
            assert bool(tree.evict(4)) == (not waiting), "evicted in use, or kept unused"
        else:
            pool.decref(tree.match(NS, row).pages)
        waiting.discard(step)
    tree.evict(4)
    assert pool.stats().free_frames == 5
    for page in match.pages:
        assert pool.refs(page) == (0, 0)


def test_a_count_below_zero_is_an_error_and_not_clamped() -> None:
    pool = make_pool(4)
    pages = pool.alloc(2)
    pool.io_acquire(pages)
    with pytest.raises(InvalidArgument, match="has no io ref left"):
        pool.io_release([*pages, pages[0]])
    pool.io_release(pages)
    for drop in (pool.io_release, lambda p: pool.decref([*p, *p])):
        with pytest.raises(InvalidArgument):
            drop(pages)
    assert [pool.refs(p) for p in pages] == [(1, 0), (1, 0)]
    tree = RadixTree(pool)
    tree.insert(NS, tokens(32), pages)
    node = tree.match(NS, tokens(33, 0)).node
    assert node is not None
    tree.lock(node)
    tree.unlock(node)
    with pytest.raises(KvcoreError, match="is not locked"):
        tree.unlock(node)
