"""The thread that owns an engine: commands in, outputs out, asleep when there is nothing to do."""

from __future__ import annotations

import logging
import os
import queue
import select
import threading
from collections.abc import Callable
from typing import Any

from kvcore.errors import KvcoreError
from kvcore.prefix import PrefixEvents
from kvcore.worker.engine import Engine, snake
from kvcore.worker.request import Output

log = logging.getLogger(__name__)

_STALLED_WAIT_MS = 5  # requests wait for pages or for a deadline
_IDLE_WAIT_MS = 1000

Command = Callable[[Any], None]
Deliver = Callable[[list[Output], PrefixEvents], None]


class EngineLoop:
    """Runs ``engine`` in a thread of its own.

    ``deliver(outputs, prefix_events)`` is called in that thread after each turn with
    something to tell. ``submit`` is thread-safe; ``stats`` are those after the last turn.
    """

    def __init__(self, engine: Engine, deliver: Deliver) -> None:
        self.engine = engine
        self._deliver = deliver
        self._commands: queue.SimpleQueue[tuple[bytes, Command]] = queue.SimpleQueue()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stopping = False
        self.stats = engine.stats()
        self._poller = select.poll()
        self._poller.register(self._wake_fd, select.POLLIN)
        if engine.event_fd >= 0:
            self._poller.register(engine.event_fd, select.POLLIN)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, command: Command, request_id: bytes = b"") -> None:
        """Runs ``command(engine)`` between two steps; its error becomes a Failed output."""
        self._commands.put((request_id, command))
        os.eventfd_write(self._wake_fd, 1)

    def stop(self) -> None:
        """Cancels what is left, ends the thread and waits for it."""
        self._stopping = True
        os.eventfd_write(self._wake_fd, 1)
        self._thread.join()
        os.close(self._wake_fd)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def busy(self) -> bool:
        """Whether there are requests or commands left."""
        return self.engine.has_work or not self._commands.empty()

    def _run(self) -> None:
        engine = self.engine
        while not self._stopping:
            failed = self._obey()
            rows = engine.begin()
            self._tell(failed + engine.drain())
            engine.compute(rows)
            self._tell(engine.drain())
            self.stats = engine.stats()
            if not rows and self._commands.empty():
                self._sleep(_STALLED_WAIT_MS if engine.has_work else _IDLE_WAIT_MS)
        engine.cancel_all()

    def _tell(self, outputs: list[Output]) -> None:
        events = self.engine.memory.drain_events()
        if outputs or any(events):
            self._deliver(outputs, events)

    def _obey(self) -> list[Output]:
        failed: list[Output] = []
        while not self._commands.empty():
            request_id, command = self._commands.get()
            try:
                command(self.engine)
            except Exception as error:  # a request must not end the worker
                known = isinstance(error, KvcoreError)
                if not known:
                    log.exception("a command failed")
                code = snake(type(error).__name__) if known else "internal"
                fields = {"request_id": request_id, "code": code, "message": str(error)}
                failed.append(Output("failed", fields))
        return failed

    def _sleep(self, timeout_ms: int) -> None:
        for fd, _ in self._poller.poll(timeout_ms):
            if fd == self._wake_fd:
                os.eventfd_read(fd)
