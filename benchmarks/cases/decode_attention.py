"""Decode attention: bytes of KV per second, against a linear read of memory by as many threads.

Where a page of one layer is a short run of bytes (9/3x64: 48 KiB, 192 KiB a frame) frames lie in a
random order, and a second result stands against a read in such runs.

A repetition is one pass over more KV than the caches hold, next to a linear read of as many bytes:
one call alone would mostly time its own cold start after that read. Peers read KV of the same shape
and size in their own layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from harness import Context, Result, interleave, peer_results, rate_result, seconds
from kvcore import kernels
from kvcore.pages import PageSpec
from limits import MIB, LinearRead, RandomRead
from workloads import RotatingKv, parse_shape

from cases.peer_ops import PeerOps

PASS_MIB = 256
SHAPES = ("32/8x128:1x8192", "32/8x128:8x8192", "32/8x128:32x1024", "9/3x64:1x8192")


def run(context: Context) -> Iterator[Result]:
    """One result per number of threads and shape, and one per peer."""
    for threads in context.threads or (1,):
        linear = LinearRead(part_mib=PASS_MIB, threads=threads)
        with PeerOps(context, threads) as peers:
            for shape in context.shapes or SHAPES:
                yield from measure(context, shape, threads, linear, peers)


def measure(
    context: Context, shape: str, threads: int, linear: LinearRead, peers: PeerOps
) -> Iterator[Result]:
    """Ours, the limit and the peers in turn."""
    heads, batch, tokens = parse_shape(shape)
    size = 4 if context.dtype == "f32" else 2
    copies = -(-PASS_MIB * MIB // (batch * tokens * heads.kv * heads.dim * 2 * size))
    spec = PageSpec(1, heads.kv, heads.dim, page_size=64, format=context.dtype)
    scattered = spec.extent_pages > 1
    kv = RotatingKv(
        heads, tokens, 1, copies=copies, batch=batch, threads=threads, dtype=context.dtype,
        scattered=scattered,
    )  # fmt: skip
    request = {"op": "decode", "batch": batch, "context": tokens, "pass_mib": PASS_MIB}
    timed: dict[str, Callable[[], float]] = {
        "ours": lambda: seconds(kv.attend_all),
        "limit": linear,
        **({"runs": RandomRead(spec.frame_bytes, PASS_MIB, threads)} if scattered else {}),
        **peers.timed(heads, request),
    }
    taken = interleave(timed, context.rounds(40, 10))
    num_bytes, flops = (len(kv.plans) * work for work in (kv.kv_bytes, kv.flops))
    params = {"heads": str(heads), "context": tokens, "batch": batch, "format": context.dtype}
    ours, limit, runs = taken.pop("ours"), taken.pop("limit"), taken.pop("runs", None)
    work = num_bytes / 1e9, "GB/s"
    rest = {"bytes": num_bytes, "flops": flops, "isa": kernels.isa(), "threads": threads}
    name = linear.name
    yield rate_result("decode_attention", params, ours, *work, name, limit, **rest)
    if runs is not None:
        name = RandomRead.name
        yield rate_result("decode_attention", params, ours, *work, name, runs, **rest)
    yield from peer_results("decode_attention", params, ours, *work, taken, **rest)
