"""A byte-level tokenizer, a scripted backend and a real HTTP server on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import uvicorn
from kvcore.config import HttpConfig
from kvcore.router.state import Ask, Done, Failure, Output, Tokens
from kvcore.serve.app import Front
from kvcore.serve.metrics import Metrics, Snapshot

EOS = 256
MODEL = "tiny"


class ByteCodec:
    """Token = byte; 256 ends an answer. One character may need four tokens."""

    eos_ids = (EOS,)
    vocab_size = 257

    def __init__(self, max_context: int = 4096) -> None:
        self.max_context = max_context

    def encode(self, text: str, special: bool = True) -> list[int]:
        return list(text.encode())

    def least_tokens(self, text: str) -> int:
        return len(text)

    def chat_text(self, messages: Sequence[Mapping[str, Any]]) -> str:
        return "".join(f"<{m['role']}>{m['content']}\n" for m in messages)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(t for t in ids if t < 256).decode("utf-8", errors="replace")

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else b"</s>"


Script = Callable[[Ask], Sequence[Output | float]]


def say(text: str, reason: str = "stop", each: int = 1) -> Script:
    """A backend that answers ``text``, ``each`` tokens at a time, cut at max_tokens."""

    def script(ask: Ask) -> Sequence[Output | float]:
        ids = list(text.encode())[: ask.max_tokens]
        ended = reason if len(text.encode()) <= ask.max_tokens else "length"
        outputs: list[Output | float] = []
        for at in range(0, len(ids), each):
            part = ids[at : at + each]
            logprobs, top, values = [], [], []
            if ask.num_logprobs >= 0:
                logprobs = [-0.5] * len(part)
                top = [t for p in part for t in [p, *range(40, 60)][: ask.num_logprobs]]
                values = [-0.5 - i for _ in part for i in range(ask.num_logprobs)]
            outputs.append(Tokens(part, logprobs, top, values))
        done = Done(ended, len(ask.tokens), len(ids), cached_tokens=64, kv_bytes=1000)
        return [*outputs, done]

    return script


class ScriptStream:
    def __init__(self, backend: ScriptBackend, ask: Ask) -> None:
        self._backend, self._ask = backend, ask
        self._outputs = list(backend.script(ask))
        self._sent = 0
        self._over = False

    async def next(self) -> Output:
        while True:
            item = self._outputs.pop(0)
            if isinstance(item, float):
                await asyncio.sleep(item)
                continue
            await asyncio.sleep(0)
            self._over = isinstance(item, (Done, Failure))
            return item

    def finish(self) -> None:
        self._backend.finished.append(self._ask.request_id)
        self._outputs = [Done("stop", len(self._ask.tokens), 0)]

    def cancel(self) -> None:
        if not self._over:
            self._backend.cancelled.append(self._ask.request_id)
        self._over = True


class ScriptBackend:
    """Answers every request by ``script`` and keeps what was asked."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.asks: list[Ask] = []
        self.finished: list[bytes] = []
        self.cancelled: list[bytes] = []
        self.is_ready = True
        self.workers_context: int | None = None

    def submit(self, ask: Ask) -> ScriptStream:
        self.asks.append(ask)
        return ScriptStream(self, ask)

    def ready(self) -> bool:
        return self.is_ready

    def roles(self) -> dict[str, int]:
        return {"mono": int(self.is_ready)}

    def max_context(self) -> int | None:
        return self.workers_context

    def now(self) -> float:
        return time.monotonic()


@contextlib.contextmanager
def serving(app: Any) -> Iterator[str]:
    """A real uvicorn in a thread; yields its base URL."""
    sock = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1, lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.005)
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(5)
        sock.close()


def front(
    backend: Any, codec: Any = None, api_key: str = "", names: Sequence[str] = (MODEL,), **http: Any
) -> Any:
    """The ASGI application over a backend."""
    metrics = Metrics(lambda: Snapshot([], 0, 0, {}))
    config = HttpConfig(**http)
    return Front(backend, codec or ByteCodec(), config, names, metrics, api_key).app()
