"""The programs of ``benchmarks/native``: what the machine does without any protocol of ours.

They are built with the C++ tests (``-DKVCORE_TESTS=ON``) and found in the newest build folder.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

from harness import ROOT

Segments = list[tuple[int, int, int]]


def find(name: str) -> Path:
    """The newest build of one of them. Raises: SystemExit."""
    built = sorted(ROOT.glob(f"build/*/benchmarks/native/{name}"), key=lambda p: p.stat().st_mtime)
    if not built:
        raise SystemExit(
            f"build/*/benchmarks/native/{name} is missing: configure a build folder there with "
            "-DKVCORE_TESTS=ON and build it"
        )
    return built[-1]


class RawTcp:
    """Two processes with one TCP connection; what it says is of both together."""

    def __init__(
        self, segments: Segments, nbytes: int, *, pinned: bool, send_buffer: int = 0
    ) -> None:
        self.process = subprocess.Popen(
            [find("raw_tcp"), str(nbytes), str(int(pinned)), str(send_buffer)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        places = "".join(f"{a} {b} {n}\n" for a, b, n in segments)
        if self._ask(places) != "ready":
            raise SystemExit("raw_tcp does not start")
        self.cpu_s = 0.0
        """CPU seconds of all batches so far."""

    def _ask(self, line: str) -> str:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def run(self, batches: int) -> float:
        """Seconds of that many batches."""
        taken, cpu = self._ask(str(batches)).split()
        self.cpu_s += float(cpu)
        return float(taken)

    def close(self) -> None:
        """End both."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(10)


class RawCopy:
    """memcpy, or stores past the caches, of blocks of memory at given addresses."""

    def __init__(self, blocks: list[tuple[int, int, int]]) -> None:
        """Args: blocks: (to, from, bytes) each; whole cache lines at aligned places."""
        self._library = ctypes.CDLL(os.fspath(find("raw_copy.so")))
        flat = [value for block in blocks for value in block]
        self._blocks = (ctypes.c_uint64 * len(flat))(*flat)
        self._count = ctypes.c_uint64(len(blocks))

    def run(self, past_caches: bool) -> None:
        """All blocks once."""
        self._library.copy_blocks(self._blocks, self._count, ctypes.c_int(past_caches))
