"""O61: a block popped by eviction was still in the cached map (vllm-project/vllm PR#4764)."""

from __future__ import annotations

from case_tools import NS, make_pool, put, shows_stamp, tokens
from kvcore.prefix import RadixTree


def test_evicted_and_reused_pages_never_answer_for_old_tokens() -> None:
    pool = make_pool(4)
    tree = RadixTree(pool, b"secret")
    old, new = tokens(65, seed=1), tokens(64, seed=2)
    first = put(pool, tree, old[:64])
    old_keys = set(tree.keys())
    generations = [pool.generation(page) for page in first]
    assert sorted(tree.evict(4)) == sorted(first)
    assert [pool.generation(page) for page in first] == [g + 1 for g in generations]
    assert sorted(put(pool, tree, new)) == sorted(first)  # the same pages, other tokens
    assert tree.match(NS, old) == ([], 0, None)
    assert not old_keys & set(tree.keys())
    match = tree.match(NS, new)
    assert match.num_tokens == 48
    assert all(shows_stamp(pool, p, new[: (i + 1) * 16]) for i, p in enumerate(match.pages))
