"""Two processes with a link between them, for the link cases.

The parent writes, the child owns the destination. Each side registers one buffer; a batch is a list
of (local offset, remote offset, bytes). CPU seconds are user + system of both processes.
Run as a program it is the child: one JSON command a line.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from kvcore.transport import Link, Region, Transport
from native_limits import RawCopy, Segments

KEY = b"benchmark key, 32 bytes in all.."


def cpu_s() -> float:
    """User and system seconds of this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def paged(block: int, count: int, nbytes: int) -> Segments:
    """``count`` blocks at random places on both sides, none twice."""
    rng = np.random.default_rng(block)
    local, remote = (rng.permutation(nbytes // block)[:count] * block for _ in range(2))
    return [(int(a), int(b), block) for a, b in zip(local, remote, strict=True)]


class Owner:
    """The child: grants its buffer."""

    def __init__(self, address: str, nbytes: int) -> None:
        self.transport = Transport(key=KEY, keepalive_s=0)
        self.region = self.transport.allocate(nbytes)
        self.region.data[:] = bytes(nbytes)
        self.hello = {
            "address": self.transport.listen(address),
            "grant": self.region.grant(rights="rw").token.hex(),
        }

    def cpu(self) -> float:
        """CPU seconds so far; polls away the arrivals."""
        self.transport._pump()
        return cpu_s()

    def sum(self, offsets: list[int], block: int) -> int:
        """A check over the named blocks."""
        data = np.frombuffer(self.region.data, np.uint64)
        return int(sum(int(data[o // 8 : (o + block) // 8].sum()) for o in offsets) % 2**64)

    def lend_to_copy(self, grant: str, segments: Segments) -> bool:
        """Borrows the writer's buffer for :meth:`copy`, which copies between the same buffers."""
        link = self.transport.accept(10)
        ranges = [(a, n) for a, _, n in segments]
        self.borrowed = link.borrow(bytes.fromhex(grant), ranges).wait(10)
        base = np.frombuffer(self.region.data, np.uint8).ctypes.data
        self.raw = RawCopy(
            [
                (base + b, np.frombuffer(span, np.uint8).ctypes.data, n)
                for (_, b, n), span in zip(segments, self.borrowed.spans, strict=True)
            ]
        )
        return True

    def copy(self, batches: int, past_caches: bool) -> float:
        """Seconds of that many batches without any link."""
        start = time.perf_counter()
        for _ in range(batches):
            self.raw.run(past_caches)
        return time.perf_counter() - start


class Pair:
    """The parent's side."""

    def __init__(self, address: str, nbytes: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, address, str(nbytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        hello = self.read()
        self.grant = bytes.fromhex(hello["grant"])
        self.transport = Transport(key=KEY, keepalive_s=0)
        self.region: Region = self.transport.allocate(nbytes)
        self.region.data[:] = np.random.default_rng(0).bytes(nbytes)
        self.link: Link = self.transport.connect(hello["address"])
        self.link.wait_up(10)

    def read(self) -> Any:
        """The child's answer."""
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def post(self, **command: Any) -> None:
        """A command to the child, whose answer is read later."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def ask(self, **command: Any) -> Any:
        """A command and its answer."""
        self.post(**command)
        return self.read()

    def cpu(self) -> float:
        """CPU seconds of both processes so far."""
        return cpu_s() + float(self.ask(do="cpu"))

    def write(self, segments: Segments, batches: int, **options: Any) -> float:
        """Seconds of ``batches`` batches, one after the other."""
        table = np.array(segments, np.int64)
        start = time.perf_counter()
        for _ in range(batches):
            self.link.write(self.region, table, self.grant, **options).wait(30)
        return time.perf_counter() - start

    def verify(self, segments: Segments) -> None:
        """The blocks lie there as they are here. Raises: SystemExit."""
        data = np.frombuffer(self.region.data, np.uint64)
        block = segments[0][2]
        mine = sum(int(data[a // 8 : (a + block) // 8].sum()) for a, _, _ in segments) % 2**64
        if self.ask(do="sum", offsets=[b for _, b, _ in segments], block=block) != mine:
            raise SystemExit("the bytes that arrived are not those that were sent")

    def close(self) -> None:
        """End both."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.transport.close()
        self.process.wait(10)


@contextlib.contextmanager
def pair(scheme: str, nbytes: int) -> Iterator[Pair]:
    """A pair over tcp or shm, ended at exit."""
    with tempfile.TemporaryDirectory() as folder:
        made = Pair("tcp:127.0.0.1:0" if scheme == "tcp" else f"shm:{folder}/link.sock", nbytes)
        try:
            yield made
        finally:
            made.close()


def main() -> None:
    owner = Owner(sys.argv[1], int(sys.argv[2]))
    print(json.dumps(owner.hello), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        print(json.dumps(getattr(owner, command.pop("do"))(**command)), flush=True)
    owner.transport.close()


if __name__ == "__main__":
    main()
