"""A router, a decode and a prefill worker without torch: a stand-in model over real wire, stream
and pages, so that a guest can run them on two hosts.

    python cluster.py serve ADDRESS FOLDER REQUESTS    router and decode worker, and the clients
    python cluster.py prefill FOLDER                   the prefill worker

ADDRESS is where pages are received ("rdma:10.77.0.1:0"); the router listens beside it over tcp.
They meet over FOLDER. The model: every page slice is a stamp, drawn from the tokens up to and with
that page, the layer and the page's place; the next token is a hash of all tokens. The decode worker
looks at every stamp before it answers, so a byte of another request, layer or page is found.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from kvcore import wire
from kvcore.pages import PageSpec, Pool
from kvcore.prefix import ClusterIndex
from kvcore.router.dispatch import Dispatcher
from kvcore.router.server import Router
from kvcore.router.state import Ask, Done, Failure, Output, Tokens
from kvcore.stream import Endpoint

KEY = bytes(range(32))
VOCAB = 4096
ANSWER = 5
CHUNK_PAGES = 4
SILENCE_S = 60.0  # an emulated guest may be held up
SPEC = PageSpec(num_layers=4, num_kv_heads=2, head_dim_k=64, page_size=16, extent_pages=1)


def next_token(tokens: Sequence[int]) -> int:
    """The model."""
    return zlib.crc32(np.asarray(tokens, dtype=np.int32).tobytes()) % VOCAB


def answer(prompt: Sequence[int]) -> list[int]:
    """What a client must get."""
    tokens = list(prompt)
    for _ in range(ANSWER):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def stamp(tokens: Sequence[int], layer: int, slot: int) -> tuple[np.ndarray, np.ndarray]:
    """K and V of one page: of the tokens up to its end, its layer and its place."""
    upto = tokens[: (slot + 1) * SPEC.page_size]
    seed = [zlib.crc32(np.asarray(upto, dtype=np.int32).tobytes()), layer, slot]
    shape = (SPEC.page_size, SPEC.num_kv_heads, SPEC.head_dim_k)
    k = np.random.default_rng(seed).integers(0, 1 << 15, shape, dtype=np.uint16)
    return k, k ^ np.uint16(0x55AA)


def wrong_slices(pool: Pool, pages: Sequence[int], tokens: Sequence[int]) -> int:
    """Stamps that are not these tokens'; of the last page only the filled lines count."""
    wrong = 0
    for slot, page in enumerate(pages):
        lines = min(SPEC.page_size, len(tokens) - slot * SPEC.page_size)
        for layer in range(SPEC.num_layers):
            pairs = zip(pool.read_slice(page, layer), stamp(tokens, layer, slot), strict=True)
            wrong += not all(np.array_equal(a[:lines], b[:lines]) for a, b in pairs)
    return wrong


