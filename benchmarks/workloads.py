"""Pools full of plausible numbers, for attention cases."""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from kvcore import kernels, pages

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}


@dataclass(frozen=True)
class Heads:
    """Heads of a model: query heads, KV heads, head_dim."""

    q: int
    kv: int
    dim: int

    def __str__(self) -> str:
        return f"{self.q}/{self.kv}x{self.dim}"


def parse_shape(text: str) -> tuple[Heads, int, int]:
    """ "32/8x128:1x8192" as heads and two numbers; SystemExit names what does not fit."""
    found = re.fullmatch(r"(\d+)/(\d+)x(\d+):(\d+)x(\d+)", text)
    if found is None or 0 in (numbers := [int(x) for x in found.groups()]):
        raise SystemExit(f"--shape {text}: wanted Q/KVxDIM:AxB, as in 32/8x128:1x8192")
    return Heads(*numbers[:3]), numbers[3], numbers[4]


def fill(pool: pages.Pool) -> None:
    """Normally distributed numbers in every byte of the pool."""
    arena = pool.arena
    memory = np.ctypeslib.as_array((ctypes.c_uint8 * arena.bytes).from_address(arena.address))
    dtype = DTYPES[pool.spec.format]
    numbers = torch.randn(1 << 20).to(dtype).view(torch.uint8).numpy()
    for first in range(0, arena.bytes, numbers.size):
        part = memory[first : first + numbers.size]
        part[:] = numbers[: part.size]


def _held(pool: pages.Pool, sequences: int, count: int, scattered: bool) -> list[Any]:
    """Pages of each sequence; scattered: frames in a random order, as after a day of use."""
    extent = pool.spec.extent_pages
    frames = np.array(pool.alloc(sequences * -(-count // extent) * extent)).reshape(-1, extent)
    if scattered:
        frames = np.random.default_rng(1).permutation(frames)
    return list(frames.reshape(sequences, -1)[:, :count])


class RotatingKv:
    """Batches of sequences of equal length in one pool; a timed loop takes another each time.

    Together they are larger than the caches, so that every repetition reads from memory.
    """

    def __init__(
        self,
        heads: Heads,
        context: int,
        q_len: int,
        copies: int,
        page_size: int = 64,
        batch: int = 1,
        threads: int = 1,
        dtype: str = "bf16",
        pool: Any = None,
        scattered: bool = False,
    ) -> None:
        self.heads, self.context, self.q_len, self.batch = heads, context, q_len, batch
        per_sequence = -(-context // page_size)
        if pool is None:
            spec = pages.PageSpec(1, heads.kv, heads.dim, page_size=page_size, format=dtype)
            pool = pages.Pool(spec, copies * batch * -(-per_sequence // spec.extent_pages))
            fill(pool)
            held = _held(pool, copies * batch, per_sequence, scattered)
        else:  # full pages, put together elsewhere
            held = np.arange(copies * batch * per_sequence).reshape(copies * batch, -1)
        self.pool = pool
        self.threads = kernels.ThreadPool(threads)
        self.plans = []
        for i in range(copies):
            plan = kernels.AttentionPlan(self.pool, heads.q, threads=self.threads)
            starts = np.arange(0, batch * q_len + 1, q_len, dtype=np.int32)
            plan.prepare(
                starts,
                np.full(batch, context, np.int32),
                np.array(held[i * batch : (i + 1) * batch], np.int32),
            )
            self.plans.append(plan)
        self.q = torch.randn(batch * q_len, heads.q, heads.dim).to(DTYPES[dtype])
        self.code = kernels.DTYPE_CODES[str(self.q.dtype).rpartition(".")[2]]
        self.out = torch.empty_like(self.q)
        self.lse = torch.empty(batch * q_len, heads.q)
        self._next = 0

    def attend(self) -> None:
        """Attention of one batch, the next in turn."""
        plan = self.plans[self._next]
        self._next = (self._next + 1) % len(self.plans)
        self._attend(plan)

    def attend_all(self) -> None:
        """Attention of every batch once."""
        for plan in self.plans:
            self._attend(plan)

    def _attend(self, plan: kernels.AttentionPlan) -> None:
        q, out, code = self.q, self.out, self.code
        strides = q.stride(0), out.stride(0)
        lse = self.lse.data_ptr()
        plan.attend_ptr(0, q.data_ptr(), strides[0], out.data_ptr(), strides[1], lse, code)

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V of one batch."""
        return self.batch * self.context * self.heads.kv * self.heads.dim * 2 * self.q.itemsize

    @property
    def flops(self) -> int:
        """Multiplications and additions of the causal attention of one batch."""
        first = self.context - self.q_len + 1
        visible = self.q_len * (first + self.context) // 2
        return 4 * self.batch * visible * self.heads.q * self.heads.dim
