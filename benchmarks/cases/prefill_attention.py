"""Prefill attention: causal chunks, GFLOP/s of one thread against its multiply-add peak."""

from __future__ import annotations

from collections.abc import Iterator

from harness import Context, Result, interleave, rate_result, seconds
from kvcore import kernels
from limits import Flops, has_dot_bf16
from workloads import Heads, RotatingKv

HEADS = Heads(32, 8, 128)
SHAPES = [(512, 2048), (512, 8192), (2048, 2048), (2048, 8192)]


def run(context: Context) -> Iterator[Result]:
    """One result per (chunk, context with the chunk counted)."""
    peak = Flops(bf16=has_dot_bf16() and kernels.isa() == "avx512")
    for chunk, tokens in SHAPES[: 2 if context.quick else None]:
        kv = RotatingKv(HEADS, tokens, chunk, copies=2)
        rounds = context.rounds(12 if kv.flops < 2e11 else 6, 4)
        taken = interleave(
            {"ours": lambda kv=kv: seconds(kv.attend), "limit": peak},
            rounds,
        )
        yield rate_result(
            "prefill_attention",
            {"heads": str(HEADS), "chunk": chunk, "context": tokens, "format": "bf16"},
            taken["ours"],
            kv.flops / 1e9,
            "GFLOP/s",
            peak.name,
            taken["limit"],
            bytes=kv.kv_bytes,
            flops=kv.flops,
            isa=kernels.isa(),
            threads=1,
        )
