"""What this machine can do with one thread, measured next to the cases.

``python benchmarks/limits.py`` prints them alone, one JSON object a line.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

from harness import percentile, seconds
from kvcore._core import probe

MIB = 1 << 20


class LinearRead:
    """Reads of 64 MiB out of 768 MiB on huge pages, another part each time: no cache holds them."""

    unit = "GB/s"
    name = "linear_read"

    def __init__(self, total_mib: int = 768, part_mib: int = 64, threads: int = 1) -> None:
        self._probe = probe.ReadProbe(total_mib * MIB)
        self._part, self._next, self._threads = part_mib * MIB, 0, threads
        self._others = ThreadPoolExecutor(threads - 1) if threads > 1 else None

    def __call__(self) -> float:
        """GB/s (decimal) of one read, all threads together."""
        taken = seconds(self._read)
        self._next = (self._next + self._part) % (self._probe.bytes // self._part * self._part)
        return self._part / taken / 1e9

    def _read(self) -> None:
        share = self._part // self._threads
        starts = [self._next + i * share for i in range(self._threads)]
        waiting = (
            [self._others.submit(self._read_share, s, share) for s in starts[1:]]
            if (self._others)
            else []
        )
        self._read_share(starts[0], share)
        for other in waiting:
            other.result()

    def _read_share(self, start: int, num_bytes: int) -> None:
        self._probe.read(start, num_bytes)


class RandomRead(LinearRead):
    """The same in runs of ``run_bytes`` in a scattered order, the next one's start prefetched."""

    name = "random_read"

    def __init__(self, run_bytes: int, part_mib: int = 64, threads: int = 1) -> None:
        super().__init__(part_mib=part_mib, threads=threads)
        self._run_bytes = run_bytes
        self._part -= self._part % (run_bytes * threads)

    def _read_share(self, start: int, num_bytes: int) -> None:
        self._probe.read_runs(start, num_bytes, self._run_bytes)


class Flops:
    """Peak of multiply-adds in registers: bf16 pair products where the CPU has them, else f32."""

    unit = "GFLOP/s"

    def __init__(self, bf16: bool, iterations: int = 50_000) -> None:
        self.name = "dot_bf16_peak" if bf16 else "fma_f32_peak"
        self._peak = probe.dot_bf16_peak if bf16 else probe.fma_f32_peak
        self._iterations = iterations

    def __call__(self) -> float:
        """GFLOP/s of one run."""
        done: list[float] = []
        taken = seconds(lambda: done.append(self._peak(self._iterations)[1]))
        return done[0] / taken / 1e9


def has_dot_bf16() -> bool:
    """Whether this CPU multiplies bf16 pairs (AVX512_BF16)."""
    from kvcore.errors import Unsupported

    try:
        probe.dot_bf16_peak(1)
    except Unsupported:
        return False
    return True


def main() -> None:
    limits = [LinearRead(), Flops(bf16=False)]
    if has_dot_bf16():
        limits.append(Flops(bf16=True))
    for limit in limits:
        rates = [limit() for _ in range(50)]
        line = {
            "limit": limit.name,
            "unit": limit.unit,
            "best": round(max(rates), 2),
            "median": round(percentile(rates, 50), 2),
            "threads": 1,
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
