"""The small operations between the matrix products, fused per row (``csrc/kernels/elementwise``).

A row's bits depend on that row alone. Tensors are contiguous CPU tensors of one dtype, float32 or
bfloat16; the caller owns the shapes: these run 120 times a step and check nothing twice.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcore import kernels

_CODES = {torch.float32: 0, torch.bfloat16: 2}


class Elementwise:
    """The operations of one model: its dtype and the epsilon of its norms."""

    def __init__(self, dtype: torch.dtype, eps: float) -> None:
        self._code = _CODES[dtype]
        self._eps = eps

    def rms_norm(self, x: Tensor, weight: Tensor, delta: Tensor | None = None) -> Tensor:
        """``x += delta`` in place, then ``x / rms(x) * weight`` (Zhang and Sennrich 2019).

        Args:
            x: ``[T, D]``. delta: ``[T, D]`` or None. weight: ``[D]``.

        Returns:
            ``[T, D]``; float32 inside, rounded once.
        """
        rows, dim = x.shape
        out = torch.empty_like(x)
        added = 0 if delta is None else delta.data_ptr()
        kernels.rms_norm_ptr(
            x.data_ptr(),
            dim,
            added,
            weight.data_ptr(),
            out.data_ptr(),
            rows,
            dim,
            self._eps,
            self._code,
        )
        return out

    def rope(
        self,
        heads: Tensor,
        rotation: Tensor,
        num_q: int,
        num_k: int,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
    ) -> None:
        """Rotate the first ``num_q + num_k`` heads in place, element ``i`` with ``i + D / 2``.

        Args:
            heads: ``[T, H, D]``. rotation: float32 ``[T, 2, D / 2]`` (cos, sin).
            q_norm, k_norm: ``[D]`` weights of an RMS norm per head before that, or None.
        """
        rows, total, dim = heads.shape
        kernels.rope_ptr(
            heads.data_ptr(),
            total * dim,
            rotation.data_ptr(),
            0 if q_norm is None else q_norm.data_ptr(),
            0 if k_norm is None else k_norm.data_ptr(),
            rows,
            num_q,
            num_k,
            dim,
            self._eps,
            self._code,
        )

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """``silu(gate) * up`` of ``[T, 2 * I]`` -> ``[T, I]``."""
        rows, width = gate_up.shape
        out = gate_up.new_empty(rows, width // 2)
        kernels.silu_mul_ptr(gate_up.data_ptr(), out.data_ptr(), rows, width // 2, self._code)
        return out
