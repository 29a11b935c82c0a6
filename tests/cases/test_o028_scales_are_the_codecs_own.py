"""O28 (sglang#18818) and O102 (flashinfer#1023): scales given by the caller were lost on the way.

kvcore takes no scale anywhere: a block's scales come from its own numbers and travel inside it.
What remains to be shown is that nothing accepts one and drops it, and that large and small numbers
come back at their size.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kvcore import kernels, ops
from support.batches import Batch, Sequence, Shape
from support.blocks import CODECS

FORMATS = pytest.mark.parametrize(("fmt", "part"), CODECS)


@FORMATS
@pytest.mark.parametrize("size", [0.0109, 0.04, 3.0, 7.5, 1000.0])
def test_numbers_come_back_at_their_size(fmt: str, part: str, size: float, isa: str) -> None:
    rows = (np.random.default_rng(1).standard_normal((64, 128)) * size).astype(np.float32)
    block = kernels.encode_block(fmt, part, rows)
    back = kernels.decode_block(fmt, part, block, 64, 128)
    error = np.linalg.norm(back - rows) / np.linalg.norm(rows)
    assert error < {"int8": 0.01, "fp8": 0.04, "k4": 0.12, "v4": 0.11, "v3": 0.2}[fmt]


@FORMATS
def test_encoders_take_no_scale(fmt: str, part: str) -> None:
    rows = np.ones((64, 128), np.float32)
    with pytest.raises(TypeError):
        kernels.encode_block(fmt, part, rows, None, 0.04)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        kernels.encode_block(fmt, part, rows, k_scale=0.04)  # type: ignore[call-arg]


def test_attention_takes_no_scales_of_keys_or_values() -> None:
    batch = Batch(Shape(2, 2, 64, 64, 64, "bf16", num_layers=1), [Sequence(1, 9, 1)])
    plan, q = batch.plan(), torch.zeros(1, 2, 64)
    out, lse = torch.empty(1, 2, 64), torch.empty(1, 2)
    with pytest.raises(TypeError):
        plan.attend(0, q, out, lse, 0.0109, 7.5)
    with pytest.raises(TypeError):
        plan.attend(0, q, out, k_scale=0.0109, v_scale=7.5)
    step = ops.register(plan)
    kv = torch.zeros(1, 2, 64)
    arena = ops.arena(batch.pool)
    with pytest.raises((TypeError, RuntimeError)):
        torch.ops.kvcore.attend_layer(q, kv, kv, arena, step.id, 0, 0.0109, 7.5)
    with pytest.raises((TypeError, RuntimeError)):
        torch.ops.kvcore.attend_layer(q, kv, kv, arena, step.id, 0, k_scale=0.0109)
