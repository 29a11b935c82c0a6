"""Decode attention: bytes of KV per second of one thread, against a linear read of memory."""

from __future__ import annotations

from collections.abc import Iterator

from harness import Context, Result, interleave, rate_result, seconds
from kvcore import kernels
from limits import LinearRead
from workloads import Heads, RotatingKv

TOUCHED_BYTES = 300 << 20
SHAPES = [(Heads(32, 8, 128), 8192), (Heads(9, 3, 64), 8192)]


def run(context: Context) -> Iterator[Result]:
    """One result per shape."""
    linear = LinearRead()
    for heads, tokens in SHAPES:
        one = tokens * heads.kv * heads.dim * 4
        kv = RotatingKv(heads, tokens, 1, copies=-(-TOUCHED_BYTES // one))
        rounds = context.rounds(160, 40)
        taken = interleave(
            {"ours": lambda kv=kv: seconds(kv.attend), "limit": linear},
            rounds,
            warmup=len(kv.plans),
        )
        yield rate_result(
            "decode_attention",
            {"heads": str(heads), "context": tokens, "batch": 1, "format": "bf16"},
            taken["ours"],
            kv.kv_bytes / 1e9,
            "GB/s",
            linear.name,
            taken["limit"],
            bytes=kv.kv_bytes,
            flops=kv.flops,
            isa=kernels.isa(),
            threads=1,
        )
