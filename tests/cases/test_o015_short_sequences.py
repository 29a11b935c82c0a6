"""O15 (flashinfer#725): two sequences shorter than one page, the second came back all zeros."""

import pytest
from support.batches import Batch, Sequence, Shape, bits_of
from support.bounds import excess
from support.table import PAGE_SIZES


@pytest.mark.parametrize("fmt", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("page", PAGE_SIZES)
def test_eight_short_sequences_equal_each_alone(page: int, fmt: str, isa: str) -> None:
    lengths = [1, 1, 2, 1, page - 1, page, page + 1, 1]
    shape = Shape(8, 2, 64, 64, page, fmt, num_layers=1)
    batch = Batch(shape, [Sequence(i, n) for i, n in enumerate(lengths)])
    out, lse = batch.attend()
    used = excess(out, lse, batch.expected(), fmt=fmt, dtype="bf16", head_dim=64, tokens=page + 1)
    assert max(used.values()) <= 1, used
    for row, length in enumerate(lengths):
        assert out[row].abs().sum() > 0
        alone, alone_lse = Batch(shape, [Sequence(row, length)]).attend()
        assert bits_of(alone[0]).tobytes() == bits_of(out[row]).tobytes()
        assert bits_of(alone_lse[0]).tobytes() == bits_of(lse[row]).tobytes()
