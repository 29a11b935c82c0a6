"""Scattered blocks over a shm link: one copy by the owner, against memcpy of the same blocks."""

from __future__ import annotations

import ctypes
import mmap
import time
from collections.abc import Callable, Iterator

import numpy as np
from harness import Context, Result, median
from link_pair import Segments, paged, pair

from cases.link_tcp import interleaved, line

BUFFER = 256 << 20
TOTAL = 64 << 20
BATCHES = 4


class Copy:
    """memcpy of blocks between two buffers of shared memory in this process."""

    def __init__(self, segments: Segments) -> None:
        self.maps = [mmap.mmap(-1, BUFFER) for _ in range(2)]
        arrays = [np.frombuffer(m, np.uint8) for m in self.maps]
        for array in arrays:
            array[:] = 1
        source, target = (a.ctypes.data for a in arrays)
        self.calls = [(target + b, source + a, n) for a, b, n in segments]

    def run(self, batches: int) -> float:
        """Seconds of that many batches."""
        start = time.perf_counter()
        for _ in range(batches):
            for call in self.calls:
                ctypes.memmove(*call)
        return time.perf_counter() - start


def run(context: Context) -> Iterator[Result]:
    """GB/s for blocks of 64 KiB and 256 KiB."""
    for block in (64 << 10, 256 << 10):
        segments = paged(block, TOTAL // block, BUFFER)
        copy = Copy(segments)
        with pair("shm", BUFFER) as p:
            ways: dict[str, Callable[[], float]] = {
                "ours": lambda s=segments: p.write(s, BATCHES),  # type: ignore[misc]
                "memcpy": lambda c=copy: c.run(BATCHES),  # type: ignore[misc]
            }
            times, _ = interleaved(p, ways, context.rounds(15, 4))
            p.write(segments, 1)
            p.verify(segments)
        rate = {way: TOTAL * BATCHES / median(t) / 1e9 for way, t in times.items()}
        yield line(
            "link_shm", {"block_bytes": block, "blocks": TOTAL // block}, times["ours"],
            TOTAL * BATCHES, rate["ours"], "GB/s", "memcpy of the same blocks", rate["memcpy"],
            rate["ours"] / rate["memcpy"],
        )  # fmt: skip
