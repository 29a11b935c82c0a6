"""Scattered blocks over a shm link: one copy by the owner, against a copy of the same blocks.

The limit is taken in the owner's process between the very same buffers, the writer's being lent to
it for that: the better one of libc's memcpy and stores past the caches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from harness import Context, Result, median
from link_pair import paged, pair

from cases.link_tcp import interleaved, line

BUFFER = 256 << 20
TOTAL = 64 << 20
BATCHES = 4


def run(context: Context) -> Iterator[Result]:
    """GB/s for blocks of 64 KiB and 256 KiB."""
    for block in (64 << 10, 256 << 10):
        segments = paged(block, TOTAL // block, BUFFER)
        with pair("shm", BUFFER) as p:
            p.ask(do="lend_to_copy", grant=p.region.grant(rights="r").token.hex(),
                  segments=segments)  # fmt: skip
            ways: dict[str, Callable[[], float]] = {
                "ours": lambda s=segments: p.write(s, BATCHES),  # type: ignore[misc]
                "memcpy": lambda: float(p.ask(do="copy", batches=BATCHES, past_caches=False)),
                "stores past the caches": lambda: float(
                    p.ask(do="copy", batches=BATCHES, past_caches=True)
                ),
            }
            times, _ = interleaved(p, ways, context.rounds(15, 4))
            p.write(segments, 1)
            p.verify(segments)
        limit = min(("memcpy", "stores past the caches"), key=lambda way: median(times[way]))
        rate = {way: TOTAL * BATCHES / median(t) / 1e9 for way, t in times.items()}
        yield line(
            "link_shm", {"block_bytes": block, "blocks": TOTAL // block}, times["ours"],
            TOTAL * BATCHES, rate["ours"], "GB/s", f"{limit}, the same buffers", rate[limit],
            rate["ours"] / rate[limit], min(times[limit]) / min(times["ours"]),
        )  # fmt: skip
