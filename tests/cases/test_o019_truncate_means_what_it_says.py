"""O19: crop(0) kept everything, crop(-5) of 3 left 1 (huggingface/transformers#47433)."""

from __future__ import annotations

import pytest
from case_tools import make_pool
from kvcore.errors import InvalidArgument
from kvcore.pages import SequencePages


@pytest.mark.parametrize("extent", [1, 4])
def test_truncate_keeps_exactly_the_first_tokens(extent: int) -> None:
    for keep in (0, 1, 15, 16, 17, 49, 50):
        pool = make_pool(16, extent_pages=extent)
        sequence = SequencePages(pool)
        sequence.grow(50)
        kept = sequence.pages
        sequence.truncate(keep)
        assert sequence.num_tokens == keep
        want_pages = (keep + 16 * extent - 1) // (16 * extent) * extent  # whole frames
        assert sequence.pages == kept[:want_pages]
        assert pool.stats().held_pages == want_pages
        sequence.grow(50)
        assert sequence.num_tokens == 50
        sequence.release()
        assert pool.stats().free_frames == pool.stats().num_frames


@pytest.mark.parametrize("bad", [-1, -5, 4, 1 << 40])
def test_lengths_out_of_range_are_refused_and_change_nothing(bad: int) -> None:
    pool = make_pool(16)
    sequence = SequencePages(pool)
    sequence.grow(3)
    with pytest.raises(InvalidArgument, match=f"num_tokens={bad} is out of range: allowed 0 to 3"):
        sequence.truncate(bad)
    assert sequence.num_tokens == 3 and len(sequence.pages) == 1
