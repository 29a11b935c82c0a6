"""A prefill and a decode endpoint in one process over a chosen link, with stamped pages."""

from __future__ import annotations

import contextlib
import os
import pathlib
import select
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from kvcore import stream
from kvcore.pages import Pool

from support.stream_pages import alloc, make_pool, stamp_pages


@dataclass
class Side:
    pool: Pool
    endpoint: stream.Endpoint
    events: list[tuple[Any, ...]] = field(default_factory=list)

    def event(self, request: bytes, timeout_s: float = 5.0) -> tuple[Any, ...]:
        """The event of this hand-over; those of others wait."""
        end = time.monotonic() + timeout_s
        while True:
            for event in self.events:
                if event[1] == request:
                    self.events.remove(event)
                    return event
            left = end - time.monotonic()
            assert left > 0, f"no event of {request.hex()} within {timeout_s} s"
            select.select([self.endpoint.event_fd], [], [], min(left, 0.1))
            self.events.extend(self.endpoint.poll())

    def idle(self, timeout_s: float = 2.0) -> bool:
        """Whether no page is held by a transfer any more, soon."""
        end = time.monotonic() + timeout_s
        while self.pool.stats().io_pages and time.monotonic() < end:
            time.sleep(0.002)
        return self.pool.stats().io_pages == 0


@dataclass
class Pair:
    prefill: Side
    decode: Side

    def start(
        self, tokens: int, stamp: int, deadline_s: float = 30.0
    ) -> tuple[stream.Sender, bytes, list[int], list[int]]:
        """A hand-over that is open: sender, request, the decode side's pages, the prefill's."""
        request = os.urandom(16)
        to, _ = alloc(self.decode.pool, tokens)
        pages, _ = alloc(self.prefill.pool, tokens)
        stamp_pages(self.prefill.pool, pages, stamp)
        grant = self.decode.endpoint.grant(request, to, tokens, deadline_s=deadline_s)
        return self.prefill.endpoint.open(grant, pages), request, to, pages


def push(sender: stream.Sender, tokens: int, num_layers: int) -> None:
    """Everything, and the commit."""
    for layer in range(num_layers):
        sender.publish_upto(layer, tokens)
    sender.mark()
    sender.commit(b"payload")


@contextlib.contextmanager
def stream_pair(folder: pathlib.Path, link: str = "tcp", **options: Any) -> Iterator[Pair]:
    """``options`` go to both endpoints; ``link`` is "tcp" or "shm"."""
    address = f"shm:{folder}/decode.sock" if link == "shm" else "tcp:127.0.0.1:0"
    theirs, ours = make_pool(), make_pool()
    with (
        stream.Endpoint(theirs, [address], **options) as decode,
        stream.Endpoint(ours, **options) as prefill,
    ):
        yield Pair(Side(ours, prefill), Side(theirs, decode))
