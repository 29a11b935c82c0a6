"""Decoding with a sequence pruned to a ragged quarter of its tokens, against the whole sequence.

A repetition is one step: tables prepared, a token appended to every head, attention of all layers.
``bytes_share`` is what the pool holds for the pruned sequence over what it holds for the whole one,
headers, rounding and part-filled pages counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from harness import Context, Result, interleave, now, seconds, time_result
from kvcore import head_pages, kernels
from kvcore.pages import PageClass, PageSpec, Pool
from workloads import Heads, fill

TOKENS, SHARE = 8192, 0.25
# The second has 32 layers: they are alike, and need not be in memory all.
SHAPES = [("smollm2-135m", 30, Heads(9, 3, 64)), ("llama-3-8b", 8, Heads(32, 8, 128))]
FORMATS = [("bf16", "bf16"), ("k4", "v4")]


def run(context: Context) -> Iterator[Result]:
    """One result per shape and format of the full head pages; the limit is the unpruned bf16."""
    for name, layers, heads in SHAPES:
        for threads in context.threads or (1,):
            yield from measure(context, name, PageSpec(layers, heads.kv, heads.dim), heads, threads)


def ragged(layers: int, heads: int) -> list[list[np.ndarray]]:
    """Random tokens for every head, different numbers of them, SHARE of all on average."""
    rng = np.random.default_rng(0)
    shares = rng.uniform(0.2, 1.8, (layers, heads))
    counts = np.round(shares * SHARE / shares.mean() * TOKENS).astype(int)
    return [[np.sort(rng.choice(TOKENS, n, replace=False)) for n in row] for row in counts]


def measure(
    context: Context, name: str, spec: PageSpec, heads: Heads, threads: int
) -> Iterator[Result]:
    layers = spec.num_layers
    source = Pool(spec, TOKENS // spec.page_size // spec.extent_pages)
    fill(source)
    pages = source.alloc(TOKENS // spec.page_size)
    whole_bytes = source.stats().used_bytes
    team = kernels.ThreadPool(threads)
    plain = kernels.AttentionPlan(source, heads.q, threads=team)
    table, kept = np.array([pages], np.int32), ragged(layers, heads.kv)
    q = torch.randn(1, heads.q, heads.dim).bfloat16()
    k, v = torch.randn(2, 1, heads.kv, heads.dim).bfloat16()
    out = torch.empty_like(q)

    def whole() -> float:
        return seconds(lambda: step(plain, lambda: plain.prepare([0, 1], [TOKENS], table)))

    q_row, kv_row, code = heads.q * heads.dim, heads.kv * heads.dim, kernels.DTYPE_CODES["bfloat16"]

    def step(
        plan: kernels.AttentionPlan | head_pages.HeadAttention, prepare: Callable[[], None]
    ) -> None:
        prepare()
        for layer in range(layers):
            plan.append_ptr(layer, k.data_ptr(), kv_row, v.data_ptr(), kv_row, code)
            plan.attend_ptr(layer, q.data_ptr(), q_row, out.data_ptr(), q_row, 0, code)

    room = int(1.3 * layers * heads.kv * (SHARE * TOKENS / spec.page_size + 2))
    for formats in FORMATS:
        pool = head_pages.head_pool(spec, room, page_ids=4 * room)
        start = now()
        sequence = head_pages.compact(source, pages, TOKENS, kept, pool)
        compacting = now() - start
        classes = head_pages.head_classes(pool, PageClass(spec, [[formats] * heads.kv] * layers))
        sequence.seal(classes)
        used_bytes = pool.stats().used_bytes
        sequence.grow(1)
        plan = head_pages.HeadAttention(pool, layers, heads.kv, heads.q, threads=team)

        def ours(plan=plan, sequence=sequence) -> float:
            return seconds(lambda: step(plan, lambda: plan.prepare([sequence])))

        taken = interleave({"ours": ours, "whole": whole}, context.rounds(60, 15), warmup=2)
        yield time_result(
            "head_pages",
            {"model": name, "layers": layers, "heads": str(heads), "context": TOKENS,
             "formats": "/".join(formats), "bytes_share": round(used_bytes / whole_bytes, 4),
             "compact_ms": round(1e3 * compacting, 1)},
            taken["ours"],
            "ms",
            "unpruned_bf16",
            taken["whole"],
            bytes=used_bytes,
            flops=int(4 * SHARE * TOKENS * layers * heads.q * heads.dim),
            isa=kernels.isa(),
            threads=threads,
        )  # fmt: skip
