"""A worker process: an engine in its own thread beside an asyncio connection to the router.

The router may come and go: on a lost connection running requests are cancelled (it dispatches them
again elsewhere) and the worker says hello anew. SIGTERM refuses new requests, lets running ones end
within a limit, and leaves.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import tempfile
import threading
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from kvcore import wire
from kvcore.config import WorkerLaunch, read_key_file
from kvcore.errors import Corrupt, InternalError, InvalidArgument, KvcoreError, Unauthenticated
from kvcore.prefix import PrefixEvents
from kvcore.worker.loop import EngineLoop
from kvcore.worker.request import Output, Request

log = logging.getLogger(__name__)

ASKED_BY = {"mono": "generate", "decode": "reserve", "prefill": "prefill"}
DRAIN_LIMIT_S = 4.0
ORPHAN_LIMIT_S = 60.0  # a worker whose router does not come back leaves
_RETRY_S = 0.05
_KEYS_PER_MESSAGE = 4096


def run_worker(launch: WorkerLaunch, shared: Any = None) -> int:
    """Loads the model unless it is ``shared``, serves the router until SIGTERM; the exit code."""
    if launch.role not in ASKED_BY:
        raise InvalidArgument(f"role is {launch.role!r}; allowed: {', '.join(ASKED_BY)}")
    everywhere = os.sched_getaffinity(0)
    if launch.cpus:
        os.sched_setaffinity(0, launch.cpus)
    with contextlib.ExitStack() as stack:
        directory = launch.runtime_dir or stack.enter_context(tempfile.TemporaryDirectory())
        from kvcore.worker.build import build_worker  # torch, once the CPUs are set

        engine, about = build_worker(launch, Path(directory), shared, everywhere)
        stack.callback(engine.close)
        return asyncio.run(WorkerProcess(launch, engine, about).run(everywhere))


class WorkerProcess:
    """The control side of a worker. ``about``: the fields of ``hello`` that the engine knows."""

    def __init__(self, launch: WorkerLaunch, engine: Any, about: dict[str, Any]) -> None:
        self.launch = launch
        self._engine = engine
        self._hello = {
            **about,
            "worker_id": os.urandom(16),
            "incarnation": time.time_ns(),
            "role": launch.role,
            "pid": os.getpid(),
        }
        self._events_sent = 0
        self._outbox: asyncio.Queue[tuple[str, dict[str, Any]]] | None = None
        self._draining = False
        self._refusal = ""
        self._stop = asyncio.Event()

    def stop(self) -> None:
        """Refuses new requests, lets running ones end within a limit, then leaves."""
        self._stop.set()

    async def run(self, cpus: Collection[int] = ()) -> int:
        """Until ``stop`` or until no router is found; the exit code.

        The engine's thread keeps the caller's CPUs, this one goes on with ``cpus``, if any.
        Raises InvalidArgument when a router is found that has another key, or no use for it.
        """
        self._loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self.stop)
        self.engine_loop = EngineLoop(self._engine, self._deliver)
        if cpus:
            os.sched_setaffinity(0, cpus)
        try:
            return await self._serve()
        finally:
            self.engine_loop.stop()

    async def _serve(self) -> int:
        seen, delay = time.monotonic(), _RETRY_S
        while self.engine_loop.alive and not self._stop.is_set():
            self._greeted = False
            try:
                key = read_key_file(self.launch.key_file) if self.launch.key_file else b""
                await self._session(await wire.connect(self.launch.router, key, self.launch.role))
            except Unauthenticated as error:
                self._refusal = str(error)
            except (KvcoreError, OSError) as error:
                what = "lost the" if self._greeted else "no"
                log.warning("%s router at %s: %s", what, self.launch.router, error)
            if self._refusal:  # asking again would change nothing
                text = f"the router at {self.launch.router} refused this worker: {self._refusal}"
                raise InvalidArgument(text)
            if self._greeted:
                seen, delay = time.monotonic(), _RETRY_S
            elif time.monotonic() - seen > ORPHAN_LIMIT_S:
                return 1
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._stop.wait(), delay)
            delay = min(2 * delay, 1.0)
        return 0 if self.engine_loop.alive else 1

    async def _session(self, connection: wire.Connection) -> None:
        """One life of the connection: hello, then messages both ways until either side ends it."""
        self._outbox = asyncio.Queue()
        jobs: list[asyncio.Task[None]] = []
        try:
            await connection.send("hello", self._hello | {"kv_table": self._engine.memory.kv_table})
            kind, fields = await connection.recv()
            if kind == "failed":
                self._refusal = fields["message"]
                return
            if kind != "hello_ack":
                raise Corrupt(f"it answered hello with {kind}")
            self._greeted = True
            self._send_snapshot()
            beats = self._heartbeats(fields["heartbeat_ms"] / 1e3)
            work = (self._receive(connection), self._send(connection), beats, self._leave())
            jobs = [asyncio.create_task(job) for job in work]
            done, _ = await asyncio.wait(jobs, return_when=asyncio.FIRST_COMPLETED)
            for job in done:
                job.result()
        finally:
            self._outbox = None
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)
            await connection.close()
            await self._forget_requests()

    async def _forget_requests(self) -> None:
        """Ends all requests of a router that is gone, before another one is greeted."""
        done = threading.Event()

        def command(engine: Any) -> None:
            engine.cancel_all()
            engine.drain()
            done.set()

        self.engine_loop.submit(command)
        while self.engine_loop.alive and not done.is_set():
            await asyncio.sleep(0.002)

    # Router to worker.

    async def _receive(self, connection: wire.Connection) -> None:
        while True:
            kind, fields = await connection.recv()
            self._handle(kind, fields)

    def _handle(self, kind: str, fields: dict[str, Any]) -> None:
        if kind in ASKED_BY.values():
            self._accept(kind, fields)
        elif kind == "cancel":
            self.engine_loop.submit(lambda engine: engine.cancel(fields["request_id"]))
        elif kind == "prefix_resync":
            self._send_snapshot()
        elif kind == "drain":
            self._draining = True
        else:
            log.warning("dropped a message of type %s", kind)

    def _accept(self, kind: str, fields: dict[str, Any]) -> None:
        def command(engine: Any) -> None:
            if kind == "prefill":
                grant, start = fields.pop("grant"), fields.pop("start_token")
                engine.prefill(Request.of(fields), grant, start)
            else:
                engine.add(Request.of(fields))

        name = {"request_id": fields["request_id"]}
        if kind != ASKED_BY[self.launch.role]:
            text = f"a {self.launch.role} worker does not answer {kind}"
            self._put("failed", name | {"code": "unsupported", "message": text})
        elif self._draining or self._stop.is_set():
            text = "the worker is leaving"
            self._put("failed", name | {"code": "draining", "message": text, "retryable": 1})
        else:
            self.engine_loop.submit(command, fields["request_id"])

    # Worker to router.

    def _deliver(self, outputs: list[Output], events: PrefixEvents) -> None:
        """In the engine's thread."""

        def put() -> None:
            for output in outputs:
                self._put(*output)
            if any(events):
                self._put_events(events)

        self._loop.call_soon_threadsafe(put)

    def _put(self, kind: str, fields: dict[str, Any]) -> None:
        if self._outbox is not None:
            self._outbox.put_nowait((kind, fields))

    def _put_events(self, events: PrefixEvents) -> None:
        size = _KEYS_PER_MESSAGE
        for at in range(0, max(len(events.stored), len(events.removed), 1), size):
            self._events_sent += 1
            fields = {
                "incarnation": self._hello["incarnation"],
                "seq": self._events_sent,
                "stored": events.stored[at : at + size],
                "removed": events.removed[at : at + size],
                "snapshot": int(events.lost and at == 0),
            }
            self._put("prefix_events", fields)

    def _send_snapshot(self) -> None:
        def command(engine: Any) -> None:
            self._loop.call_soon_threadsafe(self._put_events, engine.memory.snapshot())

        self.engine_loop.submit(command)

    async def _send(self, connection: wire.Connection) -> None:
        assert self._outbox is not None
        while True:
            await connection.send(*await self._outbox.get())

    async def _heartbeats(self, period_s: float) -> None:
        named = ("running", "waiting", "free_frames", "num_frames", "waiting_tokens")
        told_drained = False
        while self.engine_loop.alive:
            stats = self.engine_loop.stats
            fields: dict[str, Any] = {name: int(stats[name]) for name in named}
            fields["stats_names"] = [name for name in stats if name not in named]
            fields["stats_values"] = [stats[name] for name in fields["stats_names"]]
            fields["kv_table"] = self._engine.memory.kv_table
            self._put("heartbeat", fields)
            if self._draining and not self.engine_loop.busy and not told_drained:
                told_drained = True
                self._put("drained", {})
            await asyncio.sleep(period_s)
        raise InternalError("the engine's thread ended")

    async def _leave(self) -> None:
        """Returns when SIGTERM came and the running requests have ended, or had their time."""
        await self._stop.wait()
        until = time.monotonic() + DRAIN_LIMIT_S
        while self.engine_loop.busy and time.monotonic() < until:
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.02)  # the last outputs are on their way out
