"""The process loop against a router played by the test, over a real socket, with the hash model."""

import asyncio
import contextlib
import dataclasses
import threading
import time

import numpy as np
import pytest
from hash_model import expected, request, rig
from kvcore import _core, wire
from kvcore.config import WorkerLaunch
from kvcore.errors import InvalidArgument, PeerDead
from kvcore.pages import PageClass
from kvcore.worker.engine import Engine
from kvcore.worker.process import WorkerProcess

ABOUT = {"model": "m", "model_epoch": "e", "page_spec": "s", "max_context": 512, "num_frames": 64}


def fields_of(name: int, prompt, max_tokens: int = 8, **options) -> dict:
    asked = request(name, prompt, max_tokens, **options)
    return {**dataclasses.asdict(asked), "tokens": list(prompt), "keys": [b"k" * 32]}


def keys_of(tokens) -> list[bytes]:
    return _core.keys.KeyChain(b"s" * 32, b"n" * 32, 16).extend(np.array(tokens, np.int32))


class Router:
    """Accepts one worker at a time; ``links`` gets each connection after its hello."""

    def __init__(self) -> None:
        self.links: asyncio.Queue = asyncio.Queue()

    async def start(self, path: str) -> None:
        async def handler(connection: wire.Connection) -> None:
            kind, hello = await connection.recv()
            assert kind == "hello"
            connection.send_nowait("hello_ack", {"router_id": bytes(16), "heartbeat_ms": 20})
            await self.links.put((hello, connection))
            await asyncio.Event().wait()

        self.server = await wire.serve(f"unix:{path}", b"", handler, role="router")

    async def worker(self) -> tuple[dict, wire.Connection]:
        return await asyncio.wait_for(self.links.get(), 10)


async def until(connection: wire.Connection, *kinds: str, count: int = 1) -> list:
    """Messages up to the ``count``-th of the given kinds, heartbeats left out."""
    seen = []
    while count:
        kind, fields = await asyncio.wait_for(connection.recv(), 10)
        count -= kind in kinds
        if kind != "heartbeat" or "heartbeat" in kinds:
            seen.append((kind, fields))
    return seen


@contextlib.asynccontextmanager
async def running(tmp_path, parts, role: str = "mono"):
    router = Router()
    await router.start(str(tmp_path / "router.sock"))
    launch = WorkerLaunch(role=role, router=router.server.address, key_file="")
    worker = WorkerProcess(launch, Engine(parts.model, parts.memory, parts.plan), ABOUT)
    task = asyncio.create_task(worker.run())
    try:
        yield router, worker, task
    finally:
        worker.stop()
        assert await asyncio.wait_for(task, 15) == 0
        await router.server.close()
        assert parts.memory.owned_pages == 0


def scenario(test):
    """Runs an async test within a time limit."""

    def run(tmp_path) -> None:
        asyncio.run(asyncio.wait_for(test(tmp_path), 60))

    run.__name__ = test.__name__
    return run


def slow(parts, seconds: float) -> None:
    good = parts.model.forward
    parts.model.forward = lambda *args: (time.sleep(seconds), good(*args))[1]


@scenario
async def test_heartbeats_and_hello_name_the_table_of_now(tmp_path) -> None:
    parts = rig(page_size=16, extent=2, profile="small")
    first = parts.memory.kv_table
    assert first == parts.memory.classes["small"].digest.hex()
    async with running(tmp_path, parts) as (router, _, _):
        hello, link = await router.worker()
        assert hello["kv_table"] == first
        assert (await until(link, "heartbeat"))[-1][1]["kv_table"] == first
        newer = PageClass(parts.pool.spec, [[("k4", "int8")] * 8])
        parts.memory.sealer.classes = [parts.memory.sealer.classes[0], newer]
        beat = {}
        while beat.get("kv_table") != newer.digest.hex():
            beat = (await until(link, "heartbeat"))[-1][1]
            assert beat["kv_table"] in (first, newer.digest.hex())
        await link.close()
        hello, _ = await router.worker()
        assert hello["kv_table"] == newer.digest.hex()


