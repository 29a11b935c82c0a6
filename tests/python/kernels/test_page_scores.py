"""Attention mass per page against the float64 oracle, and its bits."""

import numpy as np
import pytest
import torch
from kvcore import kernels
from kvcore import reference as ref
from kvcore.errors import InvalidArgument
from support.batches import Batch, Sequence, Shape, to_torch

FORMATS = ["bf16", "f16", "f32"]
LENGTHS = [1, 15, 16, 17, 64, 65, 130, 1024, 1030, 2100]
SEQUENCES = [Sequence(i, n, 1) for i, n in enumerate(LENGTHS)]


def scores(batch: Batch, threads: int = 1, lse: bool = True) -> np.ndarray:
    """[num_seqs, max_pages] of layer 0."""
    q = to_torch(batch.q(0, "bf16"), "bf16")
    plan = batch.plan(kernels.ThreadPool(threads))
    shape = batch.shape
    out = torch.empty(batch.num_rows, shape.num_q_heads, shape.head_dim_v, dtype=torch.bfloat16)
    found = torch.full((plan.num_seqs, plan.max_pages), float("nan"))
    plan.attend(0, q, out, torch.empty(out.shape[:2]) if lse else None, found)
    want_out, _ = batch.attend()
    assert torch.equal(out.view(torch.int16), want_out.view(torch.int16))  # asking changes no bit
    return found.numpy()


def expected(batch: Batch) -> np.ndarray:
    """The same in float64: every token's value is its page, one-hot."""
    shape, size = batch.shape, batch.shape.page_size
    want = np.zeros((len(batch.sequences), batch.block_table.shape[1]))
    for row, seq in enumerate(batch.sequences):
        if seq.q_len != 1 or seq.context_len == 0:
            continue
        pages = -(-seq.context_len // size)
        k, _ = ref.gather(batch.arena, batch.geometry, 0, batch.block_table[row], seq.context_len)
        page_of = np.arange(seq.context_len) // size
        v = np.repeat(np.eye(pages)[page_of][:, None], shape.num_kv_heads, axis=1)
        q = ref.decode(batch.q(0, "bf16")[batch.rows_of(row)], "bf16")
        mass = ref.attention(
            q, k, v, np.array([seq.context_len - 1]), shape.scale,
            window=shape.window, soft_cap=shape.soft_cap,
        ).out  # fmt: skip
        want[row, :pages] = mass[0].sum(axis=0)
    return want


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("page", [16, 32, 64, 128])
def test_masses(page: int, fmt: str, isa: str) -> None:
    for heads in ((9, 3), (20, 1)):
        batch = Batch(Shape(*heads, 64, 64, page, fmt, num_layers=1), SEQUENCES)
        found, want = scores(batch), expected(batch)
        np.testing.assert_allclose(found, want, rtol=2e-5, atol=1e-6)
        np.testing.assert_allclose(found.sum(axis=1), heads[0], rtol=1e-5)
        assert (found[want == 0] == 0).all()


@pytest.mark.parametrize("layout", ["packed", "canonical"])
def test_windows_and_soft_caps(layout: str, isa: str) -> None:
    for window in (1, 40, 1100):
        shape = Shape(6, 2, 64, 64, 16, "bf16", layout, 1, window=window, soft_cap=3.0)
        batch = Batch(shape, SEQUENCES)
        np.testing.assert_allclose(scores(batch), expected(batch), rtol=2e-5, atol=1e-6)


def test_only_sequences_that_decode_one_token_have_scores(isa: str) -> None:
    sequences = [Sequence(0, 40, 3), Sequence(1, 70, 1), Sequence(2, 0, 0), Sequence(3, 0, 1)]
    batch = Batch(Shape(6, 2, page_size=16, num_layers=1), sequences)
    found = scores(batch)
    assert (found[[0, 2, 3]] == 0).all()
    np.testing.assert_allclose(found, expected(batch), rtol=2e-5, atol=1e-6)


def test_batch_threads_and_lse_change_no_bit(isa: str) -> None:
    shape = Shape(6, 2, 64, 64, 64, "bf16", num_layers=1)
    batch = Batch(shape, SEQUENCES)
    want = scores(batch)
    assert np.array_equal(scores(batch, threads=3), want)
    assert np.array_equal(scores(batch, lse=False), want)
    for row in (3, 7, 9):
        alone = scores(Batch(shape, [SEQUENCES[row]], spare_columns=0), threads=3)
        assert np.array_equal(alone[0], want[row, : alone.shape[1]])


def test_shared_prefixes(isa: str) -> None:
    """Sequences over the same pages, computed together and alone."""
    shape = Shape(6, 2, 64, 64, 64, "bf16", num_layers=1)
    batch = Batch(shape, [Sequence(1, 2100, 1), Sequence(1, 1500, 1), Sequence(1, 2090, 1)])
    batch.block_table[1:] = batch.block_table[0]
    found = scores(batch)
    np.testing.assert_allclose(found, expected(batch), rtol=2e-5, atol=1e-6)
    for row, sequence in enumerate(batch.sequences):
        alone = scores(Batch(shape, [sequence]))
        count = -(-sequence.context_len // 64)
        assert np.array_equal(alone[0, :count], found[row, :count])


def test_shapes_are_checked() -> None:
    batch = Batch(Shape(4, 2, num_layers=1), [Sequence(1, 70, 1)])
    plan, q = batch.plan(), torch.zeros(1, 4, 64)
    for wrong in (
        torch.zeros(1, 1),
        torch.zeros(1, 8)[:, ::2],
        torch.zeros(1, 4, dtype=torch.float64),
    ):
        with pytest.raises(InvalidArgument, match="page_scores"):
            plan.attend(0, q, torch.empty(1, 4, 64), None, wrong)
