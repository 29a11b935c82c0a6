"""A relay between two ends of a socket link that knows the frames, so that tests stop at each step.

It speaks nothing itself: bytes (and, on shm, descriptors) pass unit by unit, a unit being a message
of the handshake or a frame with its payload. ``docs/protocol.md`` describes both.
"""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

HANDSHAKE, FRAME = b"KVCA", b"KVTL"
MAC_BYTES = 16
MESSAGE, WRITE = 2, 3
STREAM_KINDS = {1: "open", 2: "mark", 3: "commit", 4: "sender_abort", 5: "done"}


@dataclass
class Unit:
    """A message of the handshake ("hello", "reply", "proof") or a frame ("write", "open", ...)."""

    name: str
    from_initiator: bool
    data: bytes
    payload_bytes: int = 0
    moved_bytes: int = 0  # that a write's pieces name


@dataclass
class Direction:
    """Bytes from one end, cut into units."""

    from_initiator: bool
    source: socket.socket
    sink: socket.socket
    buffer: bytearray = field(default_factory=bytearray)
    fds: list[int] = field(default_factory=list)

    def units(self) -> Iterator[Unit]:
        while (unit := self._next()) is not None:
            del self.buffer[: len(unit.data)]
            yield unit

    def _next(self) -> Unit | None:
        if len(self.buffer) < 16 and self.buffer[:4] != HANDSHAKE:
            return None
        if self.buffer[:4] == HANDSHAKE:
            if len(self.buffer) < 8:
                return None
            step, size = self.buffer[5], int.from_bytes(self.buffer[6:8], "little")
            name = {1: "hello", 2: "reply", 3: "proof"}[step]
            return self._cut(name, 8 + size, 0, 0)
        assert self.buffer[:4] == FRAME, bytes(self.buffer[:4])
        kind, _, _, body, payload = struct.unpack_from("<BBHII", self.buffer, 4)
        if len(self.buffer) < 16 + body:
            return None
        name, moved = f"frame {kind}", 0
        if kind == WRITE:
            name, moved = "write", self._moved(16)
        elif kind == MESSAGE and self.buffer[16:20] == b"KVSM":
            name = STREAM_KINDS.get(self.buffer[21], "abort")
        return self._cut(name, 16 + body + MAC_BYTES + payload, payload, moved)

    def _moved(self, at: int) -> int:
        (count,) = struct.unpack_from("<I", self.buffer, at + 36)
        return sum(
            struct.unpack_from("<QQQ", self.buffer, at + 40 + 24 * i)[1] for i in range(count)
        )

    def _cut(self, name: str, size: int, payload: int, moved: int) -> Unit | None:
        if len(self.buffer) < size:
            return None
        return Unit(name, self.from_initiator, bytes(self.buffer[:size]), payload, moved)

    def receive(self) -> bool:
        """False at the end."""
        try:
            data, ancillary, _, _ = self.source.recvmsg(1 << 18, socket.CMSG_SPACE(64 * 4))
        except ConnectionError:
            return False
        for _, _, raw in ancillary:
            fds = array.array("i")
            fds.frombytes(raw)
            self.fds.extend(fds)
        self.buffer += data
        return bool(data)

    def send(self, data: bytes) -> None:
        fds, self.fds = self.fds, []
        try:
            while data:
                sent = socket.send_fds(self.sink, [data], fds)
                for fd in fds:
                    os.close(fd)
                fds, data = [], data[sent:]
        except OSError:  # the end is gone, as tests of death want it
            return


def _prompt(end: socket.socket) -> socket.socket:
    """With Nagle's delay the last words of one connection would leave after the end of another."""
    if end.family != socket.AF_UNIX:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return end


class Proxy(threading.Thread):
    """One link from the listener to ``target``; ``watch`` sees each unit before it passes.

    A tcp link has a connection for each class: the proxy serves until the last of them has ended.
    What ``watch`` returns passes: the number of bytes of the unit. When it returns None, the unit
    passes, then all ends are closed: what the kernel does for a process that was killed there.
    """

    def __init__(self, target: str, watch: Callable[[Unit | None], int | None], path: str) -> None:
        super().__init__(daemon=True)
        self._target, self._watch = target, watch
        if target.startswith("shm:"):
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind(path)
            self.address = f"shm:{path}"
        else:
            self._listener = socket.create_server(("127.0.0.1", 0))
            self.address = f"tcp:127.0.0.1:{self._listener.getsockname()[1]}"
        self._listener.listen()
        self._stopping = False
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._serve()
        except BaseException as error:  # told to the test by stop()
            self.error = error

    def _serve(self) -> None:
        ways: list[Direction] = []
        with contextlib.ExitStack() as ends:
            while not self._stopping:
                sources = [self._listener, *(w.source for w in ways)]
                readable, _, _ = select.select(sources, [], [], 0.02)
                if self._listener in readable:
                    near = ends.enter_context(_prompt(self._listener.accept()[0]))
                    far = ends.enter_context(self._connect())
                    if self._watch(None) is None:
                        return
                    ways += [Direction(True, near, far), Direction(False, far, near)]
                for way in [w for w in ways if w.source in readable]:
                    if way.source.fileno() < 0:
                        continue  # the other way of its connection ended in this round
                    if way.receive():
                        if not self._pass_on(way):
                            return
                        continue
                    way.sink.close()
                    way.source.close()
                    ways = [w for w in ways if w.source.fileno() >= 0]
                    if not ways:
                        return

    def _connect(self) -> socket.socket:
        if self._target.startswith("shm:"):
            far = socket.socket(socket.AF_UNIX)
            far.connect(self._target[4:])
            return far
        return _prompt(socket.create_connection(("127.0.0.1", int(self._target.rsplit(":", 1)[1]))))

    def _pass_on(self, way: Direction) -> bool:
        """False: the end that sent this dies here."""
        for unit in way.units():
            passing = self._watch(unit)
            way.send(unit.data if passing is None else unit.data[:passing])
            if passing is None or passing < len(unit.data):
                time.sleep(0.002)
                return False
        return True

    def stop(self) -> None:
        self._stopping = True
        self.join()
        self._listener.close()
        if self.error is not None:
            raise self.error