@scenario
async def test_requests_run_and_answers_equal_the_model(tmp_path) -> None:
    async with running(tmp_path, rig(secret=b"s" * 32)) as (router, _, _):
        hello, link = await router.worker()
        assert (hello["role"], hello["model"], hello["num_frames"]) == ("mono", "m", 64)
        prompts = {name: list(range(name, name + 70)) for name in range(6)}
        for name, prompt in prompts.items():
            await link.send("generate", fields_of(name, prompt, num_logprobs=1))
        tokens: dict[int, list[int]] = {name: [] for name in prompts}
        for kind, fields in await until(link, "finished", count=6):
            if kind == "tokens":
                tokens[fields["request_id"][-1]] += fields["token_ids"]
                assert len(fields["top_ids"]) == len(fields["logprobs"]) == 1
        assert tokens == {name: expected(prompt, 8) for name, prompt in prompts.items()}
        beat = (await until(link, "heartbeat"))[-1][1]
        stats = dict(zip(beat["stats_names"], beat["stats_values"], strict=True))
        assert beat["num_frames"] == 64 and stats["computed_prompt_tokens"] > 0


@scenario
async def test_bad_requests_are_answered_and_harm_nobody(tmp_path) -> None:
    async with running(tmp_path, rig(secret=b"s" * 32)) as (router, _, _):
        _, link = await router.worker()
        await link.send("generate", fields_of(1, []))
        await link.send("generate", fields_of(2, [5], temperature=float("nan")))
        await link.send("reserve", fields_of(3, [5]))
        await link.send("cancel", {"request_id": bytes(16)})
        await link.send("hello_ack", {"router_id": bytes(16), "heartbeat_ms": 1})
        await link.send("generate", fields_of(4, [5], 2))
        seen = await until(link, "finished")
        failed = {f["request_id"][-1]: (f["code"], f["message"]) for k, f in seen if k == "failed"}
        assert failed[1][0] == failed[2][0] == "invalid_argument"
        assert failed[1][1].startswith("tokens has 0") and "temperature" in failed[2][1]
        assert failed[3][0] == "unsupported"


@scenario
async def test_cancel_stops_a_running_request(tmp_path) -> None:
    parts = rig(secret=b"s" * 32)
    slow(parts, 0.005)
    async with running(tmp_path, parts) as (router, _, _):
        _, link = await router.worker()
        await link.send("generate", fields_of(1, [1], 400, ignore_eos=1))
        await until(link, "tokens", count=3)
        await link.send("cancel", {"request_id": (1).to_bytes(16, "big")})
        end = (await until(link, "finished"))[-1][1]
        assert end["reason"] == "cancelled" and end["completion_tokens"] < 300


@scenario
async def test_a_lost_router_frees_everything_and_a_new_one_is_greeted(tmp_path) -> None:
    parts = rig(secret=b"s" * 32)
    slow(parts, 0.005)
    async with running(tmp_path, parts) as (router, worker, _):
        first, link = await router.worker()
        await link.send("generate", fields_of(1, list(range(64)), 400, ignore_eos=1))
        await until(link, "tokens", count=2)
        await router.server.close()
        again = Router()
        await again.start(str(tmp_path / "router.sock"))
        second, link = await again.worker()
        assert second == first
        seen = await until(link, "prefix_events")
        assert [kind for kind, _ in seen] == ["prefix_events"]  # nothing of the old request
        assert sorted(seen[0][1]["stored"]) == sorted(keys_of(range(64)))
        assert seen[0][1]["snapshot"] == 1
        assert parts.memory.owned_pages == 0 and not worker.engine_loop.busy
        await link.send("generate", fields_of(1, [7, 8], 3))
        assert (await until(link, "finished"))[-1][1]["completion_tokens"] == 3
        await again.server.close()


@scenario
async def test_prefix_events_are_numbered_and_resync_sends_a_snapshot(tmp_path) -> None:
    async with running(tmp_path, rig(secret=b"s" * 32)) as (router, _, _):
        _, link = await router.worker()
        start = (await until(link, "prefix_events"))[-1][1]
        assert (start["stored"], start["snapshot"]) == ([], 1)
        keys = keys_of(range(64))
        await link.send("generate", fields_of(1, range(70), 1))
        events = (await until(link, "prefix_events"))[-1][1]
        assert (sorted(events["stored"]), events["removed"]) == (sorted(keys), [])
        assert events["snapshot"] == 0
        assert events["seq"] == start["seq"] + 1 and events["incarnation"] == start["incarnation"]
        await link.send("prefix_resync", {})
        whole = (await until(link, "prefix_events"))[-1][1]
        assert (sorted(whole["stored"]), whole["snapshot"]) == (sorted(keys), 1)


