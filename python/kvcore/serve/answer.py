"""One HTTP answer: choices run side by side, whole or as server-sent events; a client that
leaves cancels its requests."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from kvcore.router.state import Ask, Done, Failure
from kvcore.serve.errors import ApiError, JsonAnswer, encode_json, from_failure, internal_error
from kvcore.serve.generation import Assembler, Backend
from kvcore.serve.metrics import Metrics, RequestClock
from kvcore.serve.protocol import Params
from kvcore.serve.shapes import Piece, Shape, facts, usage
from kvcore.serve.text import TextCodec

log = logging.getLogger("kvcore.serve")
KEEP_ALIVE_S = 2.0
Emit = Callable[[int, Piece], Awaitable[None]]


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Answer(Response):
    """The response object: starts the requests when called, sends JSON or events."""

    def __init__(
        self,
        backend: Backend,
        codec: TextCodec,
        metrics: Metrics,
        params: Params,
        shape: Shape,
        asks: Sequence[Ask],
        path: str,
    ) -> None:
        super().__init__()
        self._backend, self._codec, self._metrics = backend, codec, metrics
        self._params, self._shape, self._asks = params, shape, asks
        self._begun: set[int] = set()
        self._started = False
        self._last_sent = 0.0
        self._path = path
        self._outcome = 200

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""

        async def tell(message: Message) -> None:
            try:
                await send(message)
            except OSError as error:
                raise ClientDisconnect from error

        work = asyncio.create_task(self._work(scope, receive, tell))
        leave = asyncio.create_task(_gone(receive))
        try:
            await asyncio.wait({work, leave}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                self._outcome = 499
                self._metrics.disconnects.inc()
        finally:
            self._metrics.requests.labels(self._path, str(self._outcome)).inc()
            for task in (work, leave):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task

    async def _work(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await (self._stream(send) if self._params.stream else self._whole(scope, receive, send))
        except ClientDisconnect:
            log.debug("%s: the client left while it was sent its answer", self._path)
        except Exception as error:  # whatever it is, a stream never ends without a word
            if not isinstance(error, ApiError):
                log.exception("%s failed", self._path)
                error = internal_error()
            with contextlib.suppress(ClientDisconnect):
                await self._refuse(error, scope, receive, send)

    async def _refuse(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        self._outcome = error.status
        self._metrics.errors.labels(error.code or error.kind).inc()
        if self._started:
            await self._event(send, error.body())
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        else:
            await error.response()(scope, receive, send)

    async def _run_all(self, emit: Emit) -> list[Done]:
        tasks = [
            asyncio.create_task(self._choice(index, ask, emit))
            for index, ask in enumerate(self._asks)
        ]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _choice(self, index: int, ask: Ask, emit: Emit) -> Done:
        """Run one prompt, emitting its pieces. Raises ApiError when the router fails it."""
        stream = self._backend.submit(ask)
        assembler, clock = Assembler(self._codec, self._params), RequestClock(self._metrics)
        try:
            while True:
                output = await stream.next()
                if isinstance(output, Failure):
                    raise from_failure(output)
                if isinstance(output, Done):
                    await emit(index, assembler.end(output.reason))
                    done = dataclasses.replace(output, completion_tokens=assembler.count)
                    clock.done(done)
                    return done
                if assembler.stopped:
                    continue
                before = assembler.count
                piece = assembler.push(output)
                clock.tokens(assembler.count - before)
                if assembler.stopped:
                    stream.finish()
                if piece.text or piece.token_ids:
                    await emit(index, piece)
        finally:
            stream.cancel()

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        pieces = [Piece() for _ in self._asks]

        async def keep(index: int, piece: Piece) -> None:
            pieces[index].add(piece)

        dones = await self._run_all(keep)
        choices = [
            self._shape.choice(index, piece, ask.tokens)
            for index, (piece, ask) in enumerate(zip(pieces, self._asks, strict=True))
        ]
        body = {**self._shape.head(chunk=False), "choices": choices}
        answer = JsonAnswer({**body, "usage": usage(dones), "kvcore": facts(dones)})
        await answer(scope, receive, send)

    async def _stream(self, send: Send) -> None:
        async def emit(index: int, piece: Piece) -> None:
            first = index not in self._begun
            self._begun.add(index)
            event = self._shape.chunk(index, piece, first)
            if first and self._shape.token_ids:
                event["choices"][0]["prompt_token_ids"] = list(self._asks[index].tokens)
            if self._params.include_usage:
                event["usage"] = None
            await self._event(send, event)

        alive = asyncio.create_task(self._keep_alive(send))
        try:
            dones = await self._run_all(emit)
        finally:
            alive.cancel()
            await asyncio.gather(alive, return_exceptions=True)
        if self._params.include_usage:
            last = {**self._shape.head(chunk=True), "choices": [], "usage": usage(dones)}
            await self._event(send, {**last, "kvcore": facts(dones)})
        done = {"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False}
        await send(done)

    async def _keep_alive(self, send: Send) -> None:
        """Comment lines in a stream that stands still, while its worker is started again perhaps:
        clients and proxies give up connections that are silent for a few seconds."""
        while True:
            quiet_s = time.monotonic() - self._last_sent if self._started else 0.0
            if quiet_s >= KEEP_ALIVE_S:
                await self._body(send, b": waiting\n\n")
                quiet_s = 0.0
            await asyncio.sleep(KEEP_ALIVE_S - quiet_s)

    async def _event(self, send: Send, value: Any) -> None:
        if not self._started:
            self._started = True
            headers = [
                (b"content-type", b"text/event-stream; charset=utf-8"),
                (b"cache-control", b"no-cache"),
                (b"x-accel-buffering", b"no"),
            ]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._body(send, b"data: " + encode_json(value) + b"\n\n")

    async def _body(self, send: Send, body: bytes) -> None:
        self._last_sent = time.monotonic()
        await send({"type": "http.response.body", "body": body, "more_body": True})
