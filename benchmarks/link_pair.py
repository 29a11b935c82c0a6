"""Two processes with a link between them, for the link cases: ours, and plain sockets as the limit.

The parent writes, the child owns the destination. Each side registers one buffer; a batch is a list
of (local offset, remote offset, bytes). CPU seconds are user + system of both processes.
Run as a program it is the child: one JSON command a line.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from kvcore.transport import Link, Region, Transport

KEY = b"benchmark key, 32 bytes in all.."
SOCKET_BYTES = 4 << 20  # of one call on the plain socket
Segments = list[tuple[int, int, int]]


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
    """The child: grants its buffer, and drains a plain socket into it."""

    def __init__(self, address: str, nbytes: int) -> None:
        self.transport = Transport(key=KEY, keepalive_s=0)
        self.region = self.transport.allocate(nbytes)
        self.region.data[:] = bytes(nbytes)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.hello = {
            "address": self.transport.listen(address),
            "grant": self.region.grant(rights="rw").token.hex(),
            "port": self.listener.getsockname()[1],
        }

    def cpu(self) -> float:
        """CPU seconds so far; polls away the arrivals."""
        self.transport._pump()
        return cpu_s()

    def sum(self, offsets: list[int], block: int) -> int:
        """A check over the named blocks."""
        data = np.frombuffer(self.region.data, np.uint64)
        return int(sum(int(data[o // 8 : (o + block) // 8].sum()) for o in offsets) % 2**64)

    def receive(self, nbytes: int, batches: int) -> int:
        """Serves plain batches of ``nbytes``, each answered by one byte, until all are in."""
        connection, _ = self.listener.accept()
        with connection:
            for _ in range(batches):
                at = 0
                while at < nbytes:
                    got = connection.recv_into(
                        self.region.data[at : min(at + SOCKET_BYTES, nbytes)]
                    )
                    if got == 0:
                        raise ConnectionError("the sender is gone")
                    at += got
                connection.sendall(b"k")
        return batches


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
        self.port: int = hello["port"]
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
        start = time.perf_counter()
        for _ in range(batches):
            self.link.write(self.region, segments, self.grant, **options).wait(30)
        return time.perf_counter() - start

    def plain(self, nbytes: int, batches: int) -> float:
        """Seconds of the same bytes over one plain TCP connection, contiguous on both sides."""
        self.post(do="receive", nbytes=nbytes, batches=batches)
        with socket.create_connection(("127.0.0.1", self.port)) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            start = time.perf_counter()
            for _ in range(batches):
                for at in range(0, nbytes, SOCKET_BYTES):
                    connection.sendall(self.region.data[at : min(at + SOCKET_BYTES, nbytes)])
                if connection.recv(1) != b"k":
                    raise ConnectionError("the receiver is gone")
            seconds = time.perf_counter() - start
        self.read()
        return seconds

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
