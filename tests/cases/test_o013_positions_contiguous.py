"""O13: a prefix stored one token short shifts every later position (waybarrios/vllm-mlx PR#311)."""

from __future__ import annotations

import numpy as np
import pytest
from case_tools import NS, make_pool, shows_stamp, tokens, write_stamp
from kvcore.pages import slot_mapping
from kvcore.prefix import RadixTree


@pytest.mark.parametrize("page_size", [16, 64])
def test_no_position_is_missing_or_taken_twice(page_size: int) -> None:
    for n in range(1, 4 * page_size + 2):
        pool = make_pool(16, page_size)
        tree = RadixTree(pool)
        row = tokens(n + 7, seed=n)
        old = pool.alloc(-(-n // page_size))
        for i in range(n // page_size):
            write_stamp(pool, old[i], row[: (i + 1) * page_size])
        tree.insert(NS, row[:n], old)

        match = tree.match(NS, row)
        assert match.num_tokens == min(n // page_size, (n + 6) // page_size) * page_size
        for i, page in enumerate(match.pages):
            assert shows_stamp(pool, page, row[: (i + 1) * page_size])
        fresh = pool.alloc(-(-(n + 7) // page_size) - len(match.pages))
        table = match.pages + fresh
        cached = slot_mapping(table, page_size, 0, match.num_tokens)
        computed = slot_mapping(table, page_size, match.num_tokens, n + 7 - match.num_tokens)
        slots = np.concatenate([cached, computed])
        assert len(slots) == n + 7 == len(set(slots.tolist()))
        assert all(slot % page_size == i % page_size for i, slot in enumerate(slots.tolist()))
