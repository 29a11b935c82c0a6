"""Sliding windows and soft caps against the float64 oracle, with the pages left behind freed."""

import dataclasses

import numpy as np
import pytest
import torch
from kvcore import kernels
from kvcore.errors import InvalidArgument
from support.batches import Batch, Sequence, Shape, bits_of, decode_of, to_torch
from support.bounds import excess

FORMATS = ["bf16", "f16", "f32"]
WINDOWS = [1, 15, 16, 17, 100, 1024, 1500]
SEQUENCES = [
    Sequence(0, 1, 1), Sequence(1, 17, 1), Sequence(2, 40, 40), Sequence(3, 1100, 3),
    Sequence(4, 1700, 1), Sequence(5, 5, 8), Sequence(6, 0, 2), Sequence(7, 2100, 70),
]  # fmt: skip


def check(batch: Batch, dtype: str, threads: kernels.ThreadPool | None = None) -> None:
    shape = batch.shape
    out, lse = batch.attend(0, dtype, threads)
    used = excess(
        out, lse, batch.expected(0, dtype), fmt=shape.fmt, dtype=dtype, head_dim=shape.head_dim_k,
        tokens=int(batch.context_lens.max()), soft_cap=shape.soft_cap,
    )  # fmt: skip
    assert max(used.values()) <= 1, (used, shape)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("page", [16, 32, 64, 128])
def test_windows(page: int, window: int, isa: str) -> None:
    index = WINDOWS.index(window) + page // 16
    fmt = FORMATS[index % 3]
    layout = "packed" if index % 2 else "canonical"
    shape = Shape(4, 2, 64, 80, page, fmt, layout, num_layers=1, window=window)
    batch = Batch(shape, SEQUENCES)
    batch.free_unseen()
    check(batch, FORMATS[index // 3 % 3])
    check(batch, "f32", kernels.ThreadPool(3))


@pytest.mark.parametrize("cap", [0.5, 5.0, 50.0])
@pytest.mark.parametrize("fmt", FORMATS)
def test_soft_caps(fmt: str, cap: float, isa: str) -> None:
    for window in (0, 100):
        shape = Shape(6, 2, 64, 64, 64, fmt, num_layers=1, window=window, soft_cap=cap)
        check(Batch(shape, SEQUENCES), fmt)


def test_large_scores_saturate_the_cap(isa: str) -> None:
    """All scores are +c or -c, whatever float32 makes of 2^(2 s / c)."""
    shape = Shape(2, 1, 64, 64, 64, "f32", num_layers=1, soft_cap=0.01)
    batch = Batch(shape, [Sequence(1, 100, 5)])
    _, lse = batch.attend(0, "f32")
    assert torch.isfinite(lse).all()
    check(batch, "f32")


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("window", [16, 77, 1100])
def test_freed_pages_do_not_show(fmt: str, window: int, isa: str) -> None:
    shape = Shape(6, 2, 64, 64, 16, fmt, num_layers=1, window=window)
    held, freed = Batch(shape, SEQUENCES, poison="zero"), Batch(shape, SEQUENCES)
    freed.free_unseen()
    assert (freed.block_table[:, 0] == -1).any()
    for want, got in zip(held.attend(), freed.attend(), strict=True):
        assert np.array_equal(bits_of(want), bits_of(got))


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_prefill_row_equals_the_decode_row(fmt: str, isa: str) -> None:
    shape = Shape(9, 3, 64, 64, 64, fmt, num_layers=1, window=200)
    chunk = Sequence(5, 1300, 350)
    out, lse = Batch(shape, [chunk]).attend()
    positions = [950, 960, 1022, 1023, 1024, 1025, 1150, 1222, 1223, 1224, 1299]
    rows = Batch(shape, [decode_of(chunk, p) for p in positions])
    rows.free_unseen()
    alone, alone_lse = rows.attend()
    picked = [p - 950 for p in positions]
    assert np.array_equal(bits_of(out[picked]), bits_of(alone))
    assert np.array_equal(bits_of(lse[picked]), bits_of(alone_lse))


@pytest.mark.parametrize("fmt", FORMATS)
def test_page_size_and_layout_do_not_show(fmt: str, isa: str) -> None:
    results = set()
    for page in (16, 32, 64, 128):
        for layout in ("packed", "canonical"):
            shape = Shape(4, 2, 64, 80, page, fmt, layout, num_layers=1, window=90)
            batch = Batch(shape, SEQUENCES)
            batch.free_unseen()
            results.add(b"".join(bits_of(x).tobytes() for x in batch.attend()))
    assert len(results) == 1


def test_a_token_outside_the_window_is_noticed(isa: str) -> None:
    """The bounds are tight enough: a window longer by one token breaks them."""
    batch = Batch(Shape(4, 2, num_layers=1, window=33), [Sequence(1, 90, 40)])
    out, lse = batch.attend()
    batch.shape = dataclasses.replace(batch.shape, window=34)
    used = excess(
        out, lse, batch.expected(), fmt="bf16", dtype="bf16", head_dim=64, tokens=90
    )  # fmt: skip
    assert max(used.values()) > 1


def test_one_window_for_each_layer(isa: str) -> None:
    shape = Shape(4, 2, 64, 64, 16)
    batch = Batch(shape, SEQUENCES)
    plan = kernels.AttentionPlan(batch.pool, 4, scale=shape.scale, window=[0, 50])
    plan.prepare(batch.cu_seqlens_q, batch.context_lens, batch.block_table)
    for layer, window in ((0, 0), (1, 50)):
        batch.shape = dataclasses.replace(shape, window=window)
        q = to_torch(batch.q(layer, "bf16"), "bf16")
        out, lse = torch.empty(q.shape, dtype=torch.bfloat16), torch.empty(q.shape[:2])
        plan.attend(layer, q, out, lse)
        for want, got in zip(batch.attend(layer), (out, lse), strict=True):
            assert np.array_equal(bits_of(want), bits_of(got))


def test_pages_are_wanted_where_some_layer_sees_them(isa: str) -> None:
    batch = Batch(Shape(4, 2, page_size=16, window=50), [Sequence(0, 200, 1)])
    batch.free_unseen()
    arguments = (batch.cu_seqlens_q, batch.context_lens, batch.block_table)
    kernels.AttentionPlan(batch.pool, 4, window=[50, 40]).prepare(*arguments)
    for window in ([50, 0], 200, 60):
        plan = kernels.AttentionPlan(batch.pool, 4, window=window)
        with pytest.raises(InvalidArgument, match=r"block_table\[0, \d\]=-1"):
            plan.prepare(*arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": -1}, "window=-1"),
        ({"window": [1, 2, 3]}, "windows has 3 entries"),
        ({"soft_cap": -1.0}, "soft_cap=-1"),
        ({"soft_cap": float("nan")}, "soft_cap=-?nan"),
    ],
)
def test_options_out_of_range(options: dict[str, object], message: str) -> None:
    batch = Batch(Shape(4, 2), [Sequence(0, 5, 1)])
    with pytest.raises(InvalidArgument, match=message):
        kernels.AttentionPlan(batch.pool, 4, **options)  # type: ignore[arg-type]
