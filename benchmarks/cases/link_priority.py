"""The decode-critical class under saturating background traffic on the same link, against idle.

One write of 64 KiB of class 0 every few milliseconds; its time from post to completion, p99, alone
and while large writes of the lowest class fill the link. Idle and busy stretches alternate.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator

from harness import Context, Result, percentile
from kvcore.transport import BACKGROUND, Op
from link_pair import Pair, Segments, paged, pair

from cases.link_tcp import line

BUFFER = 256 << 20
EVERY_S = 0.003
BULK_UNDER_WAY = 3


def stretch(p: Pair, segments: Segments, count: int, bulk: Segments | None) -> list[float]:
    """Seconds of `count` small writes, with background traffic or without."""
    under_way: deque[Op] = deque()
    taken = []
    for _ in range(count):
        while bulk is not None and len(under_way) < BULK_UNDER_WAY:
            under_way.append(p.link.write(p.region, bulk, p.grant, priority=BACKGROUND))
        start = time.perf_counter()
        p.link.write(p.region, segments, p.grant).wait(30)
        taken.append(time.perf_counter() - start)
        while under_way and under_way[0].done:
            under_way.popleft()
        time.sleep(EVERY_S)
    for op in under_way:
        op.wait(30)
    return taken


def run(context: Context) -> Iterator[Result]:
    """p99 in microseconds, over tcp and shm."""
    small, bulk = [(0, 0, 64 << 10)], paged(64 << 10, 1024, BUFFER)
    count = context.rounds(400, 100)
    for scheme in ("tcp", "shm"):
        with pair(scheme, BUFFER) as p:
            idle: list[float] = []
            busy: list[float] = []
            stretch(p, small, 50, bulk)
            for _ in range(context.rounds(5, 2)):
                idle += stretch(p, small, count, None)
                busy += stretch(p, small, count, bulk)
        alone, loaded = (percentile(t, 99) * 1e6 for t in (idle, busy))
        yield line(
            "link_priority", {"scheme": scheme, "block_bytes": 64 << 10}, busy, 64 << 10,
            loaded, "us", "p99 without background traffic", alone, alone / loaded,
        )  # fmt: skip
