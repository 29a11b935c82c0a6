"""The router's shell: worker connections and the clock around the dispatcher."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import secrets
import time
from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet

from kvcore import wire
from kvcore.errors import Corrupt, KvcoreError, PeerDead
from kvcore.router.dispatch import Dispatcher
from kvcore.router.state import Action, Deliver, Output, Worker

log = logging.getLogger("kvcore.router")
_TICK_S = 0.05
_HELLO_S = 5.0
_PATIENCE = 5  # heartbeat timeouts until a local process that runs is given up too


class Router:
    """Serves the control socket and carries out what the dispatcher decides.

    All methods belong to one event loop.

    Args:
        address: where workers connect (``unix:`` or ``tcp:``); key: the pre-shared key.
        heartbeat_ms: what workers are told.
    """

    def __init__(
        self, dispatcher: Dispatcher, address: str, key: bytes, heartbeat_ms: int = 500
    ) -> None:
        self.dispatcher = dispatcher
        self.deliver: Callable[[bytes, Output], None] = lambda request_id, output: None
        """Takes the outputs for clients."""
        self._wanted, self._key, self._heartbeat_ms = address, key, heartbeat_ms
        self._router_id = secrets.token_bytes(16)
        self._connections: dict[bytes, wire.Connection] = {}
        self._server: wire.Server | None = None
        self._ticker: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen. Raises InvalidArgument when the address cannot be used."""
        self._server = await wire.serve(self._wanted, self._key, self._serve, role="router")
        self._ticker = asyncio.create_task(self._tick())

    @property
    def address(self) -> str:
        """Where workers connect, with the port that was picked."""
        return self._server.address if self._server else self._wanted

    async def close(self) -> None:
        """End every connection."""
        if self._ticker is not None:
            self._ticker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._ticker
        if self._server is not None:
            await self._server.close()

    def expect(self, roles: AbstractSet[str]) -> None:
        """The roles whose workers are started again when they die."""
        self.act(self.dispatcher.expect(roles, self.now()))

    def now(self) -> float:
        """The clock, seconds."""
        return time.monotonic()

    # The control socket.

    async def _serve(self, connection: wire.Connection) -> None:
        try:
            kind, hello = await asyncio.wait_for(connection.recv(), _HELLO_S)
        except asyncio.TimeoutError:
            await connection.close(f"no hello within {_HELLO_S:g} s")
            return
        except PeerDead:  # it only tried its key
            return
        if kind != "hello":
            await connection.close(f"expected hello, got {kind}")
            return
        worker_id = bytes(hello["worker_id"])
        named = hello.keys() & {field.name for field in dataclasses.fields(Worker)}
        worker = Worker(worker_id, **{name: hello[name] for name in named - {"worker_id"}})
        worker.free_frames = worker.num_frames
        refusal = self.dispatcher.refusal(worker)
        if refusal:
            log.error("refused a worker (pid %d): %s", worker.pid, refusal)
            answer = {"request_id": bytes(16), "code": "refused", "message": refusal}
            connection.send_nowait("failed", answer)  # in place of hello_ack
            await connection.close(refusal)
            return
        old = self._connections.pop(worker_id, None)
        if old is not None:
            old.abort("the worker connected anew")
        ack = {"router_id": self._router_id, "heartbeat_ms": self._heartbeat_ms}
        connection.send_nowait("hello_ack", ack)
        self._connections[worker_id] = connection
        log.info("%s joined (pid %d, %d frames)", worker.name, worker.pid, worker.num_frames)
        self.act(self.dispatcher.worker_up(worker, self.now()))
        reason = "its connection handler ended"
        try:
            reason = await self._listen(worker_id, connection)
        finally:
            if self._connections.get(worker_id) is connection:
                self._lost(worker, reason)

    async def _listen(self, worker_id: bytes, connection: wire.Connection) -> str:
        """Until the connection ends; returns why."""
        while True:
            try:
                kind, fields = await connection.recv()
            except PeerDead:
                return "it left" if connection.closed_in_order else "its process is gone"
            except Corrupt as error:
                return f"it sent a bad frame: {error}"
            if self._connections.get(worker_id) is not connection:
                return "replaced"
            self.act(self.dispatcher.message(worker_id, kind, fields, self.now()))

    def _lost(self, worker: Worker, reason: str) -> None:
        connection = self._connections.pop(worker.worker_id)
        level = logging.INFO if connection.closed_in_order else logging.WARNING
        log.log(level, "%s (pid %d) is gone: %s", worker.name, worker.pid, reason)
        self.act(self.dispatcher.worker_down(worker.worker_id, reason, self.now()))
        connection.abort(reason)

    async def _tick(self) -> None:
        last = self.now()
        while True:
            await asyncio.sleep(_TICK_S)
            now = self.now()
            if now - last > 10 * _TICK_S:
                self.dispatcher.stalled(now - last)
            last = now
            for worker in self.dispatcher.silent(now):
                if not self._is_slow(worker, now):
                    self._lost(worker, "no heartbeat")
            self.act(self.dispatcher.tick(now))

    def _is_slow(self, worker: Worker, now: float) -> bool:
        """Whether a silent worker may only lack CPU time: a process of this machine that is not
        stopped. Were it dead, its connection would have told; it gets more patience."""
        local = self._connections[worker.worker_id].address.startswith("unix")
        patience_s = _PATIENCE * self.dispatcher.heartbeat_timeout_s
        if not local or now - worker.last_seen > patience_s:
            return False
        log.debug("%s is silent for %.1f s", worker.name, now - worker.last_seen)
        try:
            with open(f"/proc/{worker.pid}/stat", encoding="ascii", errors="replace") as file:
                return file.read().rpartition(")")[2].split()[0] not in "TtZX"
        except OSError:
            return False

    def act(self, actions: Iterable[Action]) -> None:
        """Carry out what the dispatcher decided."""
        for action in actions:
            if isinstance(action, Deliver):
                self.deliver(action.request_id, action.output)
                continue
            connection = self._connections.get(action.worker_id)
            if connection is None:
                continue
            try:
                connection.send_nowait(action.type, action.fields)
            except PeerDead:
                log.debug("%s to a closed connection", action.type)  # its end is on the way
            except KvcoreError:
                log.exception("cannot send %s", action.type)
                connection.abort()
