"""The small operations between the matrix products, each independent per row."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / rms(x) * weight`` over the last dimension, float32 inside (Zhang, Sennrich 2019)."""
    return functional.rms_norm(x, weight.shape, weight, eps)


def rope_heads(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotate ``x [T, H, D]`` by ``rotation [T, 2, D / 2]`` (cos, sin), halves as pairs."""
    cos, sin = rotation[:, None, 0], rotation[:, None, 1]
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` of ``[T, 2 * I]`` -> ``[T, I]``."""
    gate, up = gate_up.chunk(2, -1)
    return functional.silu(gate) * up
