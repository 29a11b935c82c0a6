"""Other transfer engines as peers of the link cases (tcp, two processes): Mooncake and NIXL.

``TransferPeer`` starts this file with the interpreter of the peer's own environment, which starts
the target in a third process. One JSON command a line:
    -> {"segments": [[local, remote, bytes], ...], "buffer": bytes}   <- {"ready": true}
    -> {"batches": n}                                                 <- {"seconds": ...}
Needs nothing of kvcore.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import json
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

Segments = list[tuple[int, int, int]]


def spawn(
    python: str, engine: str, role: str, folder: str, *, own_group: bool = False
) -> subprocess.Popen[str]:
    """This file in another process; the engine's log files go to `folder`."""
    return subprocess.Popen(
        [python, os.path.abspath(__file__), engine, role],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=folder,
        start_new_session=own_group,
        env={"PATH": os.environ["PATH"], "MC_LOG_LEVEL": "ERROR", "UCX_TLS": "tcp"},
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
    """A peer, driven from the benchmark.

    Between its turns both of its processes are stopped: engines that spin would else take the cores
    from what they are compared with.
    """

    def __init__(self, python: str, engine: str, segments: Segments, nbytes: int) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.process = spawn(python, engine, "initiator", self.folder.name, own_group=True)
        ask(self.process, {"segments": segments, "buffer": nbytes})
        self._signal(signal.SIGSTOP)

    @classmethod
    def all_of(cls, context: Any, segments: Segments, nbytes: int) -> dict[str, TransferPeer]:
        """Those that the command line asked for, by name."""
        return {
            engine: cls(context.peers[engine], engine, segments, nbytes)
            for engine in ENGINES
            if engine in context.peers
        }

    def run(self, batches: int) -> float:
        """Seconds of that many batches."""
        self._signal(signal.SIGCONT)
        seconds = float(ask(self.process, {"batches": batches})["seconds"])
        self._signal(signal.SIGSTOP)
        return seconds

    def _signal(self, number: int) -> None:
        os.killpg(self.process.pid, number)

    def close(self) -> None:
        """End it."""
        assert self.process.stdin is not None
        self._signal(signal.SIGCONT)
        self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        with contextlib.suppress(ProcessLookupError):  # both have ended already
            self._signal(signal.SIGKILL)
        self.process.wait()
        self.folder.cleanup()


class Memory:
    """A buffer of this process."""

    def __init__(self, nbytes: int) -> None:
        self._memory = mmap.mmap(-1, nbytes)
        self.nbytes = nbytes
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        ctypes.memset(self.address, 1, nbytes)


class Mooncake:
    """The Transfer Engine with its P2P handshake."""

    def __init__(self, memory: Memory) -> None:
        from mooncake.engine import TransferEngine

        self.memory = memory
        self.engine = TransferEngine()
        if self.engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") != 0:
            raise SystemExit("mooncake does not start")
        if self.engine.register_memory(memory.address, memory.nbytes) != 0:
            raise SystemExit("mooncake does not register memory")
        self.hello = {"segment": f"127.0.0.1:{self.engine.get_rpc_port()}"}

    def meet(self, hello: dict[str, Any]) -> None:
        """Remembers the other end."""
        self.other = hello

    def prepare(self, segments: Segments) -> None:
        """Addresses on both sides."""
        local, remote, sizes = (list(column) for column in zip(*segments, strict=True))
        self.places = (
            [self.memory.address + a for a in local],
            [self.other["address"] + b for b in remote],
            sizes,
        )

    def write(self) -> None:
        """One batch."""
        if self.engine.batch_transfer_sync_write(self.other["segment"], *self.places) != 0:
            raise SystemExit("mooncake's write failed")


class Nixl:
    """An agent with the UCX backend, UCX_TLS=tcp, and prepared lists of descriptors."""

    def __init__(self, memory: Memory) -> None:
        from nixl_cu12._api import nixl_agent, nixl_agent_config

        self.memory = memory
        self.agent = nixl_agent(
            f"kvcore-bench-{os.getpid()}", nixl_agent_config(backends=[], enable_prog_thread=True)
        )
        self.agent.create_backend("UCX", {})
        self.agent.register_memory([(memory.address, memory.nbytes, 0, "")], "DRAM")
        self.hello = {"agent": base64.b64encode(self.agent.get_agent_metadata()).decode()}

    def meet(self, hello: dict[str, Any]) -> None:
        """Loads the other end's metadata."""
        name = self.agent.add_remote_agent(base64.b64decode(hello["agent"]))
        self.name = name.decode() if isinstance(name, bytes) else name
        self.other = hello

    def prepare(self, segments: Segments) -> None:
        """Descriptors on both sides."""
        import numpy as np

        def descriptors(base: int, column: int) -> Any:
            rows = [(base + s[column], s[2], 0) for s in segments]
            return np.array(rows, np.uint64)

        agent, index = self.agent, np.arange(len(segments), dtype=np.int32)
        local = agent.prep_xfer_dlist(
            "NIXL_INIT_AGENT", descriptors(self.memory.address, 0), "DRAM"
        )
        remote = agent.prep_xfer_dlist(self.name, descriptors(self.other["address"], 1), "DRAM")
        self.lists = local, remote
        self.transfer = agent.make_prepped_xfer("WRITE", local, index, remote, index, b"")

    def write(self) -> None:
        """One batch."""
        state = self.agent.transfer(self.transfer)
        while state == "PROC":
            state = self.agent.check_xfer_state(self.transfer)
        if state != "DONE":
            raise SystemExit(f"nixl's write failed: {state}")


ENGINES: dict[str, type[Mooncake] | type[Nixl]] = {"mooncake": Mooncake, "nixl": Nixl}


def target(name: str) -> None:
    memory = Memory(json.loads(sys.stdin.readline())["buffer"])
    engine = ENGINES[name](memory)
    answer({**engine.hello, "address": memory.address})
    for line in sys.stdin:
        engine.meet(json.loads(line))
        answer({"ready": True})
    os._exit(0)  # its threads do not end by themselves


def initiator(name: str) -> None:
    setup = json.loads(sys.stdin.readline())
    other = spawn(sys.executable, name, "target", os.getcwd())
    hello = ask(other, {"buffer": setup["buffer"]})
    memory = Memory(setup["buffer"])
    engine = ENGINES[name](memory)
    ask(other, {**engine.hello, "address": memory.address})
    engine.meet(hello)
    engine.prepare(setup["segments"])
    engine.write()
    answer({"ready": True})
    for line in sys.stdin:
        start = time.perf_counter()
        for _ in range(json.loads(line)["batches"]):
            engine.write()
        answer({"seconds": time.perf_counter() - start})
    other.kill()
    os._exit(0)


if __name__ == "__main__":
    {"target": target, "initiator": initiator}[sys.argv[2]](sys.argv[1])
