"""A whole deployment in a thread of the test: router, HTTP and fake worker processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvcore.config import Config, from_mapping
from kvcore.serve.deployment import Deployment
from kvcore.serve.launcher import ProcessSpec
from serve_fakes import MODEL, ByteCodec

FAKE = Path(__file__).with_name("fake_worker.py")


class Stack:
    """What a test may look at and do; ``call`` runs in the deployment's event loop."""

    def __init__(self, deployment: Deployment, folder: Path, loop: Any) -> None:
        self.deployment = deployment
        self.url = deployment.url
        self.folder = folder
        self._loop = loop

    def call(self, function: Callable[[], Any]) -> Any:
        async def run() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(10)

    def log(self, kind: str = "", role: str = "") -> list[dict[str, Any]]:
        path = self.folder / "log"
        lines = path.read_text().splitlines() if path.exists() else []
        entries = [json.loads(line) for line in lines]
        return [e for e in entries if kind in ("", e["kind"]) and role in ("", e["role"])]

    def wait(self, ready: Callable[[], Any], seconds: float = 5.0) -> Any:
        end = time.monotonic() + seconds
        while not (value := ready()):
            assert time.monotonic() < end, "waited too long"
            time.sleep(0.01)
        return value

    def pid(self, name: str) -> int:
        return int(self.call(self.deployment.launcher.pids)[name])

    def roles(self) -> dict[str, int]:
        return dict(self.call(self.deployment.backend.roles))


@contextlib.contextmanager
def stack(
    folder: Path, *workers: tuple[str, list[str]], config: dict[str, Any] | None = None
) -> Iterator[Stack]:
    """Deploy fake workers: ("decode", ["--delay-s", "0.1"]), ...; ready when entered."""
    given = config or {}
    key_file = folder / "key"
    key_file.write_bytes(bytes(range(32)))
    key_file.chmod(0o600)
    address = f"unix:{folder}/router.sock"
    tables = {
        **given,
        "http": {"port": 0, **given.get("http", {})},
        "router": {"address": address, "key_file": str(key_file), **given.get("router", {})},
    }
    settings = from_mapping(Config, tables)
    common = ("--router", address, "--key-file", str(key_file), "--dir", str(folder))
    specs = [
        ProcessSpec(
            f"{role}-{index}",
            (sys.executable, str(FAKE), role, *common, *more),
            role,
        )
        for index, (role, more) in enumerate(workers)
    ]
    done = threading.Event()
    box: dict[str, Any] = {}

    async def main() -> None:
        stop = asyncio.Event()
        box["loop"], box["stop"] = asyncio.get_running_loop(), stop
        async with Deployment(settings, ByteCodec(), [MODEL], MODEL, "e", specs) as deployment:
            await asyncio.wait_for(deployment.wait_ready(len(specs)), 20)
            box["stack"] = Stack(deployment, folder, asyncio.get_running_loop())
            done.set()
            await stop.wait()

    def run() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            box["error"] = error
        finally:
            done.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    done.wait(30)
    if "stack" not in box:
        raise box.get("error", TimeoutError("the deployment did not start"))
    try:
        yield box["stack"]
    finally:
        box["loop"].call_soon_threadsafe(box["stop"].set)
        thread.join(20)
        assert not thread.is_alive(), "the deployment did not stop"
