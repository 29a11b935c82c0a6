"""Router, HTTP front and local workers as one unit with a beginning and an end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import socket
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvicorn

from kvcore.config import PAGE_FORMATS, Config, deployment_secret, make_key_file, read_key_file
from kvcore.errors import InvalidArgument, IoError
from kvcore.prefix import ClusterIndex
from kvcore.router.dispatch import Dispatcher
from kvcore.router.server import Router
from kvcore.serve import rundir
from kvcore.serve.app import Front
from kvcore.serve.backend import RouterBackend
from kvcore.serve.keys import keys_under
from kvcore.serve.launcher import Launcher, ProcessSpec, WorkerFailed, worker_specs
from kvcore.serve.metrics import Metrics, Snapshot
from kvcore.serve.text import TextCodec

log = logging.getLogger("kvcore.serve")
_CLIENTS_GRACE_S = 1.0
_WORKERS_GRACE_S = 1.5
"""At the end no request is left, so both are short: for the last words, and for tidying up."""


def read_api_key(config: Config) -> str:
    """The API key of the HTTP front, "" for none.

    Raises InvalidArgument when the front would listen beyond loopback without one.
    """
    http = config.http
    if http.api_key_file:
        path = Path(http.api_key_file)
        try:
            mode, key = path.stat().st_mode, path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidArgument(f"http.api_key_file = {path}: {error}") from error
        if mode & 0o077:
            raise InvalidArgument(f"http.api_key_file = {path}: others may read it, chmod 600")
        if not key:
            raise InvalidArgument(f"http.api_key_file = {path}: is empty")
        return key
    if not _is_loopback(http.host):
        raise InvalidArgument(
            f"http.host = {http.host!r} is not a loopback address: anybody who reaches it could "
            "use the model. Give --api-key-file FILE, or listen on 127.0.0.1"
        )
    return ""


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def bind_http(host: str, port: int) -> socket.socket:
    """The listening socket. Raises IoError that says who is in the way."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(1024)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            text = f"port {port} of {host} is taken by another process; give another --port"
            raise IoError(f"{text} (0 picks a free one)") from error
        raise IoError(f"cannot listen on {host} port {port}: {error.strerror}") from error
    return sock


class _Server(uvicorn.Server):
    """Leaves signals to the one who runs the event loop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield


class Deployment:
    """``async with Deployment(...)``: listening when entered, everything stopped when left.

    Args:
        config: the whole configuration; codec: the model's tokenizer.
        names: model names for clients; model: what the workers are told to load.
        epoch: digest of the model's weights; workers of others are refused.
        specs: worker processes instead of those of ``config.fleet``.
    """

    def __init__(
        self,
        config: Config,
        codec: TextCodec,
        names: Sequence[str],
        model: str,
        epoch: str,
        specs: Sequence[ProcessSpec] | None = None,
    ) -> None:
        self._config, self._codec, self._names = config, codec, names
        self._model, self._epoch, self._specs = model, epoch, specs
        self._stack = contextlib.AsyncExitStack()
        self.url = ""
        self.runtime_dir = Path()
        self.key_file = Path()
        self.router: Router
        self.backend: RouterBackend
        self.launcher: Launcher

    async def __aenter__(self) -> Deployment:
        """Start everything. Raises InvalidArgument or IoError, with nothing left behind."""
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        """End all requests, the HTTP front, the workers and the router, in this order."""
        await self._stack.aclose()

    async def _start(self) -> None:
        config, stack = self._config, self._stack
        api_key = read_api_key(config)
        sock = stack.enter_context(bind_http(config.http.host, config.http.port))
        self.runtime_dir = stack.enter_context(rundir.private())
        self.router = self._make_router()
        stack.push_async_callback(self.router.close)
        await self.router.start()
        specs = self._specs
        if specs is None:
            specs = worker_specs(
                config, self._model, self.router.address, self.key_file, self.runtime_dir
            )
        self.launcher = Launcher(specs, config.fleet.max_restarts, self.router.expect, self._joined)
        stack.push_async_callback(self.launcher.stop, _WORKERS_GRACE_S)
        self.backend = RouterBackend(self.router)
        metrics = Metrics(self._snapshot)
        app = Front(self.backend, self._codec, config.http, self._names, metrics, api_key).app()
        await self._serve_http(app, sock)
        host = f"[{config.http.host}]" if ":" in config.http.host else config.http.host
        self.url = f"http://{host}:{sock.getsockname()[1]}"
        # Last in, so first when all ends: clients hear why before anything they wait for is gone.
        stack.callback(self.backend.close)
        self.launcher.start()

    def _joined(self, role: str) -> list[int]:
        workers = self.router.dispatcher.workers.values()
        return [worker.pid for worker in workers if worker.role == role]

    def _make_router(self) -> Router:
        router, http, worker = self._config.router, self._config.http, self._config.worker
        if router.key_file:
            self.key_file = Path(router.key_file).resolve()
            key = read_key_file(self.key_file)
        else:
            self.key_file = self.runtime_dir / "control.key"
            key = make_key_file(self.key_file)
        dispatcher = Dispatcher(
            ClusterIndex(),
            keys_under(deployment_secret(), worker.dtype),
            serves={
                "model_epoch": self._epoch,
                "page_size": str(worker.page_size),
                "format": PAGE_FORMATS[worker.dtype],
            },
            max_queue=http.max_queue,
            max_wait_s=http.max_wait_s,
            max_attempts=router.max_attempts,
            rejoin_wait_s=router.rejoin_wait_s,
            heartbeat_timeout_s=router.heartbeat_timeout_s,
        )
        address = router.address or f"unix:{self.runtime_dir}/router.sock"
        return Router(dispatcher, address, key, router.heartbeat_ms)

    async def _serve_http(self, app: Any, sock: socket.socket) -> None:
        server = _Server(
            uvicorn.Config(
                app,
                log_level="warning",
                access_log=False,
                lifespan="off",
                server_header=False,
            )
        )
        task = asyncio.create_task(server.serve(sockets=[sock]))

        async def stop() -> None:
            server.should_exit = True
            _, late = await asyncio.wait([task], timeout=_CLIENTS_GRACE_S)
            if late:  # clients that do not read, or are still sending: to us they have left
                for client in list(server.server_state.connections):
                    client.transport.abort()
                await asyncio.wait([task])

        self._stack.push_async_callback(stop)
        while not server.started and not task.done():
            await asyncio.sleep(0.005)

    def _snapshot(self) -> Snapshot:
        dispatcher = self.router.dispatcher
        counters = {**dispatcher.counters, "worker_restarts": self.launcher.restarts}
        return Snapshot(
            dispatcher.workers.values(),
            dispatcher.num_running,
            dispatcher.num_waiting,
            counters,
        )

    async def wait_ready(self, count: int) -> None:
        """Until ``count`` workers have joined, but for those that keep failing.

        Raises WorkerFailed.
        """
        while len(self.router.dispatcher.workers) < count - len(self.launcher.failing):
            await asyncio.sleep(0.02)
            self.check()

    def check(self) -> None:
        """Raises WorkerFailed when a worker cannot be kept alive."""
        if self.launcher.failed.done():
            raise self.launcher.failed.result()


__all__ = ["Deployment", "WorkerFailed", "bind_http", "read_api_key"]
