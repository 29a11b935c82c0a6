"""A template: a process that has loaded what its workers share, and forks each of them off itself.

Loading a model takes seconds, a fork milliseconds, and the forked worker shares the memory of the
weights. A worker is forked twice, so that it becomes a child of the launcher (a "subreaper") as if
that had started it: the launcher learns the exit code, and the worker outlives its template.

Orders and answers are JSON, one a packet, over the socket that is the template's standard input: an
order is the command line of a worker, the answer its process id or why there is none. ``Template``
and ``Forked`` are the launcher's side, ``forked_workers`` is the template's. Linux only.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import json
import logging
import os
import signal
import socket
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from kvcore.errors import KvcoreError

log = logging.getLogger("kvcore.launcher")
_PR_SET_CHILD_SUBREAPER = 36
T = TypeVar("T")
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}  # numpy's library starts its threads when imported
_MOST_BYTES = 1 << 17  # of a packet


class TemplateEnded(KvcoreError):
    """The template ended with ``exit_code`` before it answered."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"the template ended with exit code {exit_code}")
        self.exit_code = exit_code


class ForkRefused(KvcoreError):
    """The template cannot fork; the message says why."""


def adopt_orphans() -> None:
    """Have the kernel make this process the parent of what its children leave behind.

    Raises OSError.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_CHILD_SUBREAPER): {os.strerror(number)}")


class Forked:
    """A child of this process that another one forked: the part of asyncio's Process we use."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._fd = os.pidfd_open(pid)
        self._gone = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._reap)

    async def wait(self) -> int:
        """The exit code, negative for a signal."""
        await self._gone.wait()
        assert self.returncode is not None
        return self.returncode

    def _reap(self) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)
        _, status = os.waitpid(self.pid, 0)
        self.returncode = os.waitstatus_to_exitcode(status)
        self._gone.set()


class Template:
    """The template process of command line ``argv``: started when needed, and again if it dies."""

    def __init__(self, argv: Sequence[str]) -> None:
        self._argv = argv
        self._process: asyncio.subprocess.Process | None = None
        self._socket: socket.socket
        self._busy = asyncio.Lock()
        self._watch: asyncio.Task[None] | None = None
        self._has_forked = self._stopping = False
        self._refusal = ""

    @property
    def pid(self) -> int:
        """Process id, 0 when it does not run."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else 0

    async def fork(self, argv: Sequence[str]) -> Forked:
        """A new worker with the arguments ``argv``, as soon as the template has loaded.

        Raises TemplateEnded, ForkRefused, or OSError when no template can be started.
        """
        async with self._busy:
            if not self._refusal:
                if not self.pid:
                    await self._start()
                answer = await self._ask(json.dumps(list(argv)).encode())
                self._refusal = answer.get("refused", "")
            if self._refusal:
                raise ForkRefused(self._refusal)
            self._has_forked = True
            try:
                return Forked(answer["pid"])
            except OSError:  # no worker that cannot be watched
                os.kill(answer["pid"], signal.SIGKILL)
                os.waitpid(answer["pid"], 0)
                raise

    def signal(self, number: signal.Signals) -> None:
        """To the template, which is not started again."""
        self._stopping = True
        if self._process is not None and self.pid:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def stop(self) -> None:
        """SIGKILL; returns when it is gone."""
        self.signal(signal.SIGKILL)
        while self._watch is not None and not self._watch.done():
            await asyncio.wait([self._watch])

    async def _start(self) -> None:
        if self._stopping:
            raise TemplateEnded(-signal.SIGTERM)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *self._argv,
                    stdin=theirs.fileno(),
                    start_new_session=True,
                    env={**os.environ, **_ONE_THREAD},
                )
            except BaseException:
                ours.close()
                raise
        ours.setblocking(False)
        self._socket, self._has_forked = ours, False
        self._watch = asyncio.create_task(self._watched(self._process, ours))
        log.info("template started (pid %d)", self._process.pid)
        if self._stopping:  # it was being started when it was told to
            self.signal(signal.SIGKILL)

    async def _ask(self, order: bytes) -> dict[str, Any]:
        loop, process = asyncio.get_running_loop(), self._process
        assert process is not None
        try:
            await loop.sock_sendall(self._socket, order)
            answer = await loop.sock_recv(self._socket, _MOST_BYTES)
        except OSError:
            answer = b""
        if not answer:
            raise TemplateEnded(await process.wait())
        return dict(json.loads(answer))

    async def _watched(self, process: asyncio.subprocess.Process, ours: socket.socket) -> None:
        code = await process.wait()
        async with self._busy:
            ours.close()
            # One that never forked could not load: the next worker to start tells how that ends.
            if self._has_forked and not self._stopping and self._process is process:
                log.warning("the template ended with exit code %d; starting another", code)
                try:
                    await self._start()
                except OSError as error:
                    log.warning("no template can be started: %s", error)


def forked_workers(prepare: Callable[[], T]) -> tuple[T, list[str]]:
    """In the template: answer orders; returns in each forked worker, with its arguments.

    Args:
        prepare: loads what the workers share; its result is returned with the arguments. Nothing
            in it may start a thread that stays: a fork would leave that one's locks taken.

    Raises SystemExit in the template, when the launcher is gone.
    """
    orders = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    shared = prepare()
    gc.collect()
    gc.freeze()  # else the workers' collections would write to, and so copy, what they share
    while packet := orders.recv(_MOST_BYTES):
        try:
            pid, release = _fork_twice()
        except OSError as error:
            orders.send(json.dumps({"refused": str(error)}).encode())
            continue
        if not pid:
            orders.close()
            return shared, json.loads(packet)
        orders.send(json.dumps({"pid": pid}).encode())
        os.write(release, b"1")
        os.close(release)
    raise SystemExit(0)


def _fork_twice() -> tuple[int, int]:
    """(process id, pipe to release it), or (0, -1) in the new process once it is released.

    It waits until its parent is the launcher and the launcher was told of it; otherwise it ends.
    Raises OSError, with nothing forked.
    """
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        raise OSError(f"the template has {threads} threads")
    told, tell = os.pipe()
    released, release = os.pipe()
    middle = os.fork()
    if not middle:
        try:
            pid = os.fork()
        except OSError as error:
            os._exit(error.errno or 1)
        if pid:
            os.write(tell, pid.to_bytes(8, "little"))
            os._exit(0)
        for fd in (told, tell, release):
            os.close(fd)
        if not os.read(released, 1):
            os._exit(1)
        os.close(released)
        os.setsid()
        return 0, -1
    os.close(tell)
    os.close(released)
    _, status = os.waitpid(middle, 0)
    answer = os.read(told, 8)
    os.close(told)
    if not answer:
        os.close(release)
        number = max(os.waitstatus_to_exitcode(status), 0)
        raise OSError(number, f"fork: {os.strerror(number)}")
    return int.from_bytes(answer, "little"), release
