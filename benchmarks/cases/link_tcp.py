"""Scattered blocks over a tcp link between two processes, against raw TCP.

Two lines: GB/s of 1024 x 64 KiB at random places, and CPU seconds per GB of both processes
together. The limit of both is ``native/raw_tcp.cpp`` in the same run: the same places over one
connection between two processes, without checksums or a protocol. ``--peer mooncake=PYTHON``
and ``--peer nixl=PYTHON`` add Mooncake's Transfer Engine and NIXL (UCX over tcp).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

from harness import Context, Result, median, percentile
from link_pair import Pair, paged, pair
from native_limits import RawTcp, Segments
from peers.transfer import TransferPeer

BUFFER = 256 << 20
BLOCK, COUNT, BATCHES = 64 << 10, 1024, 4


def line(
    name: str, params: dict[str, object], times: list[float], nbytes: int, value: float, unit: str,
    limit_name: str, limit: float, ratio: float,
    best_ratio: float | None = None,
) -> Result:  # fmt: skip
    """One result of a link case."""
    return Result(
        case=name, params=params, median=median(times), p99=percentile(times, 99),
        best=min(times), bytes=nbytes, flops=0, value=value, unit=unit, limit_name=limit_name,
        limit=limit, ratio=ratio,
        best_ratio=ratio if best_ratio is None else best_ratio,
        isa="none", threads=1, repetitions=len(times),
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


def raw_ways(segments: Segments) -> dict[str, RawTcp]:
    """Which one is faster depends on who else wants the cores: the better one is the limit."""
    return {
        "raw TCP, pinned": RawTcp(segments, BUFFER, pinned=True),
        "raw TCP, send buffer 512 KiB": RawTcp(
            segments, BUFFER, pinned=False, send_buffer=512 << 10
        ),
    }


def blocks(name: str, context: Context, block: int, count: int, batches: int) -> Iterator[Result]:
    """Ours against raw TCP and the peers, for one size of blocks."""
    segments = paged(block, count, BUFFER)
    nbytes = block * count * batches
    rounds = context.rounds(15, 4)
    params: dict[str, object] = {"block_bytes": block, "blocks": count, "system": "kvcore"}
    raws = raw_ways(segments)
    peers = TransferPeer.all_of(context, segments, BUFFER)
    others: dict[str, RawTcp | TransferPeer] = {**raws, **peers}
    with pair("tcp", BUFFER) as p:
        ways: dict[str, Callable[[], float]] = {"ours": lambda: p.write(segments, batches)}
        for way, other in others.items():
            ways[way] = lambda other=other: other.run(batches)  # type: ignore[misc]
        times, cpu = interleaved(p, ways, rounds)
        p.write(segments, 1)
        p.verify(segments)
    for other in others.values():
        other.close()
    rate = {way: nbytes / median(t) / 1e9 for way, t in times.items()}
    best = {way: nbytes / min(t) / 1e9 for way, t in times.items()}
    per_gb = {way: raw.cpu_s / ((rounds + 1) * nbytes / 1e9) for way, raw in raws.items()}
    ours_cpu = cpu["ours"] / (rounds * nbytes / 1e9)
    fast, frugal = max(raws, key=rate.__getitem__), min(raws, key=per_gb.__getitem__)
    yield line(name, params, times["ours"], nbytes, rate["ours"], "GB/s", fast, rate[fast],
               rate["ours"] / rate[fast], best["ours"] / max(best[w] for w in raws))  # fmt: skip
    yield line(name, params, times["ours"], nbytes, ours_cpu, "CPU s/GB", frugal, per_gb[frugal],
               per_gb[frugal] / ours_cpu)  # fmt: skip
    for peer in peers:
        yield line(name, {**params, "system": peer}, times[peer], nbytes, rate[peer], "GB/s",
                   "kvcore", rate["ours"], rate[peer] / rate["ours"],
                   best[peer] / best["ours"])  # fmt: skip


def run(context: Context) -> Iterator[Result]:
    """GB/s and CPU seconds per GB."""
    if not sys.platform.startswith("linux"):
        raise SystemExit("link_tcp needs Linux")
    yield from blocks("link_tcp", context, BLOCK, COUNT, BATCHES)
