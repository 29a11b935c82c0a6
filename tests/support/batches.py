"""Batches with known contents: sequences over pages of a pool, the same numbers for the oracle.

The numbers of a sequence depend on its ``content`` seed and on positions only, never on the batch,
on the physical pages or on how its tokens are cut into chunks. So two batches can hold the same
sequence in different ways, and every row that should be equal can be compared bit for bit.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from kvcore import kernels, pages
from kvcore import reference as ref

torch.set_num_threads(1)  # tensors here are small, and the kernels have their own threads
_EXPECTED: dict[tuple[object, ...], ref.Attention] = {}
TORCH_DTYPE = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
# Bit patterns that must never be read as numbers; the last is about 1e38, or the largest f16.
POISON_BITS = {
    "bf16": {"nan": 0x7FC1, "inf": 0x7F80, "huge": 0x7E96},
    "f16": {"nan": 0x7E01, "inf": 0x7C00, "huge": 0x7BFF},
    "f32": {"nan": 0x7FC00001, "inf": 0x7F800000, "huge": 0x7E967699},
}


@dataclass(frozen=True)
class Shape:
    """Geometry of a test: heads, dims, page and format."""

    num_q_heads: int
    num_kv_heads: int
    head_dim_k: int = 64
    head_dim_v: int = 64
    page_size: int = 64
    fmt: str = "bf16"
    layout: str = "packed"
    num_layers: int = 2
    extent_pages: int = 0
    window: int = 0
    soft_cap: float = 0.0
    latent: bool = False

    @property
    def spec(self) -> pages.PageSpec:
        """The library's PageSpec of this shape."""
        return pages.PageSpec(
            self.num_layers,
            self.num_kv_heads,
            self.head_dim_k,
            self.head_dim_v,
            page_size=self.page_size,
            extent_pages=self.extent_pages,
            format=self.fmt,
            layout=self.layout,
            latent=self.latent,
        )

    @property
    def geometry(self) -> ref.Geometry:
        """The oracle's own geometry of this shape."""
        return ref.Geometry(
            self.num_layers,
            self.num_kv_heads,
            self.head_dim_k,
            self.head_dim_v,
            self.page_size,
            self.extent_pages,
            self.fmt,
            self.layout,
            self.latent,
        )

    @property
    def scale(self) -> float:
        """The usual 1 / sqrt(head_dim_k), as float32 holds it."""
        return float(np.float32(self.head_dim_k**-0.5))


@dataclass(frozen=True)
class Sequence:
    """One sequence: its contents' seed, tokens in the KV, how many of them are new (rows of q)."""

    content: int
    context_len: int
    q_len: int = 1


