"""The launcher alone, with processes that do nothing."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from pathlib import Path

import pytest
from kvcore.serve import launcher as launching
from kvcore.serve.launcher import Launcher, ProcessSpec


def spec(role: str, script: str, index: int = 0) -> ProcessSpec:
    return ProcessSpec(f"{role}-{index}", ("/bin/sh", "-c", script), role)


def test_stop_does_not_wait_for_a_restart_that_is_due_later() -> None:
    async def main() -> None:
        launcher = Launcher([spec("decode", "exit 1")], max_restarts=100)
        launcher.start()
        while launcher.restarts < 5:  # the next try is 1.6 s away
            await asyncio.sleep(0.01)
        began = time.monotonic()
        await launcher.stop()
        assert time.monotonic() - began < 1.0

    asyncio.run(asyncio.wait_for(main(), 30))


def test_the_roles_that_are_kept_alive_are_told() -> None:
    told: list[set[str]] = []

    async def main() -> None:
        specs = [spec("prefill", "exec sleep 60"), spec("decode", "exit 1")]
        launcher = Launcher(specs, max_restarts=1, tell=told.append)
        launcher.start()
        await launcher.failed
        await asyncio.sleep(0)
        assert told == [{"prefill", "decode"}, {"prefill"}]
        await launcher.stop()
        await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(main(), 30))
    assert told[-1] == set()


def test_a_process_that_cannot_be_started_is_a_failure() -> None:
    async def main() -> None:
        launcher = Launcher([ProcessSpec("mono-0", ("/nonexistent/python",), "mono")], 5)
        launcher.start()
        failed = await launcher.failed
        assert "mono-0 cannot be started" in str(failed) and failed.exit_code == 1
        await launcher.stop()

    asyncio.run(asyncio.wait_for(main(), 30))


def test_one_that_keeps_ending_is_tried_again_while_another_of_its_role_lives(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(launching, "_FAILING_BACKOFF_S", 0.3)

    async def main() -> None:
        specs = [spec("decode", "exec sleep 60", 0), spec("decode", "kill -9 $$", 1)]
        launcher = Launcher(specs, max_restarts=1)
        launcher.start()
        while launcher.restarts < 6:
            await asyncio.sleep(0.01)
        assert not launcher.failed.done() and launcher.failing == {"decode-1"}
        await launcher.stop()

    with caplog.at_level(logging.INFO, "kvcore.launcher"):
        asyncio.run(asyncio.wait_for(main(), 30))
    loud = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert "decode-1 was killed by SIGKILL, 2 times" in loud[0]
    assert "starting it again in 0.3 s" in loud[-1]


def test_the_other_of_its_role_may_end_too_and_come_back() -> None:
    """It is given up when all of a role keep ending, not when the last good one is restarted."""

    async def main() -> None:
        specs = [spec("decode", "exec sleep 60", 0), spec("decode", "exit 1", 1)]
        launcher = Launcher(specs, max_restarts=1)
        launcher.start()
        while launcher.failing != {"decode-1"}:
            await asyncio.sleep(0.01)
        os.kill(launcher.pids()["decode-0"], signal.SIGKILL)
        before = launcher.restarts
        while launcher.restarts < before + 3:
            await asyncio.sleep(0.01)
        assert not launcher.failed.done() and "decode-0" in launcher.pids()
        os.kill(launcher.pids()["decode-0"], signal.SIGKILL)
        failed = await launcher.failed
        assert "decode-" in str(failed)
        await launcher.stop()

    asyncio.run(asyncio.wait_for(main(), 30))


def test_workers_of_others_count_but_not_the_one_that_just_ended() -> None:
    async def main(served_by_another: bool) -> bool:
        launcher: Launcher

        def joined(role: str) -> list[int]:
            return [os.getpid()] if served_by_another else [launcher._processes["decode-0"].pid]

        launcher = Launcher([spec("decode", "exit 1")], max_restarts=1, joined=joined)
        launcher.start()
        while launcher.restarts < 4 and not launcher.failed.done():
            await asyncio.sleep(0.01)
        await launcher.stop()
        return launcher.failed.done()

    assert not asyncio.run(asyncio.wait_for(main(True), 30))
    assert asyncio.run(asyncio.wait_for(main(False), 30))


def test_one_that_lived_for_a_minute_fails_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "_WINDOW_S", 0.5)

    async def main() -> None:
        good = tmp_path / "good"
        script = f"[ -e {good} ] && exec sleep 60; exit 1"
        launcher = Launcher([spec("decode", "exec sleep 60"), spec("decode", script, 1)], 1)
        launcher.start()
        while launcher.failing != {"decode-1"}:
            await asyncio.sleep(0.01)
        good.touch()
        while "decode-1" not in launcher.pids():
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.6)
        os.kill(launcher.pids()["decode-1"], signal.SIGKILL)
        while launcher.failing:
            await asyncio.sleep(0.01)
        await launcher.stop()

    asyncio.run(asyncio.wait_for(main(), 30))


def test_a_fatal_exit_code_counts_only_at_the_first_start(tmp_path: Path) -> None:
    """Later it is an end as any other: the others of its role still serve."""

    async def main() -> None:
        once = f"[ -e {tmp_path}/been ] && exit 2; touch {tmp_path}/been; exit 1"
        launcher = Launcher([spec("decode", once)], max_restarts=100)
        launcher.start()
        while launcher.restarts < 4:
            await asyncio.sleep(0.01)
        assert not launcher.failed.done()
        await launcher.stop()

    asyncio.run(asyncio.wait_for(main(), 30))
