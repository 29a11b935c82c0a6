"""A row's bits depend on its query and its pages only: nothing else in the batch may show."""

import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kvcore import kernels
from support.batches import Batch, Sequence, Shape, bits_of, decode_of

FORMATS = ["bf16", "f16", "f32"]
SHAPE = Shape(9, 3, 64, 64, 64, "bf16", num_layers=1)
LENGTHS = [1, 15, 64, 65, 200, 1023, 1024, 1025, 1500, 2100]


def shape_of(fmt: str) -> Shape:
    return Shape(9, 3, 64, 64, 64, fmt, num_layers=1)


def bits(
    batch: Batch, index: int | None = None, threads: kernels.ThreadPool | None = None
) -> bytes:
    """Bits of out and lse of one sequence, or of all."""
    out, lse = batch.attend(0, "bf16", threads)
    rows = slice(None) if index is None else batch.rows_of(index)
    return bits_of(out[rows]).tobytes() + bits_of(lse[rows]).tobytes()


@pytest.mark.parametrize("fmt", FORMATS)
def test_physical_pages_may_be_permuted(fmt: str, isa: str) -> None:
    sequences = [Sequence(i, n, 1 + n % 3) for i, n in enumerate(LENGTHS)]
    first = bits(Batch(shape_of(fmt), sequences, page_order=1))
    assert first == bits(Batch(shape_of(fmt), sequences, page_order=2))


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_sequence_alone_equals_the_same_in_a_batch(fmt: str, isa: str) -> None:
    sequences = [Sequence(i, n, 1 + (7 * i) % 5) for i, n in enumerate(LENGTHS)]
    together = Batch(shape_of(fmt), sequences)
    for index, sequence in enumerate(sequences):
        assert bits(Batch(shape_of(fmt), [sequence])) == bits(together, index), sequence


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_a_prefill_row_equals_the_decode_row(fmt: str, dtype: str, isa: str) -> None:
    chunk = Sequence(5, 1100, 150)
    out, lse = Batch(shape_of(fmt), [chunk]).attend(0, dtype)
    positions = [950, 959, 960, 961, 1000, 1022, 1023, 1024, 1025, 1099]
    rows = Batch(shape_of(fmt), [decode_of(chunk, p) for p in positions]).attend(0, dtype)
    picked = [p - 950 for p in positions]
    assert np.array_equal(bits_of(out[picked]), bits_of(rows[0]))
    assert np.array_equal(bits_of(lse[picked]), bits_of(rows[1]))


@pytest.mark.parametrize("fmt", FORMATS)
def test_threads_do_not_show(fmt: str, isa: str) -> None:
    sequences = [Sequence(0, 2500, 1), Sequence(1, 70, 3), Sequence(2, 1300, 40)]
    batch = Batch(shape_of(fmt), sequences)
    assert bits(batch, threads=kernels.ThreadPool(1)) == bits(batch, threads=kernels.ThreadPool(2))
    assert bits(batch, threads=kernels.ThreadPool(3)) == bits(batch)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    context=st.integers(1, 400),
    cuts=st.lists(st.integers(1, 399), max_size=4),
    page=st.sampled_from([16, 64]),
    fmt=st.sampled_from(FORMATS),
)
def test_chunks_may_be_cut_anywhere(
    context: int, cuts: list[int], page: int, fmt: str, isa: str
) -> None:
    shape = Shape(4, 2, 32, 64, page, fmt, num_layers=1)
    whole, whole_lse = Batch(shape, [Sequence(9, context, context)]).attend()
    edges = sorted({0, context, *(c for c in cuts if c < context)})
    for first, last in itertools.pairwise(edges):
        out, lse = Batch(shape, [Sequence(9, last, last - first)]).attend()
        assert np.array_equal(bits_of(out), bits_of(whole[first:last]))
        assert np.array_equal(bits_of(lse), bits_of(whole_lse[first:last]))


@pytest.mark.parametrize("fmt", FORMATS)
def test_page_size_and_layout_do_not_show(fmt: str, isa: str) -> None:
    sequences = [Sequence(0, 130, 3), Sequence(1, 1040, 2), Sequence(2, 33, 33)]
    results = {
        bits(Batch(Shape(4, 2, 64, 80, page, fmt, layout, num_layers=1), sequences))
        for page in (16, 32, 64, 128)
        for layout in ("packed", "canonical")
    }
    assert len(results) == 1


@pytest.mark.parametrize("heads", [(1, 1), (4, 2), (7, 1), (12, 2), (71, 1)])
def test_heads_do_not_show_each_other(heads: tuple[int, int], isa: str) -> None:
    """The same queries in another order of the group give the same rows."""
    shape = Shape(*heads, 64, 64, 16, "bf16", num_layers=1)
    batch = Batch(shape, [Sequence(4, 37, 3)])
    out, lse = batch.attend()
    group = heads[0] // heads[1]
    order = np.concatenate([np.arange(group)[::-1] + h * group for h in range(heads[1])])
    plain = batch.q
    batch.q = lambda layer, dtype: plain(layer, dtype)[:, order]  # type: ignore[method-assign]
    swapped, swapped_lse = batch.attend()
    assert np.array_equal(bits_of(swapped), bits_of(out[:, order]))
    assert np.array_equal(bits_of(swapped_lse), bits_of(lse[:, order]))


def test_a_plan_can_be_prepared_again(isa: str) -> None:
    """Growing, shrinking and growing: stale state of an earlier batch never shows."""
    shape = shape_of("bf16")
    large = Batch(shape, [Sequence(i, 300 + 50 * i, 3) for i in range(6)])
    plan = large.plan()
    want = bits(large, 1)
    small_tables = (np.array([0, 3], np.int32), large.context_lens[1:2], large.block_table[1:2])
    from support.batches import to_torch

    q = to_torch(large.q(0, "bf16"), "bf16")
    import torch

    for _ in range(2):
        plan.prepare(large.cu_seqlens_q, large.context_lens, large.block_table)
        out, lse = torch.empty(18, 9, 64, dtype=torch.bfloat16), torch.empty(18, 9)
        plan.attend(0, q, out, lse)
        assert bits_of(out[3:6]).tobytes() + bits_of(lse[3:6]).tobytes() == want
        plan.prepare(*small_tables)
        out, lse = torch.empty(3, 9, 64, dtype=torch.bfloat16), torch.empty(3, 9)
        plan.attend(0, q[3:6].contiguous(), out, lse)
        assert bits_of(out).tobytes() + bits_of(lse).tobytes() == want
