"""Pages of one class, put together by hand: the view that kernels read, without a pool."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import numpy as np
from kvcore import kernels
from workloads import Heads

FORMATS = {"bf16": 2, "fp8": 3, "int8": 4, "k4": 5, "v4": 6, "v3": 7}
HEADER, HUGE, RUN_PAGES = 64, 2 << 20, 16
I64, I32, U8, PTR = ctypes.c_int64, ctypes.c_int32, ctypes.c_uint8, ctypes.c_void_p


class HeadBlock(ctypes.Structure):
    _fields_ = (
        ("k_offset", I64), ("v_offset", I64), ("k_format", U8), ("v_format", U8),
        ("k_row_bytes", I64), ("v_row_bytes", I64),
    )  # fmt: skip


class LayerView(ctypes.Structure):
    _fields_ = (("run_bytes", I64), ("slice_bytes", I64), ("heads", PTR))


class ClassView(ctypes.Structure):
    _fields_ = (("layers", PTR), ("layout", U8), ("has_headers", U8))


class PagesView(ctypes.Structure):
    _fields_ = (
        ("arena", PTR), ("records", PTR), ("classes", PTR), ("num_pages", I64),
        ("num_classes", I32), ("num_layers", I32), ("num_kv_heads", I32), ("head_dim_k", I32),
        ("head_dim_v", I32), ("page_size", I32),
    )  # fmt: skip


class ClassPages:
    """Full pages of one layer, in shuffled runs on huge pages; all hold the same numbers."""

    def __init__(self, heads: Heads, k: str, v: str, num_pages: int, page_size: int = 64) -> None:
        self.spec = kernels.TensorSpec(1, heads.kv, heads.dim, heads.dim, page_size, "bf16")
        rng = np.random.default_rng(0)
        blocks, at = [], HEADER
        head_blocks = (HeadBlock * heads.kv)()
        for h in range(heads.kv):
            offsets = []
            for part, name in (("k", k), ("v", v)):
                block = _block(rng, name, part, page_size, heads.dim)
                offsets.append(at)
                blocks.append((at, block))
                at += block.size
            head_blocks[h] = HeadBlock(*offsets, FORMATS[k], FORMATS[v], 0, 0)
        self.page_bytes = -(-at // 64) * 64
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # shared memory gets no huge pages
        self._memory = mmap.mmap(-1, self.page_bytes * num_pages + HUGE, flags=private)
        self._memory.madvise(mmap.MADV_HUGEPAGE)
        memory = np.frombuffer(self._memory, np.uint8)
        base = -memory.ctypes.data % 64
        page = np.zeros(self.page_bytes, np.uint8)
        for offset, block in blocks:
            page[offset : offset + block.size] = block
        memory[base : base + self.page_bytes * num_pages].reshape(num_pages, -1)[:] = page
        records = np.zeros((num_pages, 2), np.int64)  # offset; class 0, index 0
        runs = np.arange(num_pages)  # pages of a sequence lie in runs, runs anywhere
        whole = num_pages // RUN_PAGES * RUN_PAGES
        runs[:whole] = rng.permutation(runs[:whole].reshape(-1, RUN_PAGES)).reshape(-1)
        records[:, 0] = runs * self.page_bytes
        layer = LayerView(0, self.page_bytes, ctypes.addressof(head_blocks))
        view_class = ClassView(ctypes.addressof(layer), 1, 1)
        self._view = PagesView(
            memory.ctypes.data + base, records.ctypes.data, ctypes.addressof(view_class),
            num_pages, 1, 1, heads.kv, heads.dim, heads.dim, page_size,
        )  # fmt: skip
        self._held: list[Any] = [memory, records, head_blocks, layer, view_class]

    @property
    def view_address(self) -> int:
        """Address of the kernels' view of these pages."""
        return ctypes.addressof(self._view)


def _block(
    rng: np.random.Generator, name: str, part: str, tokens: int, dim: int
) -> np.ndarray[Any, Any]:
    rows = rng.standard_normal((tokens, dim)).astype(np.float32)
    if name != "bf16":
        return np.asarray(kernels.encode_block(name, part, rows))
    return (rows.view(np.uint32) >> 16).astype(np.uint16).reshape(-1).view(np.uint8)
