"""Mooncake's Transfer Engine as a peer of the link cases (tcp, two processes, P2P handshake).

``TransferPeer`` starts this file with the interpreter of the peer's own environment, which starts
the target in a third process. One JSON command a line:
    -> {"segments": [[local, remote, bytes], ...], "buffer": bytes}   <- {"ready": true}
    -> {"batches": n}                                                 <- {"seconds": ...}
Needs nothing of kvcore.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import subprocess
import sys
import tempfile
import time
from typing import Any


def spawn(python: str, role: str, folder: str) -> subprocess.Popen[str]:
    """This file in another process; the engine's log files go to `folder`."""
    return subprocess.Popen(
        [python, os.path.abspath(__file__), role],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=folder,
        env={"PATH": os.environ["PATH"], "MC_LOG_LEVEL": "ERROR"},
    )


def ask(process: subprocess.Popen[str], command: dict[str, Any]) -> Any:
    """One command; lines of the engine's own are skipped."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps(command) + "\n")
    process.stdin.flush()
    while line := process.stdout.readline():
        if line.startswith("@"):
            return json.loads(line[1:])
    raise SystemExit("the peer ended; run it by hand to see why")


def answer(value: Any) -> None:
    print("@" + json.dumps(value), flush=True)


class TransferPeer:
    """The peer, driven from the benchmark."""

    def __init__(self, python: str, segments: list[tuple[int, int, int]], nbytes: int) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.process = spawn(python, "initiator", self.folder.name)
        ask(self.process, {"segments": segments, "buffer": nbytes})

    @classmethod
    def of(cls, context: Any, segments: list[tuple[int, int, int]], nbytes: int) -> Any:
        """The peer that the command line asked for, or None."""
        python = context.peers.get("mooncake")
        return None if python is None else cls(python, segments, nbytes)

    def write(self, batches: int) -> float:
        """Seconds of that many batches."""
        return float(ask(self.process, {"batches": batches})["seconds"])

    def close(self) -> None:
        """End it."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        self.process.kill()
        self.folder.cleanup()


def engine_with(nbytes: int) -> tuple[Any, int, mmap.mmap]:
    """An engine, and the address of a registered buffer."""
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    memory = mmap.mmap(-1, nbytes)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    ctypes.memset(address, 1, nbytes)
    if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") != 0:
        raise SystemExit("mooncake does not start")
    if engine.register_memory(address, nbytes) != 0:
        raise SystemExit("mooncake does not register memory")
    return engine, address, memory


def target() -> None:
    nbytes = json.loads(sys.stdin.readline())["buffer"]
    engine, address, _memory = engine_with(nbytes)
    answer({"segment": f"127.0.0.1:{engine.get_rpc_port()}", "address": address})
    sys.stdin.read()
    os._exit(0)  # its threads do not end by themselves


def initiator() -> None:
    setup = json.loads(sys.stdin.readline())
    other = spawn(sys.executable, "target", os.getcwd())
    hello = ask(other, {"buffer": setup["buffer"]})
    engine, address, _memory = engine_with(setup["buffer"])
    local, remote, sizes = (list(column) for column in zip(*setup["segments"], strict=True))
    places = [address + a for a in local], [hello["address"] + b for b in remote], sizes
    answer({"ready": True})
    for line in sys.stdin:
        start = time.perf_counter()
        for _ in range(json.loads(line)["batches"]):
            if engine.batch_transfer_sync_write(hello["segment"], *places) != 0:
                raise SystemExit("mooncake's write failed")
        answer({"seconds": time.perf_counter() - start})
    other.kill()
    os._exit(0)


if __name__ == "__main__":
    {"target": target, "initiator": initiator}[sys.argv[1]]()
