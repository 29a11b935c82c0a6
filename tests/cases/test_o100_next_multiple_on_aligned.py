"""O100: rounding up an aligned value gave one page too few (ai-dynamo/dynamo PR#13312).

The case counts in pages of 4; the smallest page here is 16, so all numbers are four times as large.
"""

from __future__ import annotations

import pytest
from case_tools import NS, make_pool, put, tokens
from kvcore.pages import usable_prefix
from kvcore.prefix import RadixTree


@pytest.mark.parametrize(
    ("n", "want"), [(48, 32), (49, 48), (56, 48), (64, 48), (65, 64), (72, 64)]
)
def test_matches_on_both_sides_of_a_page_border(n: int, want: int) -> None:
    pool = make_pool(32)
    tree = RadixTree(pool)
    row = tokens(256)
    put(pool, tree, row)
    assert tree.match(NS, row[:n]).num_tokens == want


def test_the_rule_itself_for_pages_of_four() -> None:
    assert [usable_prefix(n, 4) for n in (12, 13, 14, 16, 17, 18)] == [8, 12, 12, 12, 16, 16]
    assert [usable_prefix(n, 4) for n in (-1, 0, 1, 4)] == [0, 0, 0, 0]