@scenario
async def test_drain_and_sigterm_let_running_requests_end(tmp_path) -> None:
    parts = rig(secret=b"s" * 32)
    slow(parts, 0.002)
    async with running(tmp_path, parts) as (router, worker, task):
        _, link = await router.worker()
        await link.send("generate", fields_of(1, [1], 40, ignore_eos=1))
        await until(link, "tokens")
        await link.send("drain", {})
        await link.send("generate", fields_of(2, [1], 4))
        seen = await until(link, "drained")
        refused = next(f for k, f in seen if k == "failed")
        assert (refused["request_id"][-1], refused["code"], refused["retryable"]) == (
            2,
            "draining",
            1,
        )
        assert [f["reason"] for k, f in seen if k == "finished"] == ["length"]
        worker.stop()
        with pytest.raises(PeerDead):
            await until(link, "tokens")
        assert link.closed_in_order
        await asyncio.wait_for(task, 5)


@scenario
async def test_a_dead_engine_ends_the_process(tmp_path) -> None:
    parts = rig(secret=b"s" * 32)
    router = Router()
    await router.start(str(tmp_path / "router.sock"))
    launch = WorkerLaunch(role="mono", router=router.server.address, key_file="")
    engine = Engine(parts.model, parts.memory, parts.plan)
    worker = WorkerProcess(launch, engine, ABOUT)
    task = asyncio.create_task(worker.run())
    await router.worker()
    hook, threading.excepthook = threading.excepthook, lambda args: None
    try:
        engine.scheduler.schedule = lambda: 1 / 0
        assert await asyncio.wait_for(task, 10) == 1
    finally:
        threading.excepthook = hook
    await router.server.close()


@scenario
async def test_a_refused_worker_says_why_and_does_not_ask_again(tmp_path) -> None:
    hellos = []

    async def handler(connection: wire.Connection) -> None:
        hellos.append(await connection.recv())
        answer = {"request_id": bytes(16), "code": "refused", "message": "page_spec = 's'"}
        await connection.send("failed", answer)

    server = await wire.serve(f"unix:{tmp_path}/router.sock", b"", handler, role="router")
    launch = WorkerLaunch(role="mono", router=server.address, key_file="")
    parts = rig(secret=b"s" * 32)
    worker = WorkerProcess(launch, Engine(parts.model, parts.memory, parts.plan), ABOUT)
    with pytest.raises(InvalidArgument, match="refused this worker: page_spec = 's'"):
        await worker.run()
    assert len(hellos) == 1 and not worker.engine_loop.alive
    await server.close()


@scenario
async def test_a_router_that_leaves_during_hello_is_no_refusal(tmp_path) -> None:
    parts = rig(secret=b"s" * 32)
    first = asyncio.Event()

    async def handler(connection: wire.Connection) -> None:
        await connection.recv()
        first.set()
        await connection.close("server closes")

    server = await wire.serve(f"unix:{tmp_path}/router.sock", b"", handler, role="router")
    launch = WorkerLaunch(role="mono", router=server.address, key_file="")
    worker = WorkerProcess(launch, Engine(parts.model, parts.memory, parts.plan), ABOUT)
    task = asyncio.create_task(worker.run())
    await first.wait()
    await server.close()
    router = Router()
    await router.start(str(tmp_path / "router.sock"))
    await router.worker()
    worker.stop()
    assert await asyncio.wait_for(task, 15) == 0
    await router.server.close()


@scenario
async def test_a_router_that_has_another_key_is_not_asked_again(tmp_path) -> None:
    async def handler(connection: wire.Connection) -> None:
        pytest.fail("a worker without the key got in")

    server = await wire.serve(f"unix:{tmp_path}/router.sock", b"k" * 32, handler, role="router")
    launch = WorkerLaunch(role="mono", router=server.address, key_file="")
    parts = rig(secret=b"s" * 32)
    worker = WorkerProcess(launch, Engine(parts.model, parts.memory, parts.plan), ABOUT)
    with pytest.raises(InvalidArgument, match=r"refused this worker: .*pre-shared key"):
        await worker.run()
    assert not worker.engine_loop.alive
    await server.close()
