"""O59: looked up and pinned, never fetched: pinned for ever (LMCache/LMCache#1034)."""

from __future__ import annotations

from case_tools import NS, make_pool, put, tokens
from kvcore.pages import SequencePages
from kvcore.prefix import RadixTree


def test_ten_thousand_look_ups_without_a_get() -> None:
    pool = make_pool(16)
    tree = RadixTree(pool)
    row = tokens(65)
    put(pool, tree, row)
    for _ in range(10_000):
        assert tree.peek(NS, row) == 64  # asking pins nothing
    for _ in range(10_000):
        match = tree.match(NS, row)  # a request that pins and ends before it computes anything
        request = SequencePages(pool)
        request.adopt(match.pages, match.num_tokens)
        del request
    assert all(pool.refs(page) in ((0, 0), (1, 0)) for page in range(16))
    assert len(tree.evict(4)) == 4
    assert pool.stats().free_frames == 16
