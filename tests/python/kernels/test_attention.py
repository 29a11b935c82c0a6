"""Attention over pages against the float64 oracle, at every ISA level."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.batches import Batch, Sequence, Shape, bits_of
from support.bounds import excess
from support.table import (
    DTYPES,
    FORMATS,
    HEADS,
    PAGE_SIZES,
    long_lengths,
    name_of,
    shapes,
    short_lengths,
)


def check(batch: Batch, layer: int, dtype: str) -> dict[str, float]:
    """Compare with the oracle; returns how much of each bound was used."""
    out, lse = batch.attend(layer, dtype)
    shape = batch.shape
    used = excess(
        out,
        lse,
        batch.expected(layer, dtype),
        fmt=shape.fmt,
        dtype=dtype,
        head_dim=shape.head_dim_k,
        tokens=int(batch.context_lens.max(initial=0)),
    )
    assert max(used.values()) <= 1, (used, name_of(shape), dtype)
    return used


@pytest.mark.parametrize("shape", shapes(), ids=name_of)
def test_lengths_around_page_boundaries(shape: Shape, isa: str) -> None:
    index = shapes().index(shape)
    batch = Batch(shape, short_lengths(shape.page_size))
    check(batch, index % 2, DTYPES[index % 3])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fmt", FORMATS)
def test_every_dtype_of_queries_over_every_format(fmt: str, dtype: str, isa: str) -> None:
    check(Batch(Shape(6, 2, 64, 80, 32, fmt), short_lengths(32)[:9]), 1, dtype)


@pytest.mark.parametrize("fmt", FORMATS)
def test_contexts_of_several_segments(fmt: str, isa: str) -> None:
    check(Batch(Shape(6, 2, 64, 64, 64, fmt, num_layers=1), long_lengths()), 0, "bf16")


def test_chunk_whose_rows_end_in_different_segments(isa: str) -> None:
    batch = Batch(Shape(4, 2, 64, 64, 64, "bf16", num_layers=1), [Sequence(7, 1100, 200)])
    check(batch, 0, "bf16")


def test_a_batch_without_rows(isa: str) -> None:
    batch = Batch(Shape(4, 2), [Sequence(1, 10, 0), Sequence(2, 0, 0)])
    out, lse = batch.attend()
    assert out.shape == (0, 4, 64) and lse.shape == (0, 4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("magnitude", [0.0, 1e-30, 30.0])
def test_extreme_queries(magnitude: float, dtype: str, isa: str) -> None:
    """All scores equal, denormal products, and weights that underflow: no NaN, still in bounds."""
    shape = Shape(4, 2, 64, 64, 64, "f32", num_layers=1)
    batch = Batch(shape, [Sequence(1, 200, 2), Sequence(2, 1, 1)])
    plain = batch.q

    def scaled(layer: int, kind: str) -> np.ndarray:
        from kvcore import reference as ref

        return ref.encode(magnitude * ref.decode(plain(layer, kind), kind), kind)

    batch.q = scaled  # type: ignore[method-assign]
    check(batch, 0, dtype)


@st.composite
def batches(draw: st.DrawFn) -> tuple[Shape, list[Sequence], int]:
    """A shape, sequences with chunks anywhere in their context, an order of pages."""
    q_heads, kv_heads = draw(st.sampled_from([h for h in HEADS if h[0] <= 28]))
    dims = st.sampled_from([16, 32, 64, 80, 96, 112, 128])
    shape = Shape(
        q_heads,
        kv_heads,
        draw(dims),
        draw(dims),
        draw(st.sampled_from(PAGE_SIZES)),
        draw(st.sampled_from(FORMATS)),
        draw(st.sampled_from(["packed", "canonical"])),
        num_layers=draw(st.integers(1, 3)),
        extent_pages=draw(st.sampled_from([0, 1, 2, 4])),
    )
    lengths = st.tuples(st.integers(0, 300), st.integers(0, 12))
    pairs = draw(st.lists(lengths, min_size=1, max_size=4))
    return shape, [Sequence(i, c, q) for i, (c, q) in enumerate(pairs)], draw(st.integers(0, 99))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(case=batches(), dtype=st.sampled_from(DTYPES))
def test_random_batches(case: tuple[Shape, list[Sequence], int], dtype: str, isa: str) -> None:
    shape, sequences, order = case
    check(Batch(shape, sequences, page_order=order), shape.num_layers - 1, dtype)


@pytest.mark.parametrize("shift", [1, -1])
@pytest.mark.parametrize("length", [5, 65, 300, 2049])
def test_the_bounds_notice_one_wrongly_masked_token(length: int, shift: int, isa: str) -> None:
    """A mutant: the oracle masks one token too few or too many. The kernel must look wrong."""
    shape = Shape(4, 2, 64, 64, 64, "bf16", num_layers=1)
    batch = Batch(shape, [Sequence(3, length, 2)])
    out, lse = batch.attend()
    wrong = batch.expected(shift=shift)
    used = excess(out[:1], lse[:1], type(wrong)(*(x[:1] for x in wrong)),
                  fmt="bf16", dtype="bf16", head_dim=64, tokens=length)  # fmt: skip
    assert used["lse"] > 1, used
    assert used["typical"] > 1 or length > 1000, used


def test_the_bounds_notice_a_swapped_head(isa: str) -> None:
    batch = Batch(Shape(8, 2, 64, 64, 64, "bf16", num_layers=1), [Sequence(3, 100, 1)])
    out, lse = batch.attend()
    order = [4, 1, 2, 3, 0, 5, 6, 7]
    used = excess(out[:, order], lse[:, order], batch.expected(),
                  fmt="bf16", dtype="bf16", head_dim=64, tokens=100)  # fmt: skip
    assert used["worst"] > 1 and used["lse"] > 1


def test_repeated_runs_are_equal() -> None:
    """Repeated runs are equal bit for bit."""
    batch = Batch(Shape(6, 2, 80, 80, 32, "f32"), short_lengths(32))
    first, again = batch.attend(0, "f32"), batch.attend(0, "f32")
    assert np.array_equal(bits_of(first[0]), bits_of(again[0]))
    assert np.array_equal(bits_of(first[1]), bits_of(again[1]))
