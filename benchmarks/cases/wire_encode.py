"""Encoding on the way: what a hand-over to k4 + v4 pages sends, and what it costs the prefill.

A 3,000-token prompt in SmolLM2's geometry is prefilled in chunks: per layer the real append,
publish and attend, then a fixed amount of arithmetic on the same thread in place of projections and
MLP. A second process receives over shm or tcp into pages of k4 + v4, the first and the last of
bf16. Three lines each: bytes sent of all bytes in bf16, of the whole request and of the compressed
pages alone; and the time of the prefill beside that of one that sends nothing, alternating.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
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


def measure(address: str, prefill: Prefill, rounds: int) -> Iterator[Result]:
    """The three lines of one link."""
    receiver = overlap.Receiver(address)
    spec = prefill.pool.spec
    pages = -(-prefill.tokens // spec.page_size)
    in_bf16 = pages * spec.num_layers * spec.slice_bytes
    open_pages = 2 * spec.num_layers * spec.slice_bytes
    alone, sending, stats, other_cpu = [], [], [], []
    prefill.run(None)
    with stream.Endpoint(prefill.pool, key=overlap.KEY) as endpoint:
        overlap.hand_over(receiver, endpoint, prefill, encode=True)  # connects, warms up
        for _ in range(rounds):
            alone.append(prefill.run(None))
            before = time.process_time() - time.thread_time()
            stats.append(overlap.hand_over(receiver, endpoint, prefill, encode=True))
            other_cpu.append(time.process_time() - time.thread_time() - before)
            sending.append(stats[-1]["prefill_s"])
    receiver.close()
    sent = stats[0]["bytes"]
    params = {
        "transport": stats[0]["transport"],
        "tokens": prefill.tokens,
        "io_cpu_ms": round(1e3 * median(other_cpu), 1),  # encoding, checksums, sending
        "exposed_ms": round(1e3 * median([s["exposed_s"] for s in stats]), 2),
        "arrived_fraction": round(median([s["arrived_fraction"] for s in stats]), 4),
    }
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
    slowed = median(sending) / median(alone)
    best = min(sending) / min(alone)
    yield Result(
        params={**params, "part": "prefill"}, value=slowed, unit="times as long",
        limit_name="allowed at most", limit=MOST_SLOWED, ratio=MOST_SLOWED / slowed,
        best_ratio=MOST_SLOWED / best, **common,
    )  # fmt: skip


def run(context: Context) -> Iterator[Result]:
    """Lines of both links."""
    prefill = Prefill(QUICK_TOKENS if context.quick else TOKENS)
    with tempfile.TemporaryDirectory() as directory:
        for address in (f"shm:{Path(directory)}/s.sock", "tcp:127.0.0.1:0"):
            yield from measure(address, prefill, context.rounds(7, 2))
