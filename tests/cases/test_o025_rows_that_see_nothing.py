"""O25 (flashinfer#4452, #4484): rows masked entirely returned a finite LSE."""

import torch
from kvcore import kernels
from support.batches import Batch, Sequence, Shape, bits_of
from support.bounds import excess

SHAPE = Shape(4, 2, 64, 64, 16, "bf16", num_layers=1)


def test_more_queries_than_tokens(isa: str) -> None:
    batch = Batch(SHAPE, [Sequence(1, 5, 8), Sequence(2, 0, 3), Sequence(3, 40, 2)])
    out, lse = batch.attend()
    empty = [0, 1, 2, 8, 9, 10]
    assert (bits_of(out[empty]) == 0).all()
    assert torch.isneginf(lse[empty]).all()
    others = [3, 4, 5, 6, 7, 11, 12]
    assert torch.isfinite(lse[others]).all()
    used = excess(out, lse, batch.expected(), fmt="bf16", dtype="bf16", head_dim=64, tokens=40)
    assert max(used.values()) <= 1, used


def test_merging_with_rows_that_saw_nothing_changes_no_bit(isa: str) -> None:
    shape = Shape(4, 2, 64, 64, 16, "f32", num_layers=1)
    some, some_lse = Batch(shape, [Sequence(1, 30, 3)]).attend(0, "f32")
    none, none_lse = Batch(shape, [Sequence(2, 0, 3)]).attend(0, "f32")
    for pair in ((some, some_lse, none, none_lse), (none, none_lse, some, some_lse)):
        out, lse = torch.empty_like(some), torch.empty_like(some_lse)
        kernels.merge_states(*pair, out, lse)
        assert torch.equal(bits(out), bits(some)) and torch.equal(bits(lse), bits(some_lse))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int32)


def test_window_that_excludes_all(isa: str) -> None:
    """Rows before the sequence's first token, and rows whose window holds only themselves."""
    shape = Shape(4, 2, 64, 64, 16, "bf16", num_layers=1, window=1)
    batch = Batch(shape, [Sequence(1, 5, 8), Sequence(2, 0, 3), Sequence(3, 40, 2)])
    batch.free_unseen()
    out, lse = batch.attend()
    empty = [0, 1, 2, 8, 9, 10]
    assert (bits_of(out[empty]) == 0).all()
    assert torch.isneginf(lse[empty]).all()
    used = excess(out, lse, batch.expected(), fmt="bf16", dtype="bf16", head_dim=64, tokens=40)
    assert max(used.values()) <= 1, used
