"""Where bytes of KV lie: pages, frames, slices and the two layouts of a head block.

A frame holds ``extent_pages`` pages of one sequence, layer-major; a slice is one page of one layer:
a header of 64 bytes, then per KV head its K block and its V block. Offsets are Python ints (bytes).
Source: csrc/base/page_layout.h and csrc/pages/page_spec.h, written down a second time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .formats import STORAGE_DTYPE, Elements

HEADER_BYTES = 64
FRAME_ALIGN_BYTES = 4096
TOKEN_BLOCK = 64
DIM_BLOCK = 64
_WANTED_RUN_BYTES = 128 * 1024
_MAX_EXTENT_PAGES = 16


def _align(value: int, to: int) -> int:
    return -(-value // to) * to


def usable_prefix(num_tokens: int, page_size: int) -> int:
    """Tokens of a prompt that may come from a cache: whole pages, one token left to compute."""
    return 0 if num_tokens <= 0 else (num_tokens - 1) // page_size * page_size


@dataclass(frozen=True)
class Geometry:
    """Sizes of one layer group's pages. ``extent_pages=0`` picks the smallest power of two
    (at most 16) whose run of one layer is at least 128 KiB, as :func:`resolved` shows."""

    num_layers: int
    num_kv_heads: int
    head_dim_k: int
    head_dim_v: int
    page_size: int = 64
    extent_pages: int = 0
    fmt: str = "bf16"
    layout: str = "packed"
    latent: bool = False  # V is the first dims of K, in place

    @property
    def resolved_extent(self) -> int:
        """Pages per frame after the rule for 0."""
        if self.extent_pages:
            return self.extent_pages
        extent = 1
        while extent < _MAX_EXTENT_PAGES and extent * self.slice_bytes < _WANTED_RUN_BYTES:
            extent *= 2
        return extent

    @property
    def k_block_bytes(self) -> int:
        """Bytes of K of one head of one slice."""
        return self.page_size * self.head_dim_k * STORAGE_DTYPE[self.fmt].itemsize

    @property
    def v_block_bytes(self) -> int:
        """Bytes of V of one head of one slice."""
        if self.latent:
            return 0
        return self.page_size * self.head_dim_v * STORAGE_DTYPE[self.fmt].itemsize

    @property
    def slice_bytes(self) -> int:
        """Bytes of one page of one layer, header included, a multiple of 64."""
        return _align(
            HEADER_BYTES + self.num_kv_heads * (self.k_block_bytes + self.v_block_bytes), 64
        )

    @property
    def layer_stride_bytes(self) -> int:
        """Distance of two layers of one page."""
        return self.resolved_extent * self.slice_bytes

    @property
    def frame_bytes(self) -> int:
        """Bytes of a frame, a multiple of 4096."""
        return _align(self.num_layers * self.layer_stride_bytes, FRAME_ALIGN_BYTES)

    @property
    def page_bytes(self) -> int:
        """Bytes of all slices of one page."""
        return self.num_layers * self.slice_bytes

    def slice_offset(self, page: int, layer: int) -> int:
        """Byte offset of slice (page, layer) from the arena's start."""
        frame, index = divmod(page, self.resolved_extent)
        return frame * self.frame_bytes + layer * self.layer_stride_bytes + index * self.slice_bytes

    def block_offsets(self, page: int, layer: int, head: int) -> tuple[int, int]:
        """Byte offsets of the K block and the V block of one KV head of one slice."""
        start = self.slice_offset(page, layer) + HEADER_BYTES
        k = start + head * (self.k_block_bytes + self.v_block_bytes)
        return k, k if self.latent else k + self.k_block_bytes


def pack_k(k: Elements, fmt: str) -> Elements:
    """Canonical K block -> packed elements.

    Args:
        k: [P, Dk] stored elements of one head.
    Returns:
        flat [P * Dk]: bf16 in order [P/TB][Dk/2][TB][2], else [P/TB][Dk][TB], TB = min(P, 64).
    """
    tokens, dims = k.shape
    block = min(tokens, TOKEN_BLOCK)
    pair = 2 if fmt == "bf16" else 1
    return k.reshape(tokens // block, block, dims // pair, pair).transpose(0, 2, 1, 3).reshape(-1)


def unpack_k(packed: Elements, tokens: int, dims: int, fmt: str) -> Elements:
    """Inverse of :func:`pack_k`: flat [P * Dk] -> [P, Dk]."""
    block = min(tokens, TOKEN_BLOCK)
    pair = 2 if fmt == "bf16" else 1
    cut = packed.reshape(tokens // block, dims // pair, block, pair).transpose(0, 2, 1, 3)
    return np.ascontiguousarray(cut).reshape(tokens, dims)


def pack_v(v: Elements, fmt: str) -> Elements:
    """Canonical V block [P, Dv] -> packed flat [P * Dv].

    Dims are cut in blocks of DB = min(Dv - first, 64); bf16 lies as [P/2][DB][2] per block, else as
    [P][DB].
    """
    tokens, dims = v.shape
    parts = []
    for first in range(0, dims, DIM_BLOCK):
        part = v[:, first : first + DIM_BLOCK]
        if fmt == "bf16":
            part = part.reshape(tokens // 2, 2, part.shape[1]).transpose(0, 2, 1)
        parts.append(part.reshape(-1))
    return np.concatenate(parts)


def unpack_v(packed: Elements, tokens: int, dims: int, fmt: str) -> Elements:
    """Inverse of :func:`pack_v`: flat [P * Dv] -> [P, Dv]."""
    out = np.empty((tokens, dims), packed.dtype)
    for first in range(0, dims, DIM_BLOCK):
        width = min(dims - first, DIM_BLOCK)
        part = packed[first * tokens : (first + width) * tokens]
        if fmt == "bf16":
            part = part.reshape(tokens // 2, width, 2).transpose(0, 2, 1)
        out[:, first : first + width] = part.reshape(tokens, width)
    return out
