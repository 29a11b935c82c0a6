"""Pools full of plausible numbers, for attention cases."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import torch
from kvcore import kernels, pages


@dataclass(frozen=True)
class Heads:
    """Heads of a model: query heads, KV heads, head_dim."""

    q: int
    kv: int
    dim: int

    def __str__(self) -> str:
        return f"{self.q}/{self.kv}x{self.dim}"


class RotatingKv:
    """Several sequences of equal length in one pool; a timed loop takes another one each time.

    Together they are larger than the caches, so that every repetition reads from memory.
    """

    def __init__(
        self, heads: Heads, context: int, q_len: int, copies: int, page_size: int = 64
    ) -> None:
        self.heads, self.context, self.q_len = heads, context, q_len
        spec = pages.PageSpec(1, heads.kv, heads.dim, page_size=page_size, format="bf16")
        per_sequence = -(-context // page_size)
        frames = copies * -(-per_sequence // spec.extent_pages)
        self.pool = pages.Pool(spec, frames)
        self._fill()
        self.threads = kernels.ThreadPool(1)
        self.plans = []
        for _ in range(copies):
            table = np.array([self.pool.alloc(per_sequence)[:per_sequence]], np.int32)
            plan = kernels.AttentionPlan(self.pool, heads.q, threads=self.threads)
            plan.prepare(np.array([0, q_len], np.int32), np.array([context], np.int32), table)
            self.plans.append(plan)
        self.q = torch.randn(q_len, heads.q, heads.dim).bfloat16()
        self.out = torch.empty_like(self.q)
        self.lse = torch.empty(q_len, heads.q)
        self._next = 0

    def _fill(self) -> None:
        arena = self.pool.arena
        memory = np.ctypeslib.as_array((ctypes.c_uint8 * arena.bytes).from_address(arena.address))
        numbers = torch.randn(1 << 20).bfloat16().view(torch.uint8).numpy()
        for first in range(0, arena.bytes, numbers.size):
            part = memory[first : first + numbers.size]
            part[:] = numbers[: part.size]

    def attend(self) -> None:
        """Attention of one sequence, the next in turn."""
        plan = self.plans[self._next]
        self._next = (self._next + 1) % len(self.plans)
        plan.attend(0, self.q, self.out, self.lse)

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V of one sequence."""
        return self.context * self.heads.kv * self.heads.dim * 2 * 2

    @property
    def flops(self) -> int:
        """Multiplications and additions of the causal attention of one sequence."""
        first = self.context - self.q_len + 1
        visible = self.q_len * (first + self.context) // 2
        return 4 * visible * self.heads.q * self.heads.dim
