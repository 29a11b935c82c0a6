"""Bounds of pages for query-aware selection: made and scored, against attending the page."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from class_pages import ClassPages
from harness import Context, Result, interleave, seconds, time_result
from kvcore import kernels
from workloads import Heads, RotatingKv

CONTEXT, COPIES = 8192, 4
SHAPES = [(Heads(32, 8, 128), 64), (Heads(32, 8, 128), 16), (Heads(9, 3, 64), 64)]
FORMATS = [("bf16", "bf16"), ("k4", "v4"), ("int8", "int8")]


class Bounded:
    """Sequences of whole pages of one class, and the bounds of each."""

    def __init__(self, heads: Heads, page: int, k: str, v: str) -> None:
        self.num_pages = CONTEXT // page
        pages = ClassPages(heads, k, v, COPIES * self.num_pages, page)
        self.kv = RotatingKv(heads, CONTEXT, 1, COPIES, page, pool=pages)
        self.ids = np.arange(COPIES * self.num_pages, dtype=np.int32).reshape(COPIES, -1)
        self.tokens = np.full(self.num_pages, page, np.int32)
        shape = (self.num_pages, heads.kv, 2, heads.dim)
        self.bounds = [np.empty(shape, np.float32) for _ in range(COPIES)]
        self.scores = np.empty((1, heads.kv, self.num_pages), np.float32)
        self.make()

    def make(self) -> None:
        """Bounds of every page once."""
        for ids, bounds in zip(self.ids, self.bounds, strict=True):
            kernels.page_bounds(self.kv.pool, 0, ids, self.tokens, bounds)

    def score(self) -> None:
        """One query's scores of every page."""
        heads, q = self.kv.heads, self.kv.q
        out = self.scores.ctypes.data
        for bounds in self.bounds:
            kernels.page_score_bounds_ptr(
                q.data_ptr(), q.stride(0), self.kv.code, 1, heads.q, bounds.ctypes.data,
                self.num_pages, heads.kv, heads.dim, heads.dim**-0.5, out,
            )  # fmt: skip


def run(context: Context) -> Iterator[Result]:
    """Two results per shape and formats, microseconds a page; the limit is attention over it."""
    for heads, page in SHAPES:
        for k, v in FORMATS:
            work = Bounded(heads, page, k, v)
            calls = {"attend": work.kv.attend_all, "make": work.make, "score": work.score}
            timed = {name: lambda call=call: seconds(call) for name, call in calls.items()}
            taken = interleave(timed, context.rounds(30, 5))
            pages = COPIES * work.num_pages
            for op in ("score", "make"):
                yield time_result(
                    "page_bounds",
                    {"heads": str(heads), "page": page, "k": k, "v": v, "op": op},
                    [s / pages for s in taken[op]],
                    "us",
                    "attend",
                    [s / pages for s in taken["attend"]],
                    bytes=8 * heads.kv * heads.dim,
                    flops=0,
                    isa=kernels.isa(),
                    threads=1,
                )
