"""Prefill attention: causal chunks, GFLOP/s against the multiply-add peak, and against peers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from harness import Context, Result, interleave, peer_results, rate_result, seconds
from kvcore import kernels
from limits import Flops, has_dot_bf16
from workloads import RotatingKv, parse_shape

from cases.peer_ops import PeerOps

SHAPES = (
    "32/8x128:512x2048", "32/8x128:512x8192", "32/8x128:2048x2048", "32/8x128:2048x8192",
    "32/8x128:512x32768", "9/3x64:512x3072",
)  # fmt: skip


def run(context: Context) -> Iterator[Result]:
    """One result per number of threads and (chunk, context, the chunk included), and per peer."""
    bf16 = context.dtype == "bf16" and has_dot_bf16() and kernels.isa() == "avx512"
    peak = Flops(bf16=bf16)
    for threads in context.threads or (1,):
        with PeerOps(context, threads) as peers:
            for shape in context.shapes or SHAPES[: 2 if context.quick else None]:
                yield from measure(context, shape, threads, peak, peers)


def measure(
    context: Context, shape: str, threads: int, peak: Flops, peers: PeerOps
) -> Iterator[Result]:
    """Ours, the limit and the peers in turn."""
    heads, chunk, tokens = parse_shape(shape)
    kv = RotatingKv(heads, tokens, chunk, copies=2, threads=threads, dtype=context.dtype)
    timed: dict[str, Callable[[], float]] = {
        "ours": lambda: seconds(kv.attend),
        "limit": peak,
        **peers.timed(heads, {"op": "prefill", "chunk": chunk, "context": tokens}),
    }
    taken = interleave(timed, context.rounds(12 if kv.flops < 2e11 else 6, 4))
    params = {"heads": str(heads), "chunk": chunk, "context": tokens, "format": context.dtype}
    ours, limit = taken.pop("ours"), [threads * one for one in taken.pop("limit")]
    work = kv.flops / 1e9, "GFLOP/s"
    rest = {"bytes": kv.kv_bytes, "flops": kv.flops, "isa": kernels.isa(), "threads": threads}
    name = peak.name if threads == 1 else f"{threads} x {peak.name}"
    yield rate_result("prefill_attention", params, ours, *work, name, limit, **rest)
    yield from peer_results("prefill_attention", params, ours, *work, taken, **rest)
