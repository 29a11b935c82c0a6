"""O14: a prompt of exactly whole blocks never hits (vllm-project/vllm PR#50409)."""

from __future__ import annotations

import pytest
from case_tools import NS, make_pool, put, tokens
from kvcore.prefix import RadixTree


@pytest.mark.parametrize("n", [15, 16, 17, 31, 32, 33, 48])
def test_same_prompt_twice_hits_floor_of_n_minus_one(n: int) -> None:
    pool = make_pool(16)
    tree = RadixTree(pool)
    row = tokens(n)
    put(pool, tree, row)
    match = tree.match(NS, row)
    assert match.num_tokens == (n - 1) // 16 * 16 == len(match.pages) * 16
    pool.decref(match.pages)
