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
_FAILING_BACKOFF_S = 30.0
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
    template = (*_COMMAND, "worker", "template", *common)
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

    One that ended more than ``max_restarts`` times within a minute is *failing* until it lives for
    a minute: it is started again at ever longer intervals. ``failed`` resolves with WorkerFailed
    when nothing is left to hope for: all processes of a role are failing and no worker of that role
    has joined, or one cannot be started or ends with a fatal code the first time it is started.

    Args:
        tell: called with the roles that are kept alive whenever these change.
        joined: process ids of the workers of a role that serve, whoever started them.
    """

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        max_restarts: int,
        tell: Callable[[set[str]], None] = lambda roles: None,
        joined: Callable[[str], Sequence[int]] = lambda role: (),
    ) -> None:
        self._specs = list(specs)
        self._tell, self._joined = tell, joined
        self.failing: set[str] = set()
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
        ends: list[float] = []  # within a minute; those of a failing one since it is
        first = True
        while not self._stopping.is_set():
            began = time.monotonic()
            code, how, fatal = await self._run(spec)
            if self._stopping.is_set():
                return
            now = time.monotonic()
            if now - began >= _WINDOW_S:
                self.failing.discard(spec.name)
            if spec.name not in self.failing:
                ends = [at for at in ends if now - at < _WINDOW_S]
            ends.append(now)
            if len(ends) > self._max_restarts:
                self.failing.add(spec.name)
            times = f", {len(ends)} times within {now - ends[0]:.0f} s" if len(ends) > 1 else ""
            if (first and fatal) or (spec.name in self.failing and not self._hope(spec.role)):
                self._give_up(f"worker {spec.name} {how}{times}: see the log above", code)
                return
            first = False
            await self._back_off(spec.name, how + times, len(ends))

    async def _back_off(self, name: str, how: str, count: int) -> None:
        """Wait before the next start, longer each time, and say so."""
        failing = name in self.failing
        most = _FAILING_BACKOFF_S if failing else _LAST_BACKOFF_S
        delay = min(_FIRST_BACKOFF_S * 2 ** min(count - 1, 20), most)
        if failing:
            text = "%s %s: it keeps failing, others do its work; starting it again in %.1f s"
            log.error(text, name, how, delay)
        else:
            log.warning("%s %s; starting it again in %.1f s", name, how, delay)
        self.restarts += 1
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), delay)

    def _hope(self, role: str) -> bool:
        """Whether a worker of this role serves, or one of ours that is not failing may soon."""
        ended = {p.pid for p in self._processes.values() if p.returncode is not None}
        if set(self._joined(role)) - ended:
            return True
        return any(s.role == role and s.name not in self.failing for s in self._specs)

    async def _run(self, spec: ProcessSpec) -> tuple[int, str, bool]:
        """Start it and wait for its end: exit code, in words, and whether it is a fatal one."""
        try:
            code = await self._life(spec)
        except TemplateEnded as error:
            code = error.exit_code
        except OSError as error:
            return 1, f"cannot be started: {error}", True
        return code, _ended(code), code == _FATAL_EXIT

    async def _life(self, spec: ProcessSpec) -> int:
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
