"""Scattered blocks over a tcp link between two processes, against one plain TCP connection.

Two lines: GB/s of 1024 x 64 KiB at random places (limit: the same bytes, contiguous, over a plain
socket in the same run), and CPU seconds per GB of both processes together. ``--peer
mooncake=PYTHON`` adds Mooncake's Transfer Engine over the same blocks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

from harness import Context, Result, median, percentile
from link_pair import Pair, paged, pair
from peers.transfer import TransferPeer

BUFFER = 256 << 20
BLOCK, COUNT, BATCHES = 64 << 10, 1024, 4


def line(
    name: str, params: dict[str, object], times: list[float], nbytes: int, value: float, unit: str,
    limit_name: str, limit: float, ratio: float,
) -> Result:  # fmt: skip
    """One result of a link case."""
    return Result(
        case=name, params=params, median=median(times), p99=percentile(times, 99),
        best=min(times), bytes=nbytes, flops=0, value=value, unit=unit, limit_name=limit_name,
        limit=limit, ratio=ratio, best_ratio=ratio, isa="none", threads=1, repetitions=len(times),
    )  # fmt: skip


def interleaved(
    p: Pair, ways: dict[str, Callable[[], float]], rounds: int
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Seconds of every call, and CPU seconds in all, by way, called in turn after a warm-up."""
    for call in ways.values():
        call()
    times: dict[str, list[float]] = {way: [] for way in ways}
    cpu = dict.fromkeys(ways, 0.0)
    for _ in range(rounds):
        for way, call in ways.items():
            before = p.cpu()
            times[way].append(call())
            cpu[way] += p.cpu() - before
    return times, cpu


def blocks(
    name: str, context: Context, block: int, count: int, batches: int, limit: str
) -> Iterator[Result]:
    """Ours against the plain connection and the peers, for one size of blocks."""
    segments = paged(block, count, BUFFER)
    nbytes = block * count * batches
    rounds = context.rounds(15, 4)
    params: dict[str, object] = {"block_bytes": block, "blocks": count, "system": "kvcore"}
    with pair("tcp", BUFFER) as p:
        ways: dict[str, Callable[[], float]] = {
            "ours": lambda: p.write(segments, batches),
            "plain": lambda: p.plain(block * count, batches),
        }
        peer = TransferPeer.of(context, segments, BUFFER)
        if peer is not None:
            ways["mooncake"] = lambda: peer.write(batches)
        times, cpu = interleaved(p, ways, rounds)
        p.write(segments, 1)
        p.verify(segments)
        if peer is not None:
            peer.close()
    rate = {way: nbytes / median(t) / 1e9 for way, t in times.items()}
    per_gb = {way: total / (rounds * nbytes / 1e9) for way, total in cpu.items()}
    yield line(name, params, times["ours"], nbytes, rate["ours"], "GB/s", limit, rate["plain"],
               rate["ours"] / rate["plain"])  # fmt: skip
    yield line(name, params, times["ours"], nbytes, per_gb["ours"], "CPU s/GB", limit,
               per_gb["plain"], per_gb["plain"] / per_gb["ours"])  # fmt: skip
    if "mooncake" in rate:
        theirs = {**params, "system": "mooncake"}
        yield line(name, theirs, times["mooncake"], nbytes, rate["mooncake"], "GB/s", "kvcore",
                   rate["ours"], rate["mooncake"] / rate["ours"])  # fmt: skip


def run(context: Context) -> Iterator[Result]:
    """GB/s and CPU seconds per GB."""
    if not sys.platform.startswith("linux"):
        raise SystemExit("link_tcp needs Linux")
    yield from blocks("link_tcp", context, BLOCK, COUNT, BATCHES, "one plain TCP connection")
