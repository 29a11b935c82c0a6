"""Small blocks over a tcp link: 256 of 4 KiB at random places, against raw TCP."""

from __future__ import annotations

from collections.abc import Iterator

from harness import Context, Result

from cases.link_tcp import blocks

BLOCK, COUNT, BATCHES = 4 << 10, 256, 50


def run(context: Context) -> Iterator[Result]:
    """GB/s and CPU seconds per GB."""
    yield from blocks("link_tcp_small", context, BLOCK, COUNT, BATCHES)
