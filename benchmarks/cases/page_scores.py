"""Decode attention that also says how much attention each page had, against the same without."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from harness import Context, Result, interleave, rate_result, seconds
from kvcore import kernels
from workloads import Heads, RotatingKv

CONTEXT = 8192
SHAPES = [(Heads(32, 8, 128), 64), (Heads(32, 8, 128), 16), (Heads(9, 3, 64), 64)]


def run(context: Context) -> Iterator[Result]:
    """One result per shape and page size; the limit is the same decoding without page scores."""
    for heads, page in SHAPES:
        kv = RotatingKv(heads, CONTEXT, 1, 4, page)
        found = [torch.empty(plan.num_seqs, plan.max_pages) for plan in kv.plans]

        def on(kv=kv, found=found) -> None:
            for plan, scores in zip(kv.plans, found, strict=True):
                plan.attend(0, kv.q, kv.out, kv.lse, scores)

        def off(kv=kv) -> None:
            for plan in kv.plans:
                plan.attend(0, kv.q, kv.out, kv.lse)

        on()
        off()
        taken = interleave(
            {"ours": lambda on=on: seconds(on), "limit": lambda off=off: seconds(off)},
            context.rounds(60, 5),
        )
        total = kv.kv_bytes * len(kv.plans)
        yield rate_result(
            "page_scores",
            {"heads": str(heads), "context": CONTEXT, "page": page},
            taken["ours"],
            total / 1e9,
            "GB/s",
            "without_scores",
            [total / 1e9 / taken_ for taken_ in taken["limit"]],
            bytes=total,
            flops=kv.flops * len(kv.plans),
            isa=kernels.isa(),
            threads=1,
        )
