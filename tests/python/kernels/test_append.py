"""Appending tokens: exactly the right bytes change, in every format, layout and dtype of rows."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kvcore import kernels
from kvcore import reference as ref
from kvcore.errors import InvalidArgument
from support.batches import Batch, Sequence, Shape, to_torch
from support.table import PAGE_SIZES

FORMATS = ["bf16", "f16", "f32"]


def payload(batch: Batch) -> np.ndarray:
    """The arena without slice headers (appending writes those of the slices it opens)."""
    arena = batch.arena.copy()
    for page in range(batch.pool.num_pages):
        for layer in range(batch.shape.num_layers):
            at = batch.geometry.slice_offset(page, layer)
            arena[at : at + 64] = 0
    return arena


def slots(batch: Batch) -> np.ndarray:
    return ref.slots_of(batch.geometry, batch.cu_seqlens_q, batch.context_lens, batch.block_table)


@pytest.mark.parametrize("layout", ["packed", "canonical"])
@pytest.mark.parametrize("page", PAGE_SIZES)
@pytest.mark.parametrize("fmt", FORMATS)
def test_append_writes_the_oracles_bytes(fmt: str, page: int, layout: str, isa: str) -> None:
    shape = Shape(4, 2, 48, 80, page, fmt, layout)
    sequences = [Sequence(1, 1, 1), Sequence(2, page + 3, 5), Sequence(3, 3 * page, 2 * page + 1)]
    batch = Batch(shape, [*sequences, Sequence(4, 7, 0)], fill=False)
    want = payload(batch)
    k, v = batch.new_kv(1)
    ref.append_by_slots(want, batch.geometry, 1, k, v, slots(batch))
    batch.plan().append(1, to_torch(k, fmt), to_torch(v, fmt))
    assert np.array_equal(payload(batch), want)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_rows_of_another_dtype_are_rounded_to_nearest_even(fmt: str, dtype: str, isa: str) -> None:
    shape = Shape(2, 1, 16, 16, 16, fmt)
    batch = Batch(shape, [Sequence(1, 20, 20)], fill=False)
    rng = np.random.default_rng(3)
    numbers = rng.standard_normal((2, 20, 1, 16)) * 10.0 ** rng.integers(-4, 4, (2, 20, 1, 16))
    rows = ref.encode(numbers, dtype)
    want = payload(batch)
    stored = ref.encode(ref.decode(rows, dtype), fmt)
    ref.append_by_slots(want, batch.geometry, 0, stored[0], stored[1], slots(batch))
    batch.plan().append(0, to_torch(rows[0], dtype), to_torch(rows[1], dtype))
    assert np.array_equal(payload(batch), want)


def test_rows_may_be_strided(isa: str) -> None:
    """K and V are usually views into one fused projection."""
    shape = Shape(4, 2, 64, 64, 64, "bf16")
    batch = Batch(shape, [Sequence(1, 70, 70)], fill=False)
    k, v = batch.new_kv(0)
    fused = torch.cat([to_torch(k, "bf16"), to_torch(v, "bf16"), to_torch(v, "bf16")], dim=1)
    want = payload(batch)
    ref.append_by_slots(want, batch.geometry, 0, k, v, slots(batch))
    batch.plan().append(0, fused[:, :2], fused[:, 2:4])
    assert np.array_equal(payload(batch), want)


def test_headers_name_slice_and_tokens(isa: str) -> None:
    shape = Shape(4, 2, 64, 64, 16, "f32", extent_pages=2)
    batch = Batch(shape, [Sequence(1, 35, 35)], fill=False)
    k, v = batch.new_kv(1)
    batch.plan().append(1, to_torch(k, "f32"), to_torch(v, "f32"))
    for index in range(3):
        at = batch.geometry.slice_offset(int(batch.block_table[0, index]), 1)
        header = batch.arena[at : at + 64]
        assert header[:4].tobytes() == b"KVC1"
        assert header[8:10].view(np.uint16)[0] == 1  # layer
        assert (int(header[12]), int(header[13])) == (0, 1)  # f32, packed
    untouched = batch.geometry.slice_offset(int(batch.block_table[0, 0]), 0)
    assert not batch.arena[untouched : untouched + 64].any()


def test_tokens_without_a_position_are_refused(isa: str) -> None:
    """More new tokens than context may attend (and see nothing), but have no place to be stored."""
    shape = Shape(4, 2, 32, 16, 16, "f32")
    batch = Batch(shape, [Sequence(2, 17, 1), Sequence(1, 3, 5)], fill=False)
    before = batch.arena.copy()
    k, v = np.ones((6, 2, 32), np.float32), np.ones((6, 2, 16), np.float32)
    with pytest.raises(InvalidArgument, match="sequence 1 has q_len=5 > context_lens=3"):
        batch.plan().append(1, k, v)
    assert np.array_equal(batch.arena, before)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    slots=st.lists(
        st.integers(-1, 4 * 16 - 1),
        min_size=1,
        max_size=40,
        unique_by=lambda s: s if s >= 0 else object(),
    ),
    fmt=st.sampled_from(FORMATS),
    layer=st.integers(0, 1),
)
def test_append_by_slot_mapping(slots: list[int], fmt: str, layer: int, isa: str) -> None:
    shape = Shape(4, 2, 32, 16, 16, fmt, extent_pages=2)
    batch = Batch(shape, [Sequence(1, 64, 1)], fill=False)
    mapping = np.array(slots, np.int64)
    rng = np.random.default_rng(1)
    k = ref.encode(rng.standard_normal((len(slots), 2, 32)), fmt)
    v = ref.encode(rng.standard_normal((len(slots), 2, 16)), fmt)
    want = payload(batch)
    ref.append_by_slots(want, batch.geometry, layer, k, v, mapping)
    kernels.append_kv(batch.pool, layer, to_torch(k, fmt), to_torch(v, fmt), mapping)
    assert np.array_equal(payload(batch), want)


@pytest.mark.parametrize("fmt", FORMATS)
def test_appending_in_chunks_gives_the_same_bytes_and_rows(fmt: str, isa: str) -> None:
    """Append and attend step by step, as generation does, equal to everything at once."""
    shape = Shape(4, 2, 64, 64, 16, fmt, num_layers=1)
    whole = Batch(shape, [Sequence(6, 40, 40)])
    want = whole.attend()[0]
    grown = Batch(shape, [Sequence(6, 40, 40)], fill=False)
    k, v = whole.new_kv(0)
    q = to_torch(whole.q(0, "bf16"), "bf16")
    plan = kernels.AttentionPlan(grown.pool, 4, scale=shape.scale)
    for first, last in [(0, 17), (17, 18), (18, 32), (32, 33), (33, 40)]:
        plan.prepare(
            np.array([0, last - first], np.int32), np.array([last], np.int32), grown.block_table
        )
        plan.append(0, to_torch(k[first:last], fmt), to_torch(v[first:last], fmt))
        out = torch.empty(last - first, 4, 64, dtype=torch.bfloat16)
        plan.attend(0, q[first:last].contiguous(), out)
        assert torch.equal(out, want[first:last])
    assert np.array_equal(payload(grown), payload(whole))
