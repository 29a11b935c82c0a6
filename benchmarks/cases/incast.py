"""Eight senders at once to one receiver whose port is shaped by tbf, against one sender alone.

Every process is on a host of its own (tests/support/netns.py: network namespaces on one switch).
Lines for credits that the switch's queue holds, small ones under each congestion control the kernel
has (one that keeps less under way than the window, like bbr, is fair only where windows bind), and
credits that the queue does not hold, where TCP decides who gets what: goodput against one sender,
Jain's index, and bytes under way against the credits. Nothing may be lost; packets that TCP sent
again are named.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness import ROOT, Context, Result, median

sys.path.insert(0, str(ROOT / "tests"))

from support import netns
from support.incast import CONGESTION_CONTROL, SLACK, SWITCH_QUEUE, Incast, Outcome

SENDERS = 8
RATE = 50e6  # bytes/s on the wire
CREDITS, SMALL_CREDITS = 4 << 20, 1 << 20
LEAST_FAIRNESS = 0.95
SHALLOW_QUEUE = 1 << 20
AVAILABLE = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")


def run(context: Context) -> Iterator[Result]:
    """Three lines of each setting."""
    if why := netns.missing():
        raise SystemExit(f"incast needs root and network namespaces shaped by tbf: {why}")
    settings = [(SWITCH_QUEUE, CREDITS, CONGESTION_CONTROL)]
    if not context.quick:
        settings += [(SWITCH_QUEUE, SMALL_CREDITS, c) for c in AVAILABLE.read_text().split()]
        settings += [(SHALLOW_QUEUE, c, CONGESTION_CONTROL) for c in (SMALL_CREDITS // 2, CREDITS)]
    for queue, credit, congestion_control in settings:
        incast = Incast(SENDERS, RATE, queue, credit, congestion_control)
        try:
            yield from lines(incast, context.rounds(3, 1), 1.5 if context.quick else 3.0)
        finally:
            incast.close()


def lines(incast: Incast, rounds: int, seconds: float) -> Iterator[Result]:
    alone: list[Outcome] = []
    together: list[Outcome] = []
    for _ in range(rounds):
        alone.append(incast.run(1, seconds / 2))
        together.append(incast.run(SENDERS, seconds))
    lost = [what for outcome in alone + together for what in outcome.lost]
    if lost:
        raise SystemExit(f"lost: {lost}")
    params: dict[str, Any] = {
        "senders": SENDERS,
        "queue_bytes": incast.queue_bytes,
        "credit_bytes": incast.credit_bytes,
        "congestion_control": incast.congestion_control,
        "dropped_packets": median([o.dropped for o in together]),
        "grown_kib": max(o.grown_bytes for o in together) >> 10,
    }
    took = [seconds] * rounds
    common: dict[str, Any] = dict(
        case="incast", params=params, median=seconds, p99=seconds, best=seconds,
        bytes=int(median([o.goodput for o in together]) * seconds), flops=0, isa="none", threads=1,
        repetitions=len(took),
    )  # fmt: skip
    goodput, limit = (median([o.goodput for o in of]) / 1e6 for of in (together, alone))
    best = max(o.goodput for o in together) / max(o.goodput for o in alone)
    yield Result(
        value=goodput, unit="MB/s", limit_name="one sender", limit=limit, ratio=goodput / limit,
        best_ratio=best, **common,
    )  # fmt: skip
    fairness = [o.fairness for o in together]
    yield Result(
        value=median(fairness), unit="Jain's index", limit_name="wanted at least",
        limit=LEAST_FAIRNESS, ratio=median(fairness) / LEAST_FAIRNESS,
        best_ratio=max(fairness) / LEAST_FAIRNESS, **common,
    )  # fmt: skip
    held = [o.under_way_bytes for o in together]
    allowed = incast.credit_bytes + SENDERS * SLACK
    yield Result(
        value=max(held) / 2**20, unit="MiB under way", limit_name="credits and 128 KiB of each",
        limit=allowed / 2**20, ratio=allowed / max(held), best_ratio=allowed / min(held), **common,
    )  # fmt: skip
