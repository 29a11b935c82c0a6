"""O20: a prompt that is wholly cached left nothing to schedule (vllm-project/vllm#11562)."""

from __future__ import annotations

import pytest
from case_tools import NS, make_pool, put, tokens
from kvcore.prefix import RadixTree


@pytest.mark.parametrize("n", [1, 16, 17, 32, 64, 65])
def test_at_least_one_token_is_left_to_compute(n: int) -> None:
    pool = make_pool(16)
    tree = RadixTree(pool)
    row = tokens(80)
    put(pool, tree, row)  # every prefix of row[:n] is cached
    match = tree.match(NS, row[:n])
    assert 1 <= n - match.num_tokens <= 16
    assert tree.match(NS, row[:0]) == ([], 0, None)
