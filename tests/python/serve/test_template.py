"""The launcher with a template, and workers that do nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from kvcore.serve.launcher import Launcher, ProcessSpec

# The template notes that it loaded; a worker that there is: who it is, whose child, what it got.
TEMPLATE = """
import os, sys, threading, time
from kvcore.serve.template import forked_workers
log, how = sys.argv[1:]

def note(*words):
    with open(log, "a") as file:
        print(*words, file=file)

def load():
    note("loaded", os.getpid())
    if how == "exit":
        sys.exit(2)
    if how == "threads":
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    return how

shared, argv = forked_workers(load)
note("worker", os.getpid(), os.getppid(), os.getsid(0), shared, os.read(0, 1), *argv)
if argv[0] == "exit":
    sys.exit(int(argv[1]))
time.sleep(60)
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


class Case:
    """A launcher over one template, and the notes that template and workers leave."""

    def __init__(self, folder: Path, how: str, *workers: str, max_restarts: int = 100) -> None:
        self._log = folder / "log"
        self._log.touch()
        template = (sys.executable, "-c", TEMPLATE, str(self._log), how)
        plain = ("/bin/sh", "-c", f"echo plain $$ >> {self._log}; exec sleep 60")
        specs = [
            ProcessSpec(f"mono-{i}", plain, "mono", template, tuple(args.split()))
            for i, args in enumerate(workers)
        ]
        self.launcher = Launcher(specs, max_restarts)
        self.launcher.start()

    def notes(self, kind: str) -> list[list[str]]:
        lines = [line.split() for line in self._log.read_text().splitlines()]
        return [line for line in lines if line[0] == kind]

    async def until(self, ready: Callable[[], Any]) -> None:
        while not ready():
            await asyncio.sleep(0.01)


def case(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    def run(tmp_path: Path) -> None:
        asyncio.run(asyncio.wait_for(test(tmp_path), 60))

    run.__name__ = test.__name__
    return run


@case
async def test_workers_are_forked_off_one_template(tmp_path: Path) -> None:
    made = Case(tmp_path, "model", "stay 1", "stay 2")
    await made.until(lambda: len(made.notes("worker")) == 2)
    assert len(made.notes("loaded")) == 1 and not made.notes("plain")
    for _, pid, parent, session, shared, stdin, *args in made.notes("worker"):
        assert int(parent) == os.getpid() and session == pid
        assert shared == "model" and stdin == "b''" and args[0] == "stay"
    await made.until(lambda: len(made.launcher.pids()) == 2)
    pids = [*made.launcher.pids().values(), *made.launcher.template_pids()]
    assert len(pids) == 3 and all(alive(pid) for pid in pids)
    await made.launcher.stop()
    assert not any(alive(pid) for pid in pids)


@case
async def test_a_killed_worker_is_forked_again(tmp_path: Path) -> None:
    made = Case(tmp_path, "model", "stay")
    await made.until(lambda: made.launcher.pids() and made.notes("worker"))
    os.kill(made.launcher.pids()["mono-0"], signal.SIGKILL)
    await made.until(lambda: len(made.notes("worker")) == 2)
    assert made.launcher.restarts == 1 and len(made.notes("loaded")) == 1
    await made.launcher.stop()


@case
async def test_exit_code_2_of_a_worker_is_reported(tmp_path: Path) -> None:
    made = Case(tmp_path, "model", "exit 2")
    failed = await made.launcher.failed
    assert failed.exit_code == 2 and "mono-0 ended with exit code 2" in str(failed)
    assert made.launcher.restarts == 0
    await made.launcher.stop()


@case
async def test_a_worker_that_keeps_ending_is_given_up(tmp_path: Path) -> None:
    made = Case(tmp_path, "model", "exit 3", max_restarts=2)
    failed = await made.launcher.failed
    assert failed.exit_code == 3 and "3 times within" in str(failed)
    assert made.launcher.restarts == 2 and len(made.notes("loaded")) == 1
    await made.launcher.stop()
    assert made.launcher.template_pids() == []


@case
async def test_workers_outlive_a_killed_template_and_the_next_is_of_a_new_one(
    tmp_path: Path,
) -> None:
    made = Case(tmp_path, "model", "stay")
    await made.until(lambda: made.launcher.pids() and made.notes("worker"))
    (template,), worker = made.launcher.template_pids(), made.launcher.pids()["mono-0"]
    os.kill(template, signal.SIGKILL)
    await made.until(lambda: len(made.notes("loaded")) == 2)  # before anybody asks for it
    assert alive(worker) and made.launcher.restarts == 0
    os.kill(worker, signal.SIGKILL)
    await made.until(lambda: len(made.notes("worker")) == 2)
    assert not made.notes("plain") and made.launcher.restarts == 1
    await made.until(lambda: made.launcher.pids())
    pids = [*made.launcher.pids().values(), *made.launcher.template_pids()]
    await made.launcher.stop()
    assert len(pids) == 2 and not any(alive(pid) for pid in pids)


@case
async def test_a_template_that_cannot_load_ends_as_its_worker_would(tmp_path: Path) -> None:
    made = Case(tmp_path, "exit", "stay")
    failed = await made.launcher.failed
    assert failed.exit_code == 2 and "mono-0 ended with exit code 2" in str(failed)
    await made.launcher.stop()


@case
async def test_a_template_with_threads_forks_nothing(tmp_path: Path) -> None:
    made = Case(tmp_path, "threads", "stay", "stay")
    await made.until(lambda: len(made.notes("plain")) == 2)
    assert not made.notes("worker") and made.launcher.template_pids() == []
    assert len(made.notes("loaded")) == 1 and made.launcher.restarts == 0
    await made.launcher.stop()
    assert not any(alive(int(pid)) for _, pid in made.notes("plain"))


def test_why_nothing_is_forked_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    test_a_template_with_threads_forks_nothing(tmp_path)
    assert "workers load the model each: the template has 2 threads" in caplog.text


@case
async def test_stop_does_not_wait_for_a_template_that_loads(tmp_path: Path) -> None:
    made = Case(tmp_path, "model", "stay")
    await made.until(lambda: made.launcher.template_pids())
    (template,) = made.launcher.template_pids()
    began = time.monotonic()
    await made.launcher.stop()
    assert time.monotonic() - began < 2.0
    assert not alive(template) and made.launcher.pids() == {}
