"""Real worker processes under a real router: equal to one process, through deaths and restarts."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from kvcore.config import deployment_secret, make_key_file
from kvcore.prefix import ClusterIndex
from kvcore.router.dispatch import Dispatcher
from kvcore.router.server import Router
from kvcore.router.state import Ask, Done, Failure
from kvcore.serve.backend import ClientStream, RouterBackend
from kvcore.serve.keys import keys_under
from pair import make_mono, prompt, request, run_mono

START_LIMIT_S = 120  # a process loads torch and transformers, on a busy machine


class Fleet:
    """A router in this process and workers beside it, started and killed by the test."""

    def __init__(self, folder: Path, model: Path, router: Router, options: list[str]) -> None:
        self.folder, self.model, self.router, self.options = folder, model, router, options
        self.backend = RouterBackend(router)
        self.processes: list[asyncio.subprocess.Process] = []

    async def start(self, *roles: str) -> list[asyncio.subprocess.Process]:
        count = len(self.router.dispatcher.workers) + len(roles)
        started = []
        for role in roles:
            argv = [sys.executable, "-m", "kvcore.cli", "worker", role, "--model", self.model]
            argv += ["--router", self.router.address, "--key-file", self.folder / "key"]
            argv += ["--runtime-dir", self.folder, "--kv-bytes", "64Mi", *self.options]
            environment = {**os.environ, "HOME": str(self.folder)}
            started.append(await asyncio.create_subprocess_exec(*map(str, argv), env=environment))
        self.processes += started
        await self.until(lambda: len(self.workers) == count, START_LIMIT_S)
        return started

    @property
    def workers(self) -> list[Any]:
        return list(self.router.dispatcher.workers.values())

    def pid_at(self, role: str) -> int:
        """The worker of ``role`` that a request is at."""
        return next(w.pid for w in self.workers if w.role == role and w.attempts)

    async def until(self, ready: Callable[[], bool], limit_s: float = 10.0) -> None:
        end = time.monotonic() + limit_s
        while not ready():
            assert time.monotonic() < end, "waited too long"
            await asyncio.sleep(0.005)

    def submit(self, tokens: list[int], count: int, **options: Any) -> ClientStream:
        options = {"temperature": 0.0, "ignore_eos": True} | options
        ask = Ask(secrets.token_bytes(16), tuple(tokens), count, **options)
        return self.backend.submit(ask)

    async def answer(self, stream: ClientStream) -> tuple[list[int], Done]:
        tokens: list[int] = []
        while True:
            output = await asyncio.wait_for(stream.next(), 60)
            assert not isinstance(output, Failure), output
            if isinstance(output, Done):
                return tokens, output
            tokens += output.ids

    async def quiet(self) -> None:
        """Until every worker reports that no sequence holds pages."""
        await self.until(lambda: all(w.running == w.waiting == 0 and w.stats for w in self.workers))
        await self.until(lambda: all(w.stats["owned_pages"] == 0 for w in self.workers))


@contextlib.asynccontextmanager
async def fleet(folder: Path, model: Path, *options: str) -> AsyncIterator[Fleet]:
    key = make_key_file(folder / "key")
    secret = deployment_secret(folder / ".local" / "share" / "kvcore")
    dispatcher = Dispatcher(ClusterIndex(), keys_under(secret, "bfloat16"), rejoin_wait_s=60.0)
    router = Router(dispatcher, f"unix:{folder}/router.sock", key, heartbeat_ms=50)
    await router.start()
    made = Fleet(folder, model, router, list(options))
    try:
        yield made
    finally:
        for process in made.processes:
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
        codes = [await asyncio.wait_for(p.wait(), 20) for p in made.processes]
        await router.close()
    assert all(code in (0, -signal.SIGKILL) for code in codes), codes
    assert not list(folder.glob("decode-*.sock")) or -signal.SIGKILL in codes


def scenario(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    def run(tmp_path: Path, tiny_path: Path, tiny: Any) -> None:
        asyncio.run(test(tmp_path, tiny_path, tiny))

    run.__name__ = test.__name__
    return run


def alone(model: Any, tokens: list[int], count: int, **options: Any) -> list[int]:
    return run_mono(make_mono(model, 64), request(tokens, count, **options))[0].tokens


@scenario
async def test_two_workers_equal_one_process_and_share_prefixes(
    tmp_path: Path, tiny_path: Path, tiny: Any
) -> None:
    async with fleet(tmp_path, tiny_path, "--transport", "tcp") as made:
        await made.start("prefill", "decode")
        sampled = {"temperature": 0.8, "top_p": 0.9, "seed": 11}
        asked = [(prompt(n), {} if n % 2 else sampled) for n in (1, 64, 65, 128, 200, 333)]
        streams = [made.submit(tokens, 10, **options) for tokens, options in asked]
        for (tokens, options), stream in zip(asked, streams, strict=True):
            got, done = await made.answer(stream)
            assert got == alone(tiny, tokens, 10, **options)
            cached = done.cached_tokens
            assert done.computed_prompt_tokens == len(tokens) - cached and cached < len(tokens)
            assert done.transport == "tcp" and done.prefill_s > 0 and done.queue_s > 0
            pages = -(-len(tokens) // 64)
            assert done.kv_bytes == 3 * pages * tiny.page_spec(64).slice_bytes
        turn = [*prompt(333), *prompt(20)]
        got, done = await made.answer(made.submit(turn, 10))
        assert got == alone(tiny, turn, 10)
        assert done.cached_tokens == 320
        assert done.kv_bytes == 3 * tiny.page_spec(64).slice_bytes
        made.submit(prompt(100), 600).cancel()
        await made.quiet()


@scenario
async def test_killed_workers_are_survived(tmp_path: Path, tiny_path: Path, tiny: Any) -> None:
    async with fleet(tmp_path, tiny_path) as made:
        await made.start("prefill", "decode", "decode")
        tokens = prompt(150)
        stream = made.submit(tokens, 400)
        first = await asyncio.wait_for(stream.next(), 60)
        os.kill(made.pid_at("decode"), signal.SIGKILL)
        killed = time.monotonic()
        count = len(made.workers)
        await made.until(lambda: len(made.workers) < count)
        assert time.monotonic() - killed < 2.0
        got, done = await made.answer(stream)
        assert [*first.ids, *got] == alone(tiny, tokens, 400)
        assert done.attempts >= 2  # more where a loaded machine lets a heartbeat be late

        stream = made.submit(prompt(700), 20)
        os.kill(next(w.pid for w in made.workers if w.role == "prefill"), signal.SIGKILL)
        await made.until(lambda: len(made.workers) == 1)
        await made.quiet()  # the reservation is given back
        await made.start("prefill")
        got, done = await made.answer(stream)
        assert got == alone(tiny, prompt(700), 20)
        await made.quiet()

        stream = made.submit(tokens, 400)  # a worker that stands still for a while
        first = await asyncio.wait_for(stream.next(), 60)
        pid = made.pid_at("decode")
        os.kill(pid, signal.SIGSTOP)
        try:
            await made.until(lambda: len(made.workers) == 1)
        finally:
            os.kill(pid, signal.SIGCONT)
        got, done = await made.answer(stream)
        assert [*first.ids, *got] == alone(tiny, tokens, 400)
        assert done.attempts >= 2  # more where a loaded machine lets a heartbeat be late
        await made.quiet()


@pytest.mark.nightly
@scenario
async def test_a_thousand_requests_with_cancels_and_kills(
    tmp_path: Path, tiny_path: Path, tiny: Any
) -> None:
    async with fleet(tmp_path, tiny_path) as made:
        await made.start("prefill", "prefill", "decode", "decode")
        mono = make_mono(tiny, 64)

        async def one(number: int) -> None:
            tokens = prompt(1 + number * 37 % 300, number)
            stream = made.submit(tokens, 1 + number % 30)
            if number % 5 == 0:
                await asyncio.sleep(number % 17 / 50)
                stream.cancel()
                return
            got, _ = await made.answer(stream)
            assert got == run_mono(mono, request(tokens, 1 + number % 30))[0].tokens

        for start in range(0, 1000, 20):
            if start % 200 == 100:
                role = ("prefill", "decode")[start // 200 % 2]
                os.kill(next(w.pid for w in made.workers if w.role == role), signal.SIGKILL)
                await made.until(lambda: len(made.workers) == 3)
                await made.start(role)
            await asyncio.gather(*(one(number) for number in range(start, start + 20)))
        await made.quiet()
