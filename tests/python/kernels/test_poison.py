"""What unused slots hold never shows: not NaN, not Inf, not 1e38."""

import pytest
from support.batches import Batch, Sequence, Shape, bits_of
from support.table import PAGE_SIZES, short_lengths


def result_bits(batch: Batch, dtype: str) -> bytes:
    out, lse = batch.attend(0, dtype)
    return bits_of(out).tobytes() + bits_of(lse).tobytes()


@pytest.mark.parametrize("layout", ["packed", "canonical"])
@pytest.mark.parametrize("fmt", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("page", PAGE_SIZES)
def test_unused_slots_of_every_page(page: int, fmt: str, layout: str, isa: str) -> None:
    shape = Shape(6, 2, 64, 80, page, fmt, layout, num_layers=1)
    want = result_bits(Batch(shape, short_lengths(page), poison="zero"), "bf16")
    for poison in ("nan", "inf", "huge"):
        got = result_bits(Batch(shape, short_lengths(page), poison=poison), "bf16")
        assert got == want, poison


@pytest.mark.parametrize("fmt", ["bf16", "f16", "f32"])
def test_every_length_within_one_page(fmt: str, isa: str) -> None:
    """Odd counts too: half of a bf16 pair may be unused."""
    shape = Shape(3, 1, 32, 64, 64, fmt, num_layers=1)
    sequences = [Sequence(1, n, 1) for n in range(66)]
    want = result_bits(Batch(shape, sequences, poison="zero"), "f32")
    assert result_bits(Batch(shape, sequences, poison="nan"), "f32") == want


@pytest.mark.parametrize("fmt", ["bf16", "f16", "f32"])
def test_tokens_behind_a_row_do_not_show(fmt: str, isa: str) -> None:
    """Causality by bits: a row with the later tokens of its chunk stored, and without them."""
    shape = Shape(6, 2, 64, 64, 64, fmt, num_layers=1)
    out, lse = Batch(shape, [Sequence(2, 130, 70)]).attend()
    for length in (61, 62, 64, 65, 100, 127, 128, 129):
        alone, alone_lse = Batch(shape, [Sequence(2, length, 1)], poison="inf").attend()
        row = length - 61
        assert bits_of(alone[0]).tobytes() == bits_of(out[row]).tobytes(), length
        assert bits_of(alone_lse[0]).tobytes() == bits_of(lse[row]).tobytes(), length


@pytest.mark.parametrize("poison", ["nan", "inf", "huge"])
def test_several_segments(poison: str, isa: str) -> None:
    shape = Shape(4, 2, 64, 64, 64, "bf16", num_layers=1)
    sequences = [Sequence(2, 1030, 9), Sequence(3, 2049, 1)]
    want = result_bits(Batch(shape, sequences, poison="zero"), "bf16")
    assert result_bits(Batch(shape, sequences, poison=poison), "bf16") == want