class Worker:
    """A worker's control side: hello, heartbeats, one task for messages and one for the stream."""

    def __init__(self, role: str, listen: Sequence[str]) -> None:
        self.role = role
        self.pool = Pool(SPEC, 256, huge_pages=False)
        self.endpoint = Endpoint(
            self.pool, listen, key=KEY, identity=role, checksums="all", keepalive_s=SILENCE_S
        )
        self.requests: dict[bytes, dict[str, Any]] = {}
        self.connection: wire.Connection

    async def run(self, router: str) -> None:
        """Until the router leaves."""
        self.connection = await wire.connect(router, KEY, self.role)
        hello = {"worker_id": os.urandom(16), "incarnation": time.time_ns(), "role": self.role}
        hello |= {"model": "stand-in", "model_epoch": "1", "page_spec": SPEC.describe()}
        hello |= {"max_context": 2048, "num_frames": 256, "pid": os.getpid()}
        await self.connection.send("hello", hello | {"stream_addresses": self.endpoint.addresses})
        kind, _ = await self.connection.recv()
        assert kind == "hello_ack", kind
        jobs = [asyncio.create_task(job) for job in (self._beat(), self._stream())]
        try:
            async for kind, fields in self.connection:
                getattr(self, f"on_{kind}", lambda fields: None)(fields)
        finally:
            for job in jobs:
                job.cancel()
            ended = await asyncio.gather(*jobs, return_exceptions=True)
            await self.connection.close()
            self.endpoint.close()
        failed = [e for e in ended if e and not isinstance(e, asyncio.CancelledError)]
        assert not failed, failed
        assert self.pool.stats().io_pages == 0

    async def _beat(self) -> None:
        while True:
            free = self.pool.free_pages(1)
            self.tell("heartbeat", {"free_frames": free, "num_frames": 256})
            await asyncio.sleep(0.5)

    async def _stream(self) -> None:
        async for kind, request_id, *rest in self.endpoint.events():
            request = self.requests.pop(request_id, None)
            if request is None:
                continue
            if kind == "failed":
                code, message = rest
                fields = {"request_id": request_id, "code": code, "message": message}
                self.tell("failed", fields | {"retryable": 1})
            else:
                self.on_event(request, *rest)
            self.pool.decref(request["pages"])

    def tell(self, kind: str, fields: dict[str, Any]) -> None:
        self.connection.send_nowait(kind, fields)

    def hold(self, fields: dict[str, Any]) -> list[int]:
        pages = list(self.pool.alloc(-(-len(fields["tokens"]) // SPEC.page_size)))
        self.requests[fields["request_id"]] = fields | {"pages": pages}
        return pages

    def on_event(self, request: dict[str, Any], *rest: Any) -> None:
        raise NotImplementedError


class Decode(Worker):
    """Grants pages, looks at what arrived, answers."""

    def __init__(self, address: str) -> None:
        super().__init__("decode", [address])
        self.wrong = 0

    def on_reserve(self, fields: dict[str, Any]) -> None:
        pages, count = self.hold(fields), len(fields["tokens"])
        grant = self.endpoint.grant(fields["request_id"], pages, count, deadline_s=SILENCE_S)
        self.tell("reserved", {"request_id": fields["request_id"], "grant": grant})

    def on_event(self, request: dict[str, Any], payload: bytes, stats: Any) -> None:
        tokens = list(request["tokens"])
        self.wrong += wrong_slices(self.pool, request["pages"], tokens)
        name = {"request_id": request["request_id"]}
        facts = {"kv_bytes": stats.bytes, "transport": stats.transport}
        self.tell("prefilled", name | facts | {"computed_tokens": len(tokens)})
        given = [int.from_bytes(payload, "little")]
        while len(given) < request["max_tokens"]:
            given.append(next_token(tokens + given))
        self.tell("tokens", name | {"token_ids": given})
        ended = {"reason": "length", "prompt_tokens": len(tokens), "completion_tokens": len(given)}
        self.tell("finished", name | ended | facts)


class Prefill(Worker):
    """Writes the stamps chunk by chunk and layer by layer, each published as it is done."""

    def __init__(self) -> None:
        super().__init__("prefill", [])

    def on_prefill(self, fields: dict[str, Any]) -> None:
        tokens, pages = list(fields["tokens"]), self.hold(fields)
        sender = self.endpoint.open(fields["grant"], pages)
        for first in range(0, len(pages), CHUNK_PAGES):
            for layer in range(SPEC.num_layers):
                for slot in range(first, min(first + CHUNK_PAGES, len(pages))):
                    self.pool.write_slice(pages[slot], layer, *stamp(tokens, layer, slot))
                upto = min(len(tokens), (first + CHUNK_PAGES) * SPEC.page_size)
                sender.publish_upto(layer, upto)
        sender.mark()
        sender.commit(next_token(tokens).to_bytes(4, "little"))

    def on_event(self, request: dict[str, Any], stats: Any) -> None:
        fields = {"request_id": request["request_id"], "kv_bytes": stats.bytes}
        fields |= {"computed_tokens": len(request["tokens"]), "transport": stats.transport}
        self.tell("prefilled", fields)


async def ask(router: Router, prompts: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    """Gives the prompts to the router, all at once, and waits for what becomes of each."""
    ended: dict[bytes, asyncio.Future[Done | Failure]] = {}
    tokens: dict[bytes, list[int]] = {}

    def deliver(request_id: bytes, output: Output) -> None:
        if isinstance(output, Tokens):
            tokens[request_id] += output.ids
        else:
            ended[request_id].set_result(output)

    router.deliver = deliver
    for prompt in prompts:
        name = os.urandom(16)
        ended[name], tokens[name] = asyncio.get_running_loop().create_future(), []
        router.act(router.dispatcher.submit(Ask(name, tuple(prompt), ANSWER), router.now()))
    results = []
    for prompt, (name, end) in zip(prompts, ended.items(), strict=True):
        done = await end
        assert isinstance(done, Done), done
        right = tokens[name] == answer(prompt)
        results.append({"right": right, "kv_bytes": done.kv_bytes, "transport": done.transport})
    return results


async def serve(address: str, folder: Path, requests: int) -> int:
    """Router, decode worker and clients; the verdict goes to FOLDER/result.json."""
    host = address.split(":", 1)[1].rpartition(":")[0]
    dispatcher = Dispatcher(
        ClusterIndex(), lambda worker, tokens: (b"", []), heartbeat_timeout_s=SILENCE_S
    )
    router = Router(dispatcher, f"tcp:{host}:0", KEY)
    await router.start()
    decode = Decode(address)
    task = asyncio.create_task(decode.run(router.address))
    (folder / "router.new").write_text(router.address)
    (folder / "router.new").rename(folder / "router")
    while not dispatcher.ready():
        await asyncio.sleep(0.05)
    draw = np.random.default_rng(4)
    sizes = [1, 16, 17, *(int(n) for n in draw.integers(20, 400, max(0, requests - 3)))]
    prompts = [draw.integers(0, VOCAB, n).tolist() for n in sizes[:requests]]
    results = await ask(router, prompts)
    await router.close()
    with contextlib.suppress(wire.PeerDead):
        await task
    verdict = {
        "requests": len(results),
        "right": sum(r["right"] for r in results),
        "kv_bytes": sum(r["kv_bytes"] for r in results),
        "transports": sorted({r["transport"] for r in results}),
        "wrong_slices": decode.wrong,
        "retries": dispatcher.counters["retries"],
    }
    (folder / "result.json").write_text(json.dumps(verdict))
    print(json.dumps(verdict), flush=True)
    return 0 if verdict["right"] == len(prompts) and not decode.wrong else 1


async def prefill(folder: Path) -> int:
    """The prefill worker, until the router leaves."""
    while not (folder / "router").exists():
        await asyncio.sleep(0.1)
    with contextlib.suppress(wire.PeerDead):
        await Prefill().run((folder / "router").read_text())
    return 0


def main(arguments: Sequence[str]) -> int:
    if arguments[0] == "serve":
        return asyncio.run(serve(arguments[1], Path(arguments[2]), int(arguments[3])))
    return asyncio.run(prefill(Path(arguments[1])))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
