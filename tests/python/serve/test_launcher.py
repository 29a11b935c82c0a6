"""The launcher alone, with processes that do nothing."""

from __future__ import annotations

import asyncio
import time

from kvcore.serve.launcher import Launcher, ProcessSpec


def spec(role: str, script: str) -> ProcessSpec:
    return ProcessSpec(f"{role}-0", ("/bin/sh", "-c", script), role)


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
