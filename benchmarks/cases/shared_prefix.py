"""Decoding sequences that share a prompt: one pass over its pages, and a pass for each of them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from harness import Context, Result, interleave, rate_result, seconds
from kvcore import kernels, pages
from workloads import Heads, fill

SEQUENCES, PREFIX, TAIL = 32, 8192, 64
SHAPES = [Heads(32, 8, 128), Heads(9, 3, 64), Heads(8, 8, 128)]


def run(context: Context) -> Iterator[Result]:
    """One result per shape; the limit is the same batch with a plan for every sequence."""
    for heads in SHAPES:
        spec = pages.PageSpec(1, heads.kv, heads.dim, format="bf16")
        page = spec.page_size
        frames = PREFIX // page + SEQUENCES * (TAIL // page) * spec.extent_pages
        pool = pages.Pool(spec, frames)
        fill(pool)
        prefix = pool.alloc(PREFIX // page)[: PREFIX // page]
        table = np.array(
            [[*prefix, *pool.alloc(TAIL // page)[: TAIL // page]] for _ in range(SEQUENCES)],
            np.int32,
        )
        lengths = np.full(SEQUENCES, PREFIX + TAIL, np.int32)
        threads = kernels.ThreadPool(1)
        together = kernels.AttentionPlan(pool, heads.q, threads=threads)
        together.prepare(np.arange(SEQUENCES + 1, dtype=np.int32), lengths, table)
        alone = [kernels.AttentionPlan(pool, heads.q, threads=threads) for _ in table]
        for plan, row in zip(alone, table, strict=True):
            plan.prepare(np.array([0, 1], np.int32), lengths[:1], row[None])
        q = torch.randn(SEQUENCES, heads.q, heads.dim).bfloat16()
        out, want = torch.empty_like(q), torch.empty_like(q)

        def each(alone=alone, q=q, want=want) -> None:
            for i, plan in enumerate(alone):
                plan.attend(0, q[i : i + 1], want[i : i + 1])

        def one(together=together, q=q, out=out) -> None:
            together.attend(0, q, out)

        one()
        each()
        if not torch.equal(out, want):
            raise RuntimeError("attention over a shared prefix differs from attention alone")
        flops = 4 * SEQUENCES * (PREFIX + TAIL) * heads.q * heads.dim
        taken = interleave(
            {"ours": lambda one=one: seconds(one), "limit": lambda each=each: seconds(each)},
            context.rounds(20, 5),
        )
        yield rate_result(
            "shared_prefix",
            {"heads": str(heads), "sequences": SEQUENCES, "prefix": PREFIX, "tail": TAIL},
            taken["ours"],
            flops / 1e9,
            "GFLOP/s",
            "without_sharing",
            [flops / 1e9 / taken_ for taken_ in taken["limit"]],
            bytes=(PREFIX + SEQUENCES * TAIL) * heads.kv * heads.dim * 4,
            flops=flops,
            isa=kernels.isa(),
            threads=1,
        )
