"""What every benchmark case uses: interleaved timing, percentiles, and one JSON object per result.

A ratio is only taken between numbers of one run: :func:`interleave` calls our work, the limit's
probe and the peers in turn, so that a busy moment of the machine hits all of them alike.
"""

from __future__ import annotations

import math
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

_CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
_clock_name = "wall"
ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Result:
    """One line of output.

    Attributes:
        case, params: which case with which parameters.
        median, p99, best: seconds of one repetition.
        bytes, flops: work of one repetition, 0 where it has no meaning.
        value, unit: the figure of merit, from the median.
        limit_name, limit: what it is compared with, same unit, measured in the same run.
        ratio: value / limit for rates, limit / value for times: above 1 is better than the limit.
        best_ratio: the same from the best repetition of each.
        isa, threads, repetitions, clock, commit: how and with what it was measured.
    """

    case: str
    params: dict[str, Any]
    median: float
    p99: float
    best: float
    bytes: int
    flops: int
    value: float
    unit: str
    limit_name: str
    limit: float
    ratio: float
    best_ratio: float
    isa: str
    threads: int
    repetitions: int
    clock: str = field(default_factory=lambda: _clock_name)
    commit: str = field(default_factory=lambda: commit())

    def as_dict(self) -> dict[str, Any]:
        """Plain values, floats cut to six significant digits."""
        return {k: _short(v) for k, v in asdict(self).items()}


@dataclass(frozen=True)
class Context:
    """What the command line asked for; empty shapes, threads and pages: the case's own."""

    quick: bool
    peers: dict[str, Any]
    model: str | None = None
    dtype: str = "bf16"
    shapes: tuple[str, ...] = ()
    threads: tuple[int, ...] = ()
    path: str = "kernel"
    pages: tuple[int, ...] = ()

    def rounds(self, full: int, quick: int) -> int:
        """Number of repetitions."""
        return quick if self.quick else full


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def commit() -> str:
    """Short commit, ``-dirty`` appended when sources differ; "unknown" without git."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def percentile(values: Sequence[float], percent: float) -> float:
    """Nearest-rank percentile."""
    ordered = sorted(values)
    return ordered[max(math.ceil(percent / 100 * len(ordered)), 1) - 1]


def median(values: Sequence[float]) -> float:
    """Middle value (the lower one of two)."""
    return percentile(values, 50)


def use_clock(name: str) -> None:
    """Measure "wall" seconds, or "cpu" seconds of this process.

    CPU seconds leave out the time in which other programs held the core; they say what one thread
    can do where the machine cannot be had alone, and are right for single-threaded cases only.
    """
    global _clock_name
    _clock_name = name


def now() -> float:
    """The clock in use."""
    return _CLOCKS[_clock_name]()


def clock_name() -> str:
    """ "wall" or "cpu"."""
    return _clock_name


def seconds(work: Callable[[], object]) -> float:
    """Seconds of one call by the clock in use."""
    start = now()
    work()
    return now() - start


def interleave(
    timed: dict[str, Callable[[], float]], rounds: int, warmup: int = 1
) -> dict[str, list[float]]:
    """Call every function once per round, in turn; each returns its own seconds or its rate."""
    for _ in range(warmup):
        for call in timed.values():
            call()
    taken: dict[str, list[float]] = {name: [] for name in timed}
    for _ in range(rounds):
        for name, call in timed.items():
            taken[name].append(call())
    return taken


def rate_result(
    case: str,
    params: dict[str, Any],
    ours: Sequence[float],
    work: float,
    unit: str,
    limit_name: str,
    limits: Sequence[float],
    **rest: Any,
) -> Result:
    """A result whose value is ``work / seconds``, in ``unit``; limits are rates in it too."""
    middle, best = median(ours), min(ours)
    limit = median(limits) if limits else float("nan")
    return Result(
        case,
        params,
        median=middle,
        p99=percentile(ours, 99),
        best=best,
        value=work / middle,
        unit=unit,
        limit_name=limit_name,
        limit=limit,
        ratio=work / middle / limit,
        best_ratio=work / best / max(limits) if limits else float("nan"),
        repetitions=len(ours),
        **rest,
    )


def peer_results(
    case: str,
    params: dict[str, Any],
    ours: Sequence[float],
    work: float,
    unit: str,
    peers: dict[str, Sequence[float]],
    **rest: Any,
) -> list[Result]:
    """A line per peer, whose rate is the limit; ``peers``: seconds for the same work by name."""
    return [
        rate_result(case, params, ours, work, unit, name, [work / t for t in taken], **rest)
        for name, taken in peers.items()
    ]


def time_result(
    case: str,
    params: dict[str, Any],
    ours: Sequence[float],
    unit: str,
    limit_name: str,
    limits: Sequence[float],
    **rest: Any,
) -> Result:
    """A result whose value is a time in ``unit`` ("s", "ms", "us"); limits are seconds too."""
    factor = {"s": 1.0, "ms": 1e3, "us": 1e6}[unit]
    middle, best = median(ours), min(ours)
    limit = median(limits) if limits else float("nan")
    return Result(
        case,
        params,
        median=middle,
        p99=percentile(ours, 99),
        best=best,
        value=middle * factor,
        unit=unit,
        limit_name=limit_name,
        limit=limit * factor,
        ratio=limit / middle,
        best_ratio=min(limits) / best if limits else float("nan"),
        repetitions=len(ours),
        **rest,
    )
