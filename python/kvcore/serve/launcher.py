"""Worker processes of one machine: started, watched, restarted with backoff, never orphaned."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kvcore.config import Config
from kvcore.errors import KvcoreError
from kvcore.serve.template import Forked, ForkRefused, Template, TemplateEnded, adopt_orphans

log = logging.getLogger("kvcore.launcher")
_FATAL_EXIT = 2  # usage, or a model that cannot be had: trying again changes nothing
_FIRST_BACKOFF_S, _LAST_BACKOFF_S = 0.1, 5.0
_WINDOW_S = 60.0
_COMMAND = (sys.executable, "-m", "kvcore.cli")
_Process = asyncio.subprocess.Process | Forked


class WorkerFailed(KvcoreError):
    """A worker cannot be kept alive; ``exit_code`` is the one it ended with."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclasses.dataclass(frozen=True)
class ProcessSpec:
    """One worker process: a name for the logs, its command line, and the worker's role.

    ``template`` is the command line of the template that forks it, told ``args``; () for none.
    """

    name: str
    argv: tuple[str, ...]
    role: str
    template: tuple[str, ...] = ()
    args: tuple[str, ...] = ()


def worker_specs(
    config: Config, model: str, address: str, key_file: Path, runtime_dir: Path
) -> list[ProcessSpec]:
    """The command lines of the fleet that ``config`` asks for, all of one template."""
    fleet, worker = config.fleet, config.worker
    common = ["--router", address, "--key-file", str(key_file), "--model", model]
    common += ["--runtime-dir", str(runtime_dir), "--parent-pid", str(os.getpid())]
    for field in dataclasses.fields(worker):
        common += ["--" + field.name.replace("_", "-"), str(getattr(worker, field.name))]
    template = (*_COMMAND, "worker", "mono", *common, "--template")
    if worker.threads > 1:
        log.info("workers load the model each: those with several threads are not forked")
        template = ()
    roles = [role for role in ("prefill", "decode", "mono") for _ in range(getattr(fleet, role))]
    cpus = assign_cpus(len(roles), worker.threads) if fleet.pin else [()] * len(roles)
    specs = []
    for index, (role, own) in enumerate(zip(roles, cpus, strict=True)):
        args = ("worker", role, *common, *(("--cpus", ",".join(map(str, own))) if own else ()))
        specs.append(ProcessSpec(f"{role}-{index}", (*_COMMAND, *args), role, template, args))
    return specs


def assign_cpus(num_workers: int, threads: int) -> list[tuple[int, ...]]:
    """CPUs of each worker: its own ``threads`` ones, or none pinned when there are too few."""
    free = sorted(os.sched_getaffinity(0))
    if num_workers * threads > len(free):
        log.warning(
            "%d workers with %d threads share %d CPUs: not pinned", num_workers, threads, len(free)
        )
        return [()] * num_workers
    return [tuple(free[i * threads : (i + 1) * threads]) for i in range(num_workers)]


class Launcher:
    """Keeps the processes of ``specs`` alive.

    ``failed`` resolves with WorkerFailed when one ends with a fatal code, or more than
    ``max_restarts`` times a minute. ``tell(roles)`` is called with the roles that are kept alive
    whenever these change.
    """

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        max_restarts: int,
        tell: Callable[[set[str]], None] = lambda roles: None,
    ) -> None:
        self._specs = list(specs)
        self._tell = tell
        self._max_restarts = max_restarts
        self._processes: dict[str, _Process] = {}
        self._templates = {
            spec.template: Template(spec.template) for spec in specs if spec.template
        }
        self._keepers: list[asyncio.Task[None]] = []
        self._stopping = asyncio.Event()
        self.restarts = 0
        self.failed: asyncio.Future[WorkerFailed] = asyncio.get_running_loop().create_future()

    def start(self) -> None:
        """Start all processes."""
        if self._templates:
            try:
                adopt_orphans()
            except OSError as error:
                log.warning("workers load the model each, none can be forked: %s", error)
                self._templates.clear()
        self._keepers = [asyncio.create_task(self._keep(spec)) for spec in self._specs]
        for keeper in self._keepers:
            keeper.add_done_callback(lambda _: self._tell_roles())
        self._tell_roles()

    def _tell_roles(self) -> None:
        pairs = zip(self._specs, self._keepers, strict=True)
        self._tell({spec.role for spec, keeper in pairs if not keeper.done()})

    def pids(self) -> dict[str, int]:
        """Process id by name, of those that run."""
        return {n: p.pid for n, p in self._processes.items() if p.returncode is None}

    def template_pids(self) -> list[int]:
        """Process ids of the templates that run."""
        return [template.pid for template in self._templates.values() if template.pid]

    async def stop(self, grace_s: float = 5.0) -> None:
        """SIGTERM to each, SIGKILL after ``grace_s``; returns when all are gone."""
        self._stopping.set()
        self._signal_all(signal.SIGTERM)
        if self._keepers:
            await asyncio.wait(self._keepers, timeout=grace_s)
        self._signal_all(signal.SIGKILL)
        await asyncio.gather(*self._keepers, return_exceptions=True)
        await asyncio.gather(*(template.stop() for template in self._templates.values()))

    def _signal_all(self, number: signal.Signals) -> None:
        for process in self._processes.values():
            _signal(process, number)
        for template in self._templates.values():
            template.signal(number)

    async def _keep(self, spec: ProcessSpec) -> None:
        ends: list[float] = []
        while not self._stopping.is_set():
            try:
                code = await self._run(spec)
            except TemplateEnded as error:
                code = error.exit_code
            except OSError as error:
                self._give_up(f"worker {spec.name} cannot be started: {error}", 1)
                return
            if self._stopping.is_set():
                return
            now = time.monotonic()
            ends = [at for at in ends if now - at < _WINDOW_S] + [now]
            if code == _FATAL_EXIT or len(ends) > self._max_restarts:
                times = f", {len(ends)} times within a minute" if len(ends) > 1 else ""
                self._give_up(f"worker {spec.name} {_ended(code)}{times}: see the log above", code)
                return
            delay = min(_FIRST_BACKOFF_S * 2 ** (len(ends) - 1), _LAST_BACKOFF_S)
            log.warning("%s %s; starting it again in %.1f s", spec.name, _ended(code), delay)
            self.restarts += 1
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay)

    async def _run(self, spec: ProcessSpec) -> int:
        """Start it and wait for its end; the exit code."""
        process = await self._start(spec)
        self._processes[spec.name] = process
        log.info("%s started (pid %d)", spec.name, process.pid)
        if self._stopping.is_set():  # it was being started when the others were told
            _signal(process, signal.SIGTERM)
        return await process.wait()

    async def _start(self, spec: ProcessSpec) -> _Process:
        if template := self._templates.get(spec.template):
            try:
                return await template.fork(spec.args)
            except ForkRefused as error:
                if self._templates.pop(spec.template, None):
                    log.warning("from now on workers load the model each: %s", error)
                    await template.stop()
        return await asyncio.create_subprocess_exec(
            *spec.argv, stdin=asyncio.subprocess.DEVNULL, start_new_session=True
        )

    def _give_up(self, message: str, code: int) -> None:
        if not self.failed.done():
            self.failed.set_result(WorkerFailed(message, code))


def _ended(code: int) -> str:
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def _signal(process: _Process, number: signal.Signals) -> None:
    """To the whole session of a process that still runs."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
