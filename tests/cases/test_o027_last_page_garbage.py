"""O27 (simpler#72): the unused part of a last page took part in the scores."""

import pytest
from support.batches import Batch, Sequence, Shape, bits_of
from support.table import PAGE_SIZES


@pytest.mark.parametrize("fmt", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("page", PAGE_SIZES)
def test_garbage_changes_no_bit(page: int, fmt: str, isa: str) -> None:
    shape = Shape(6, 2, 64, 64, page, fmt, num_layers=1)
    sequences = [
        Sequence(i, n, min(n, 3)) for i, n in enumerate([1, 2, page - 1, page + 1, 3 * page - 2])
    ]
    clean, clean_lse = Batch(shape, sequences, poison="zero").attend()
    for poison in ("nan", "inf", "huge"):
        out, lse = Batch(shape, sequences, poison=poison).attend()
        assert bits_of(out).tobytes() == bits_of(clean).tobytes(), poison
        assert bits_of(lse).tobytes() == bits_of(clean_lse).tobytes(), poison