def kv_values(shape: Shape, content: int, layer: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Stored elements k [count, H, Dk], v [count, H, Dv] of the first tokens of a content.

    v of latent pages is the first dims of k.
    """
    values = []
    for which, dim in ((0, shape.head_dim_k), (1, shape.head_dim_v)):
        rng = np.random.default_rng([content, layer, which])
        draws = rng.standard_normal((count, shape.num_kv_heads, dim), np.float32)
        values.append(ref.encode(draws, shape.fmt))
    if shape.latent:
        return values[0], np.ascontiguousarray(values[0][:, :, : shape.head_dim_v])
    return values[0], values[1]


def q_values(shape: Shape, seq: Sequence, layer: int, dtype: str) -> np.ndarray:
    """Stored q rows [q_len, Hq, Dk] of a sequence, by absolute position (negative ones too)."""
    first, last = seq.context_len - seq.q_len, seq.context_len
    rows = []
    for sign, low, high in ((3, max(-last, 0), max(-first, 0)), (2, max(first, 0), max(last, 0))):
        rng = np.random.default_rng([seq.content, layer, sign])
        draws = rng.standard_normal((high, shape.num_q_heads, shape.head_dim_k), np.float32)[low:]
        rows.append(draws[::-1] if sign == 3 else draws)
    return ref.encode(1.5 * np.concatenate(rows), dtype)


def arena_bytes(pool: pages.Pool) -> np.ndarray:
    """The pool's memory as uint8 [bytes], writable, without a copy; valid while the pool lives."""
    arena = pool.arena
    return np.ctypeslib.as_array((ctypes.c_uint8 * arena.bytes).from_address(arena.address))


def to_torch(stored: np.ndarray, dtype: str) -> torch.Tensor:
    """Stored elements as a torch tensor (bf16 bits reinterpreted)."""
    array = np.ascontiguousarray(stored)
    if dtype == "bf16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def bits_of(tensor: torch.Tensor) -> np.ndarray:
    """A tensor's bit patterns, for comparisons that tell -0 from 0 and NaNs apart."""
    return tensor.contiguous().view(torch.uint8).numpy().copy()


class Batch:
    """Sequences in a pool of their own, filled through the oracle's layout code."""

    def __init__(
        self,
        shape: Shape,
        sequences: Seq[Sequence],
        *,
        page_order: int = 1,
        poison: str = "nan",
        spare_columns: int = 2,
        fill: bool = True,
    ) -> None:
        """Args:
        page_order: seed of the assignment of physical pages.
        poison: what unused slots hold: "nan", "inf", "huge" or "zero".
        spare_columns: columns of the block table behind the longest sequence, filled with -1.
        fill: write the KV of all tokens; otherwise pages hold poison only.
        """
        self.shape, self.sequences, self.geometry = shape, list(sequences), shape.geometry
        size = shape.page_size
        needs = [max(-(-s.context_len // size), 0) for s in self.sequences]
        extent = self.geometry.resolved_extent
        self.pool = pages.Pool(shape.spec, -(-max(sum(needs), 1) // extent) + 1, huge_pages=False)
        self.arena = arena_bytes(self.pool)
        free = self.pool.alloc(max(sum(needs), 1))
        np.random.default_rng(page_order).shuffle(free)
        self.block_table = np.full(
            (len(needs), max(needs, default=0) + spare_columns), -1, np.int32
        )
        for row, need in enumerate(needs):
            self.block_table[row, :need] = free[:need]
            del free[:need]
        self.context_lens = np.array([s.context_len for s in self.sequences], np.int32)
        q_lens = [s.q_len for s in self.sequences]
        self.cu_seqlens_q = np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)
        self._poison(poison)
        if fill:
            for layer in range(shape.num_layers):
                self._fill(layer)

    def _poison(self, kind: str) -> None:
        fmt = self.shape.fmt
        bits = 0 if kind == "zero" else POISON_BITS[fmt][kind]
        self.arena.view(np.uint32 if fmt == "f32" else np.uint16)[:] = bits
        for page in range(self.pool.num_pages):
            for layer in range(self.shape.num_layers):
                at = self.geometry.slice_offset(page, layer)
                self.arena[at : at + 64] = 0

    def _fill(self, layer: int) -> None:
        for row, seq in enumerate(self.sequences):
            k, v = kv_values(self.shape, seq.content, layer, seq.context_len)
            for index in range(-(-seq.context_len // self.shape.page_size)):
                page = int(self.block_table[row, index])
                part = slice(index * self.shape.page_size, (index + 1) * self.shape.page_size)
                page_k, page_v = ref.read_slice(self.arena, self.geometry, page, layer)
                count = len(k[part])
                page_k[:count], page_v[:count] = k[part], v[part]
                ref.write_slice(self.arena, self.geometry, page, layer, page_k, page_v)

    @cached_property
    def num_rows(self) -> int:
        """Rows of q over all sequences."""
        return int(self.cu_seqlens_q[-1])

    def new_kv(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """Stored elements of the batch's new tokens, k [rows, H, Dk], v [rows, H, Dv]."""
        parts = []
        for seq in self.sequences:
            k, v = kv_values(self.shape, seq.content, layer, seq.context_len)
            parts.append((k[seq.context_len - seq.q_len :], v[seq.context_len - seq.q_len :]))
        return np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])

    def q(self, layer: int, dtype: str) -> np.ndarray:
        """Stored q rows of the whole batch, [rows, Hq, Dk]."""
        parts = [q_values(self.shape, seq, layer, dtype) for seq in self.sequences]
        empty = np.empty(
            (0, self.shape.num_q_heads, self.shape.head_dim_k), ref.STORAGE_DTYPE[dtype]
        )
        return np.concatenate([empty, *parts])

    def plan(self, threads: kernels.ThreadPool | None = None) -> kernels.AttentionPlan:
        """A prepared plan over this batch."""
        plan = kernels.AttentionPlan(
            self.pool,
            self.shape.num_q_heads,
            scale=self.shape.scale,
            threads=threads,
            window=self.shape.window,
            soft_cap=self.shape.soft_cap,
        )
        plan.prepare(self.cu_seqlens_q, self.context_lens, self.block_table)
        return plan

    def attend(
        self, layer: int = 0, dtype: str = "bf16", threads: kernels.ThreadPool | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The kernel's out [rows, Hq, Dv] in ``dtype`` and lse [rows, Hq] float32."""
        q = to_torch(self.q(layer, dtype), dtype)
        shape = (self.num_rows, self.shape.num_q_heads, self.shape.head_dim_v)
        out = torch.full(shape, float("nan"), dtype=TORCH_DTYPE[dtype])
        lse = torch.full(shape[:2], float("nan"))
        self.plan(threads).attend(layer, q, out, lse)
        return out, lse

    def expected(self, layer: int = 0, dtype: str = "bf16", shift: int = 0) -> ref.Attention:
        """The oracle's result over the same bytes; ``shift`` moves the causal mask wrongly.

        Kept for the next ISA level of the same test, unless a test changed this object.
        """
        key = (self.shape, tuple(self.sequences), layer, dtype, shift)
        if "q" in vars(self):
            return self._expected(layer, dtype, shift)
        if key not in _EXPECTED:
            if len(_EXPECTED) > 200:
                _EXPECTED.clear()
            _EXPECTED[key] = self._expected(layer, dtype, shift)
        return _EXPECTED[key]

    def _expected(self, layer: int, dtype: str, shift: int) -> ref.Attention:
        q = ref.decode(self.q(layer, dtype), dtype)
        return ref.paged_attention(
            q,
            self.arena,
            self.geometry,
            layer,
            self.cu_seqlens_q,
            self.context_lens,
            self.block_table,
            self.shape.scale,
            shift=shift,
            window=self.shape.window,
            soft_cap=self.shape.soft_cap,
        )

    def first_seen(self, index: int) -> int:
        """The first token that some row of a sequence sees."""
        seq = self.sequences[index]
        first = seq.context_len - seq.q_len + 1 - self.shape.window
        return max(first, 0) if self.shape.window else 0

    def free_unseen(self) -> None:
        """What the windows have left behind goes: block table -1, every byte of its pages 0xff."""
        for index in range(len(self.sequences)):
            for column in range(self.first_seen(index) // self.shape.page_size):
                page = int(self.block_table[index, column])
                for layer in range(self.shape.num_layers):
                    at = self.geometry.slice_offset(page, layer)
                    self.arena[at : at + self.geometry.slice_bytes] = 0xFF
                self.block_table[index, column] = -1

    def rows_of(self, index: int) -> slice:
        """Rows of one sequence."""
        return slice(int(self.cu_seqlens_q[index]), int(self.cu_seqlens_q[index + 1]))


def decode_of(seq: Sequence, position: int) -> Sequence:
    """The same contents, one row at ``position``."""
    return replace(seq, context_len=position + 1, q_len=1)
