"""Encoding on the way: what a hand-over to k4 + v4 pages sends, and what it costs the prefill.

A 3,000-token prompt in SmolLM2's geometry is prefilled in chunks: per layer the real append,
publish and attend, then a fixed amount of arithmetic on the same thread in place of projections and
MLP. A second process receives over shm or tcp into pages of k4 + v4, the first and the last of
bf16. Lines each: bytes sent of all bytes in bf16, of the whole request and of the compressed pages
alone; the time of the prefill beside that of one that sends nothing, and of one that streams bf16,
in turn; and CPU seconds, of the prefill's own thread (what sharing caches costs) and of all of
them: where no core idles the prefill cannot be slowed by more than that.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from harness import Context, Result, median, percentile
from kvcore import kernels, stream

from cases import stream_overlap as overlap

TOKENS = 3000
QUICK_TOKENS = 1024
MOST_OF_REQUEST = 0.305  # of 3,000 tokens; the two open pages weigh more in shorter ones
MOST_OF_SEALED = 0.275
MOST_SLOWED = 1.05


class Prefill(overlap.Prefill):
    """As busy as a model: every layer has its share of arithmetic, whatever else runs."""

    def __init__(self, tokens: int) -> None:
        super().__init__(tokens)
        self.values = np.linspace(-1, 1, 1 << 15, dtype=np.float32)
        start = time.perf_counter()
        for _ in range(50):
            np.tanh(self.values)
        each = (time.perf_counter() - start) / 50
        self.repeats = max(1, round(0.75 * overlap.LAYER_S / each))

    def rest_of_layer(self, due: float) -> None:
        for _ in range(self.repeats):
            np.tanh(self.values)


@dataclass
class Taken:
    """Of one way, over the rounds: seconds of the prefill, of its thread's and all threads' CPU."""

    wall: list[float] = field(default_factory=list)
    thread_cpu: list[float] = field(default_factory=list)
    all_cpu: list[float] = field(default_factory=list)

    def add(self, work: Callable[[], float]) -> None:
        thread, process = time.thread_time(), time.process_time()
        self.wall.append(work())
        self.thread_cpu.append(time.thread_time() - thread)
        self.all_cpu.append(time.process_time() - process)

    def other_cpu(self) -> float:
        """Of the other threads: encoding, checksums, sending."""
        return median([a - t for a, t in zip(self.all_cpu, self.thread_cpu, strict=True)])


def measure(address: str, prefill: Prefill, rounds: int) -> Iterator[Result]:
    """The lines of one link."""
    receiver = overlap.Receiver(address)
    spec = prefill.pool.spec
    pages = -(-prefill.tokens // spec.page_size)
    in_bf16 = pages * spec.num_layers * spec.slice_bytes
    open_pages = 2 * spec.num_layers * spec.slice_bytes
    ways = {"alone": Taken(), "bf16": Taken(), "encoded": Taken()}
    stats: list[Any] = []
    prefill.run(None)
    keepalive_s = overlap.KEEPALIVE_S
    with stream.Endpoint(prefill.pool, key=overlap.KEY, keepalive_s=keepalive_s) as endpoint:

        def hand_over(encode: bool) -> float:
            done = overlap.hand_over(receiver, endpoint, prefill, encode)
            if encode:
                stats.append(done)
            return float(done["prefill_s"])

        hand_over(True)  # connects, warms up
        stats.clear()
        for _ in range(rounds):
            ways["alone"].add(lambda: prefill.run(None))
            ways["bf16"].add(lambda: hand_over(False))
            ways["encoded"].add(lambda: hand_over(True))
    receiver.close()
    sent = stats[0]["bytes"]
    params = {
        "transport": stats[0]["transport"],
        "tokens": prefill.tokens,
        "io_cpu_ms": round(1e3 * ways["encoded"].other_cpu(), 1),
        "io_cpu_bf16_ms": round(1e3 * ways["bf16"].other_cpu(), 1),
        "exposed_ms": round(1e3 * median([s["exposed_s"] for s in stats]), 2),
        "arrived_fraction": round(median([s["arrived_fraction"] for s in stats]), 4),
    }
    sending = ways["encoded"].wall
    common: dict[str, Any] = dict(
        case="wire_encode", median=median(sending), p99=percentile(sending, 99),
        best=min(sending), bytes=sent, flops=0, isa=kernels.isa(), threads=1, repetitions=rounds,
    )  # fmt: skip
    of_request = sent / in_bf16
    of_sealed = (sent - open_pages) / (in_bf16 - open_pages)
    most = MOST_OF_REQUEST
    if prefill.tokens < TOKENS:
        most = (open_pages + MOST_OF_SEALED * (in_bf16 - open_pages)) / in_bf16
    for part, value, limit in (
        ("request", of_request, most),
        ("sealed", of_sealed, MOST_OF_SEALED),
    ):
        yield Result(
            params={**params, "part": part}, value=value, unit="of bf16 bytes",
            limit_name="allowed at most", limit=limit, ratio=limit / value,
            best_ratio=limit / value, **common,
        )  # fmt: skip
    for part, taken, base in (
        ("prefill", ways["encoded"].wall, ways["alone"].wall),
        ("prefill, of one that streams bf16", ways["encoded"].wall, ways["bf16"].wall),
        ("CPU of the prefill's thread", ways["encoded"].thread_cpu, ways["alone"].thread_cpu),
        ("CPU of all threads", ways["encoded"].all_cpu, ways["alone"].all_cpu),
    ):
        each = [t / b for t, b in zip(taken, base, strict=True)]  # of neighbours in time
        yield Result(
            params={**params, "part": part}, value=median(each), unit="times as much",
            limit_name="allowed at most", limit=MOST_SLOWED, ratio=MOST_SLOWED / median(each),
            best_ratio=MOST_SLOWED * min(base) / min(taken), **common,
        )  # fmt: skip


def run(context: Context) -> Iterator[Result]:
    """Lines of both links."""
    prefill = Prefill(QUICK_TOKENS if context.quick else TOKENS)
    with tempfile.TemporaryDirectory() as directory:
        for address in (f"shm:{Path(directory)}/s.sock", "tcp:127.0.0.1:0"):
            yield from measure(address, prefill, context.rounds(7, 2))
