"""O55: one block twice in a free list enters the free queue twice (vllm-project/vllm#42571)."""

from __future__ import annotations

import pytest
from case_tools import make_pool
from kvcore.errors import InvalidArgument


def test_twice_in_one_call_with_one_ref_is_refused() -> None:
    pool = make_pool(4)
    (page,) = pool.alloc(1)
    with pytest.raises(InvalidArgument, match=f"page={page} has no owner ref left"):
        pool.decref([page, page])
    assert pool.refs(page) == (1, 0)
    pool.decref([page])
    with pytest.raises(InvalidArgument):
        pool.decref([page])
    assert sorted(pool.alloc(4)) == [0, 1, 2, 3]


def test_twice_in_one_call_with_two_refs_frees_once() -> None:
    pool = make_pool(4)
    (page,) = pool.alloc(1)
    pool.incref([page])
    pool.decref([page, page])
    assert pool.stats().free_frames == 4
    assert sorted(pool.alloc(4)) == [0, 1, 2, 3]


def test_all_pages_of_a_frame_in_one_call_free_it_once() -> None:
    pool = make_pool(8, extent_pages=4)
    pages = pool.alloc(4)
    pool.decref(pages)
    assert pool.stats().free_frames == 2
    assert sorted(pool.alloc(8)) == list(range(8))
