"""Decode attention: bytes of KV per second of one thread, against a linear read of memory.

A repetition is one pass over more KV than the caches hold, next to a linear read of as many bytes:
one call alone would mostly time its own cold start after that read.
"""

from __future__ import annotations

from collections.abc import Iterator

from harness import Context, Result, interleave, rate_result, seconds
from kvcore import kernels
from limits import MIB, LinearRead
from workloads import Heads, RotatingKv

PASS_MIB = 256
SHAPES = [  # heads, batch, context
    (Heads(32, 8, 128), 1, 8192),
    (Heads(32, 8, 128), 8, 8192),
    (Heads(32, 8, 128), 32, 1024),
    (Heads(9, 3, 64), 1, 8192),
]


def run(context: Context) -> Iterator[Result]:
    """One result per shape."""
    linear = LinearRead(part_mib=PASS_MIB)
    for heads, batch, tokens in SHAPES:
        one = batch * tokens * heads.kv * heads.dim * 4
        kv = RotatingKv(heads, tokens, 1, copies=-(-PASS_MIB * MIB // one), batch=batch)
        taken = interleave(
            {"ours": lambda kv=kv: seconds(kv.attend_all), "limit": linear},
            context.rounds(40, 10),
        )
        num_bytes, flops = (len(kv.plans) * work for work in (kv.kv_bytes, kv.flops))
        yield rate_result(
            "decode_attention",
            {"heads": str(heads), "context": tokens, "batch": batch, "format": "bf16"},
            taken["ours"],
            num_bytes / 1e9,
            "GB/s",
            linear.name,
            taken["limit"],
            bytes=num_bytes,
            flops=flops,
            isa=kernels.isa(),
            threads=1,
        )
