"""Threads and asyncio tasks that wait for events of one queue; a part of :mod:`kvcore.transport`.

One of the waiting threads polls for all. Each waits at a *place*, the object whose state it looks
at, and is woken when something has happened there: no thread takes away what another waits for,
and an event costs nothing for those it does not concern.
"""

from __future__ import annotations

import asyncio
import math
import select
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from kvcore._arguments import seconds
from kvcore.errors import Timeout

T = TypeVar("T")
_MOST_MS = 200  # of one poll: close() makes no event when there is no link


class Waiters:
    """Who waits where.

    Args: fd: readable while events wait. pump: takes them, and calls :meth:`touch` for each place
    where something has happened; called with ``lock`` held.
    """

    def __init__(self, fd: int, lock: Any, pump: Callable[[], None]) -> None:
        self._fd, self._lock, self._pump = fd, lock, pump
        self._polled = False  # by one of the threads
        self._threads: dict[int, tuple[threading.Condition, int]] = {}  # by id(place): waiting
        self._tasks: dict[int, set[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]]] = {}
        self._loops: set[asyncio.AbstractEventLoop] = set()

    def touch(self, place: object) -> None:
        """Something has happened there. The caller holds the lock."""
        waiting = self._threads.get(id(place))
        if waiting is not None:
            waiting[0].notify_all()
        for loop, future in self._tasks.pop(id(place), ()):
            if not loop.is_closed():
                loop.call_soon_threadsafe(_wake, future)

    def touch_all(self) -> None:
        """Everybody looks again. The caller holds the lock."""
        for condition, _ in self._threads.values():
            condition.notify_all()
        for tasks in self._tasks.values():
            for loop, future in tasks:
                if not loop.is_closed():
                    loop.call_soon_threadsafe(_wake, future)
        self._tasks.clear()

    def wait(
        self, place: object, ready: Callable[[], T | None], timeout_s: float | None, what: str
    ) -> T:
        """The first ``ready()`` that is not None. Raises: Timeout, and what ``ready`` raises."""
        timeout_s = seconds("timeout_s", timeout_s)
        end = None if timeout_s is None else time.monotonic() + timeout_s
        with self._lock:
            try:
                while True:
                    self._pump()
                    item = ready()
                    if item is not None:
                        return item
                    left = None if end is None else end - time.monotonic()
                    if left is not None and left <= 0:
                        raise Timeout(f"no {what} within {timeout_s} s")
                    if self._polled:
                        self._sleep(place, left)
                    else:
                        self._poll(left)
            finally:
                self._hand_on()

    def _sleep(self, place: object, left: float | None) -> None:
        condition, count = self._threads.get(id(place), (threading.Condition(self._lock), 0))
        self._threads[id(place)] = (condition, count + 1)
        try:
            condition.wait(left)
        finally:
            condition, count = self._threads.pop(id(place))
            if count > 1:
                self._threads[id(place)] = (condition, count - 1)

    def _poll(self, left: float | None) -> None:
        """Waits for events on behalf of all threads."""
        poller = select.poll()
        poller.register(self._fd, select.POLLIN)
        self._polled = True
        self._lock.release()
        try:
            poller.poll(_MOST_MS if left is None else min(_MOST_MS, math.ceil(left * 1000)))
        finally:
            self._lock.acquire()
            self._polled = False

    def _hand_on(self) -> None:
        """One that leaves wakes another, who polls if nobody does."""
        for condition, _ in self._threads.values():
            condition.notify()
            break

    async def wait_async(
        self, place: object, ready: Callable[[], T | None], timeout_s: float | None, what: str
    ) -> T:
        """:meth:`wait` for asyncio."""
        timeout_s = seconds("timeout_s", timeout_s)
        loop = asyncio.get_running_loop()
        if loop not in self._loops:
            self._loops.add(loop)
            loop.add_reader(self._fd, self._on_readable)
        end = None if timeout_s is None else loop.time() + timeout_s
        while True:
            with self._lock:  # nothing may slip in between looking and waiting
                self._pump()
                item = ready()
                if item is not None:
                    return item
                future: asyncio.Future[None] = loop.create_future()
                entry = (loop, future)
                self._tasks.setdefault(id(place), set()).add(entry)
            try:
                await asyncio.wait_for(future, None if end is None else end - loop.time())
            except asyncio.TimeoutError as e:
                raise Timeout(f"no {what} within {timeout_s} s") from e
            finally:
                with self._lock:
                    tasks = self._tasks.get(id(place), set())
                    tasks.discard(entry)
                    if not tasks:
                        self._tasks.pop(id(place), None)

    def _on_readable(self) -> None:
        with self._lock:
            self._pump()

    def close(self) -> None:
        """No loop watches the queue any more; everybody looks again. The caller holds the lock."""
        for loop in self._loops:
            if not loop.is_closed():
                loop.remove_reader(self._fd)
        self._loops.clear()
        self.touch_all()


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
