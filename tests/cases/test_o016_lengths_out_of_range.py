"""O16 (flashinfer#320): a last page fuller than a page was accepted silently.

A plan takes context lengths, so a last page cannot be given at all; what can be given wrongly is a
length that the block table does not cover, or one that is no length.
"""

import numpy as np
import pytest
from kvcore import kernels, pages
from kvcore.errors import InvalidArgument


@pytest.fixture
def plan() -> kernels.AttentionPlan:
    pool = pages.Pool(pages.PageSpec(1, 2, 64, page_size=16, extent_pages=1), 8, huge_pages=False)
    pool.alloc(8)
    return kernels.AttentionPlan(pool, 4)


@pytest.mark.parametrize("length", [-1, -(2**31), 3 * 16 + 1, 2**31 - 1])
def test_a_length_outside_the_block_table_is_refused(
    plan: kernels.AttentionPlan, length: int
) -> None:
    table = np.arange(3, dtype=np.int32)[None]
    with pytest.raises(InvalidArgument, match=r"context_lens.*0"):
        plan.prepare(np.array([0, 1], np.int32), np.array([length], np.int32), table)


@pytest.mark.parametrize("page", [-1, 8, 2**31 - 1, -(2**31)])
def test_a_page_outside_the_pool_is_refused(plan: kernels.AttentionPlan, page: int) -> None:
    table = np.array([[0, page, 2]], np.int32)
    with pytest.raises(InvalidArgument, match=r"block_table"):
        plan.prepare(np.array([0, 1], np.int32), np.array([17], np.int32), table)


def test_entries_behind_the_last_page_are_not_looked_at(plan: kernels.AttentionPlan) -> None:
    table = np.array([[0, 1, 2**31 - 1]], np.int32)
    plan.prepare(np.array([0, 1], np.int32), np.array([32], np.int32), table)
