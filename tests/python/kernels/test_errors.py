"""Bad input is refused before a byte moves, by a message with field, value and what is allowed."""

import numpy as np
import pytest
import torch
from kvcore import kernels
from kvcore.errors import InvalidArgument
from support.batches import Batch, Sequence, Shape

SHAPE = Shape(4, 2, 32, 16, 16, "bf16")


@pytest.fixture
def batch() -> Batch:
    return Batch(SHAPE, [Sequence(1, 20, 2), Sequence(2, 5, 1)])


def int32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


@pytest.mark.parametrize(
    ("heads", "scale", "message"),
    [
        (0, None, "num_q_heads=0"),
        (-4, None, "num_q_heads=-4"),
        (3, None, "num_q_heads=3.*multiple"),
        (4, -1.0, "scale=-1"),
        (4, float("nan"), "scale=nan"),
        (4, 0.0, "scale=0"),
    ],
)
def test_plans(batch: Batch, heads: int, scale: float | None, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        kernels.AttentionPlan(batch.pool, heads, scale=scale)


@pytest.mark.parametrize(
    ("cu", "context", "message"),
    [
        (int32(1, 2, 3), int32(20, 5), "cu_seqlens_q"),
        (int32(0, 3, 2), int32(20, 5), "cu_seqlens_q"),
        (int32(0, 1), int32(20, 5), "cu_seqlens_q has 2 entries: expected num_seqs"),
        (int32(0, 2, 3), int32(20, -1), "context_lens.*-1"),
        (int32(0, 2, 3), int32(20, 10_000), "context_lens.*10000"),
        (np.array([0, 2, 3]), int32(20, 5), "cu_seqlens_q has dtype int64: expected int32"),
        (int32(0, 2, 3), np.array([20.0, 5.0]), "context_lens has dtype float64: expected int32"),
    ],
)  # fmt: skip
def test_batches(batch: Batch, cu: np.ndarray, context: np.ndarray, message: str) -> None:
    plan = kernels.AttentionPlan(batch.pool, 4)
    with pytest.raises(InvalidArgument, match=message):
        plan.prepare(cu, context, batch.block_table)


def test_block_tables(batch: Batch) -> None:
    plan = kernels.AttentionPlan(batch.pool, 4)
    with pytest.raises(InvalidArgument, match="block_table has 1 rows: expected num_seqs = 2"):
        plan.prepare(batch.cu_seqlens_q, batch.context_lens, batch.block_table[:1])
    with pytest.raises(InvalidArgument, match="block_table has 1 dimensions: expected 2"):
        plan.prepare(batch.cu_seqlens_q, batch.context_lens, batch.block_table[0])
    with pytest.raises(InvalidArgument, match=r"block_table.*-1"):
        plan.prepare(int32(0, 1), int32(64), batch.block_table[:1])


@pytest.mark.parametrize(
    ("q", "out", "lse", "message"),
    [
        ((2, 4, 32), (3, 4, 16), (3, 4), r"q has shape \[2, 4, 32\]: expected \[3, 4, 32\]"),
        ((3, 4, 16), (3, 4, 16), (3, 4), r"q has shape \[3, 4, 16\]"),
        ((3, 4, 32), (3, 4, 32), (3, 4), r"out has shape \[3, 4, 32\]: expected \[3, 4, 16\]"),
        ((3, 4, 32), (3, 4, 16), (3, 3), r"lse is float32 \[3, 3\]"),
    ],
)
def test_tensors(
    batch: Batch, q: tuple[int, ...], out: tuple[int, ...], lse: tuple[int, ...], message: str
) -> None:
    plan = batch.plan()
    with pytest.raises(InvalidArgument, match=message):
        plan.attend(0, torch.ones(q), torch.ones(out), torch.ones(lse))


def test_dtypes_and_layers(batch: Batch) -> None:
    plan = batch.plan()
    q, out = torch.ones(3, 4, 32), torch.ones(3, 4, 16)
    with pytest.raises(InvalidArgument, match="q has dtype float64"):
        plan.attend(0, q.double(), out)
    with pytest.raises(InvalidArgument, match="q is float32 and out is bfloat16"):
        plan.attend(0, q, out.bfloat16())
    for layer in (-1, 2):
        with pytest.raises(InvalidArgument, match=f"layer={layer}.*1"):
            plan.attend(layer, q, out)
        with pytest.raises(InvalidArgument, match=f"layer={layer}.*1"):
            plan.append(layer, torch.ones(3, 2, 32), torch.ones(3, 2, 16))
    with pytest.raises(InvalidArgument, match="contiguous"):
        plan.attend(0, torch.ones(3, 32, 4).transpose(1, 2), out)
    with pytest.raises(InvalidArgument, match="q is a list"):
        plan.attend(0, [1.0], out)


def test_a_refused_call_changes_nothing(batch: Batch) -> None:
    plan, before = batch.plan(), batch.arena.copy()
    k, v = torch.ones(3, 2, 32), torch.ones(3, 2, 16)
    for arguments in ((5, k, v), (0, k[:2], v), (0, k, v[:, :1]), (0, k, v.half())):
        with pytest.raises(InvalidArgument):
            plan.append(*arguments)
    slots = np.array([0, 1, 10_000], np.int64)
    with pytest.raises(InvalidArgument, match=r"slot_mapping\[2\]=10000"):
        kernels.append_kv(batch.pool, 0, k, v, slots)
    assert np.array_equal(batch.arena, before)


@pytest.mark.parametrize("name", ["", "AVX2", "sse", "avx1024"])
def test_unknown_isa(name: str) -> None:
    before = kernels.isa()
    with pytest.raises(InvalidArgument, match="scalar"):
        kernels.set_isa(name)
    assert kernels.isa() == before


def test_merge(batch: Batch) -> None:
    a, lse = torch.ones(2, 3, 16), torch.ones(2, 3)
    with pytest.raises(InvalidArgument, match="shape"):
        kernels.merge_states(a, lse, a[:1], lse)
    with pytest.raises(InvalidArgument, match="lse_b"):
        kernels.merge_states(a, lse, a, lse[:, :2])
    with pytest.raises(InvalidArgument, match="same dtype"):
        kernels.merge_states(a, lse, a.half(), lse)


def test_thread_pools() -> None:
    for threads in (0, -1, 100_000):
        with pytest.raises(InvalidArgument, match=f"num_threads={threads}"):
            kernels.ThreadPool(threads)
