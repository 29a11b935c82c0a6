"""Decode attention over compressed pages, against the linear read limit and against bf16 pages.

The value is bf16-equivalent: the bytes that the same tokens would take in bf16, over the time.
``bytes`` are those really read. bf16 pages of the same shape are timed in the same rounds.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial

from class_pages import ClassPages
from harness import Context, Result, interleave, rate_result, seconds
from kvcore import kernels
from limits import MIB, LinearRead
from workloads import Heads, RotatingKv, parse_shape

PASS_MIB = 128
FORMATS = [("int8", "int8"), ("k4", "v4"), ("k4", "v3"), ("k4", "int8"), ("int8", "v4")]
SHAPES = [  # heads, batch, context, page size
    (Heads(32, 8, 128), 1, 8192, 64),
    (Heads(32, 8, 128), 8, 8192, 64),
    (Heads(32, 8, 128), 32, 1024, 64),
    (Heads(9, 3, 64), 1, 8192, 64),
    (Heads(32, 32, 128), 1, 8192, 64),
    (Heads(32, 8, 128), 1, 8192, 16),
    (Heads(32, 8, 128), 1, 8192, 32),
    (Heads(32, 8, 128), 1, 8192, 128),
    (Heads(32, 8, 128), 32, 1024, 16),
    (Heads(9, 3, 64), 1, 8192, 16),
    (Heads(9, 3, 64), 1, 8192, 32),
    (Heads(9, 3, 64), 32, 1024, 16),
]


def _shapes(context: Context) -> list[tuple[Heads, int, int, int]]:
    """Heads, batch, context and page size of what was asked for."""
    if context.shapes:
        sizes = context.pages or (64,)
        return [(*parse_shape(shape), page) for shape in context.shapes for page in sizes]
    chosen = [shape for shape in SHAPES if not context.pages or shape[3] in context.pages]
    return chosen[: 1 if context.quick else None]


def _kv(heads: Heads, batch: int, tokens: int, page: int, k: str, v: str) -> RotatingKv:
    """Sequences of whole pages of one class, together larger than the caches."""
    per_sequence = tokens // page
    page_bytes = ClassPages(heads, k, v, 1, page).page_bytes
    copies = -(-PASS_MIB * MIB // (batch * per_sequence * page_bytes))
    pages = ClassPages(heads, k, v, copies * batch * per_sequence, page)
    return RotatingKv(heads, tokens, 1, copies, page, batch, pool=pages)


def _per_batch(kv: RotatingKv) -> float:
    return seconds(kv.attend_all) / len(kv.plans)


def run(context: Context) -> Iterator[Result]:
    """Two results per shape and pair of formats: against linear read, and against bf16 pages."""
    linear = LinearRead(part_mib=PASS_MIB)
    for heads, batch, tokens, page in _shapes(context):
        shape = (heads, batch, tokens, page)
        timed = {pair: _kv(*shape, *pair) for pair in [("bf16", "bf16"), *FORMATS]}
        calls = {"/".join(pair): partial(_per_batch, kv) for pair, kv in timed.items()}
        taken = interleave({"limit": linear, **calls}, context.rounds(20, 6))
        plain = taken["bf16/bf16"]
        for (k, v), kv in timed.items():
            name = f"{k}/{v}"
            for limit_name, limits in (
                (linear.name, taken["limit"]),
                ("bf16_pages", [kv.kv_bytes / s / 1e9 for s in plain]),
            ):
                yield rate_result(
                    "decode_format",
                    {
                        "heads": str(heads), "context": tokens, "batch": batch, "page": page,
                        "k": k, "v": v, "load": round(os.getloadavg()[0], 1),
                    },
                    taken[name],
                    kv.kv_bytes / 1e9,
                    "GB/s",
                    limit_name,
                    limits,
                    bytes=kv.pool.page_bytes * batch * (tokens // page),
                    flops=kv.flops,
                    isa=kernels.isa(),
                    threads=1,
                )  # fmt: skip
