"""O18: keys cut down to nothing still made nodes and counts (sgl-project/sglang PR#10637)."""

from __future__ import annotations

from case_tools import NS, make_pool, put, tokens
from kvcore.prefix import RadixTree


def test_rows_shorter_than_a_page_leave_no_trace() -> None:
    pool = make_pool(8)
    tree = RadixTree(pool, b"secret")
    for i in range(1000):
        for n in (0, 1, 15):
            row = tokens(n, seed=i)
            assert tree.match(NS, row) == ([], 0, None)
            put(pool, tree, row)
    stats = tree.stats()
    assert stats.nodes == stats.pages == stats.evictable_pages == stats.protected_pages == 0
    assert tree.drain_events() == ([], [], False) and tree.keys() == []
    assert pool.stats().held_pages == 0


def test_accounts_count_pages_not_tokens_of_the_key() -> None:
    pool = make_pool(8)
    tree = RadixTree(pool)
    put(pool, tree, tokens(47))
    match = tree.match(NS, tokens(47))
    assert match.node is not None
    tree.lock(match.node)
    stats = tree.stats()
    assert (stats.pages, stats.evictable_pages, stats.protected_pages) == (2, 0, 2)
    tree.unlock(match.node)
    assert tree.stats().evictable_pages == 2
