"""O17: a node split inside a page leaves halves that are not aligned (sgl-project/sglang#5221)."""

from __future__ import annotations

from case_tools import NS, make_pool, put, shows_stamp, tokens
from kvcore.prefix import RadixTree


def test_rows_that_part_inside_the_first_page_share_nothing() -> None:
    pool = make_pool(16)
    tree = RadixTree(pool)
    one, two = tokens(33, seed=1), tokens(33, seed=2)
    two[:10] = one[:10]
    put(pool, tree, one)
    put(pool, tree, two)
    assert tree.stats().nodes == 2 and tree.stats().pages == 4
    assert tree.match(NS, two).num_tokens == 32
    assert len(tree.evict(2)) == 2  # the older leaf: row one
    assert tree.peek(NS, one) == 0 and tree.peek(NS, two) == 32


def test_a_split_falls_on_the_last_whole_shared_page() -> None:
    pool = make_pool(32)
    tree = RadixTree(pool)
    one, two = tokens(81, seed=1), tokens(81, seed=2)
    two[:40] = one[:40]  # 2.5 pages
    put(pool, tree, one)
    put(pool, tree, two)
    assert tree.stats().nodes == 3 and tree.stats().pages == 5 + 3
    shared = tree.match(NS, one[:33])
    assert shared.num_tokens == 32
    pool.decref(shared.pages)
    pool.decref(tree.match(NS, two).pages)
    assert len(tree.evict(3)) == 3  # what only row one has
    assert tree.peek(NS, one) == 32
    left = tree.match(NS, two)
    assert left.num_tokens == 80
    for i, page in enumerate(left.pages):
        assert shows_stamp(pool, page, two[: (i + 1) * 16])
