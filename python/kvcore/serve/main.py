"""``kvcore serve``: router, HTTP front and workers until told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import Iterator

from rich.console import Console

from kvcore import wire
from kvcore.config import Config, check_machine, deployment_secret, read_key_file
from kvcore.errors import InvalidArgument
from kvcore.model import hub
from kvcore.serve.codec import ModelCodec
from kvcore.serve.deployment import Deployment, bind_http, read_api_key
from kvcore.serve.launcher import WorkerFailed

log = logging.getLogger("kvcore.serve")


def run(config: Config) -> int:
    """Serve until SIGTERM, SIGINT or SIGHUP; returns the exit code.

    Raises InvalidArgument, IoError, Unsupported or ModelUnavailable before anything is started.
    """
    _check(config)
    with progress(f"model {config.model}"):
        files = hub.resolve(config.model)
        codec, epoch = ModelCodec(files.path), hub.weights_digest(files)
    names = [config.http.served_name or files.model_id, config.model, files.model_id]
    try:
        return asyncio.run(_serve(config, codec, names, epoch))
    except WorkerFailed as error:
        log.error("%s", error)
        return 2 if error.exit_code == 2 else 1


def _check(config: Config) -> None:
    """Refuse at once what would otherwise be refused after the model was fetched and read."""
    fleet, router = config.fleet, config.router
    read_api_key(config)
    check_machine(config.worker, fleet.prefill + fleet.decode + fleet.mono)
    if router.key_file:
        read_key_file(router.key_file)
    if router.address:
        try:
            wire.parse_address(router.address)
        except InvalidArgument as error:
            raise InvalidArgument(f"router.address: {error}") from error
    deployment_secret()
    bind_http(config.http.host, config.http.port).close()


async def _serve(config: Config, codec: ModelCodec, names: list[str], epoch: str) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has SIGHUP
            loop.add_signal_handler(number, stop.set)
    fleet = config.fleet
    count = fleet.prefill + fleet.decode + fleet.mono
    stopped = asyncio.create_task(stop.wait())
    async with Deployment(config, codec, names, config.model, epoch) as deployment:
        _say(f"kvcore: listening on {deployment.url}")
        key_file, address = deployment.key_file, deployment.router.address
        log.info("workers may join with --router %s --key-file %s", address, key_file)
        if not count:
            _say(f"kvcore: waits for workers, --router {address} --key-file {key_file}")
        ready = asyncio.create_task(_ready(deployment, count))
        with progress(f"{_workers(count)} starting" if count else "no worker yet"):
            await asyncio.wait({ready, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            joined = ready.result()
            _say(f"kvcore: {names[0]} is ready, {_workers(joined)}")
        else:
            ready.cancel()
        deployment.launcher.failed.add_done_callback(lambda _: stop.set())
        await stopped
        deployment.check()
        log.info("stopping")
    return 0


def _workers(count: int) -> str:
    return f"{count} worker{'s' if count > 1 else ''}"


async def _ready(deployment: Deployment, count: int) -> int:
    """Once requests can be served; the number of workers. Raises WorkerFailed."""
    await deployment.wait_ready(count)
    while not deployment.backend.ready():
        await asyncio.sleep(0.05)
        deployment.check()
    return len(deployment.router.dispatcher.workers)


@contextlib.contextmanager
def progress(text: str) -> Iterator[None]:
    """Show that something takes its time: a spinner on a terminal, else a line in the log."""
    console = Console(stderr=True)
    if console.is_terminal:
        with console.status(text):
            yield
    else:
        log.info("%s ...", text)
        yield


def _say(line: str) -> None:
    with contextlib.suppress(BrokenPipeError):  # who read it may be gone; serving goes on
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
