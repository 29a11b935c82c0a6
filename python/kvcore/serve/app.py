"""The OpenAI-compatible HTTP front (Starlette)."""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kvcore.config import HttpConfig
from kvcore.router.state import Ask
from kvcore.serve.answer import Answer
from kvcore.serve.errors import ApiError, JsonAnswer, encode_json, internal_error
from kvcore.serve.generation import Backend
from kvcore.serve.metrics import Metrics
from kvcore.serve.protocol import Params, parse_chat, parse_completion, parse_json
from kvcore.serve.shapes import Shape
from kvcore.serve.text import TextCodec

log = logging.getLogger("kvcore.serve")
_INLINE_BYTES = 4 * 1024  # a longer body is read and tokenised off the event loop
_DRAIN_S = 2.0
Handler = Callable[[Request], Awaitable[Response]]
Prompts = Sequence[Sequence[int]]
Prepared = tuple[Params, Prompts]


class Limit(NamedTuple):
    """Tokens that prompt and answer may have together, and what it is that holds no more."""

    tokens: int
    holder: str


class TooLarge(Response):
    """413 at once; then a little more of the body is thrown away, so that a client that is still
    sending gets to read the answer instead of a reset connection."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(encode_json(error.body()), 413, media_type="application/json")
        self.headers["Connection"] = "close"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        start = {"type": "http.response.start", "status": 413, "headers": self.raw_headers}
        await send(start)
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        end = time.monotonic() + _DRAIN_S
        try:
            while (left := end - time.monotonic()) > 0:
                message = await asyncio.wait_for(receive(), left)
                if message["type"] == "http.disconnect" or not message.get("more_body"):
                    break
        except asyncio.TimeoutError:
            pass
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class Front:
    """Routes, checks and answers; all state lives in the router behind ``backend``.

    Args:
        names: model names that clients may use; the first is the one shown.
        api_key: "" serves anybody, else requests but /health need ``Authorization: Bearer KEY``.
    """

    def __init__(
        self,
        backend: Backend,
        codec: TextCodec,
        config: HttpConfig,
        names: Sequence[str],
        metrics: Metrics,
        api_key: str = "",
    ) -> None:
        self._backend, self._codec, self._config = backend, codec, config
        self._names = tuple(dict.fromkeys(names))
        self._metrics = metrics
        self._key = api_key.encode()
        self._created = int(time.time())

    def app(self) -> Starlette:
        """The ASGI application."""
        return Starlette(
            routes=[
                self._guard("/v1/completions", self._completions),
                self._guard("/v1/chat/completions", self._chat),
                self._guard("/v1/models", self._models),
                self._guard("/v1/models/{model:path}", self._model),
                self._guard("/metrics", self._show_metrics),
                Route("/health", self._health),
            ],
            exception_handlers={HTTPException: _http_error, Exception: _server_error},
        )

    def _guard(self, path: str, handler: Handler) -> Route:
        async def guarded(request: Request) -> Response:
            try:
                self._authenticate(request)
                response = await handler(request)
            except ApiError as error:
                self._metrics.errors.labels(error.code or error.kind).inc()
                response = TooLarge(error) if error.status == 413 else error.response()
            except ClientDisconnect:
                response = Response(status_code=499)
            if not isinstance(response, Answer):  # an answer's status shows later
                self._metrics.requests.labels(path, str(response.status_code)).inc()
            return response

        methods = ["POST"] if handler in (self._completions, self._chat) else ["GET"]
        return Route(path, guarded, methods=methods)

    def _authenticate(self, request: Request) -> None:
        if not self._key:
            return
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        good = hmac.compare_digest(key.strip().encode(), self._key)
        if scheme.lower() != "bearer" or not good:
            raise ApiError(
                401,
                "missing or wrong API key: send the header Authorization: Bearer KEY",
                kind="authentication_error",
                code="invalid_api_key",
            )

    async def _body(self, request: Request) -> bytes:
        limit = self._config.max_body_bytes
        length = request.headers.get("content-length", "")
        if length.isdigit() and int(length) > limit:
            raise self._too_large(limit)
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > limit:
                raise self._too_large(limit)
        return bytes(body)

    @staticmethod
    def _too_large(limit: int) -> ApiError:
        return ApiError(
            413, f"body: larger than {limit} bytes", param="body", code="body_too_large"
        )

    def _check_model(self, name: str) -> None:
        if name not in self._names:
            raise ApiError(
                404,
                f"model {name[:200]!r} does not exist; this server has {', '.join(self._names)}",
                param="model",
                code="model_not_found",
            )

    async def _completions(self, request: Request) -> Response:
        def read(body: bytes) -> Prepared:
            parsed = parse_completion(parse_json(body), self._codec.vocab_size)
            self._check_model(parsed.params.model)
            return parsed.params, [
                self._encode("prompt", p, limit) if isinstance(p, str) else p
                for p in parsed.prompts
            ]

        limit = self._limit()
        return self._answer(False, *await self._prepare(request, read), limit, "prompt")

    async def _chat(self, request: Request) -> Response:
        def read(body: bytes) -> Prepared:
            parsed = parse_chat(parse_json(body))
            self._check_model(parsed.params.model)
            text = self._codec.chat_text(parsed.messages)
            return parsed.params, [self._encode("messages", text, limit, special=False)]

        limit = self._limit()
        return self._answer(True, *await self._prepare(request, read), limit, "messages")

    async def _prepare(self, request: Request, read: Callable[[bytes], Prepared]) -> Prepared:
        """What ``read`` makes of the body, in a thread where that takes more than a moment."""
        body = await self._body(request)
        return read(body) if len(body) <= _INLINE_BYTES else await asyncio.to_thread(read, body)

    def _encode(self, field: str, text: str, limit: Limit, special: bool = True) -> Sequence[int]:
        """Tokens of ``text``. Raises ApiError at once where it is far too long for ``limit``."""
        if (least := self._codec.least_tokens(text)) >= limit.tokens:
            raise _too_long(field, f"at least {least}", limit)
        return self._codec.encode(text, special)

    def _limit(self) -> Limit:
        model, workers = self._codec.max_context, self._backend.max_context()
        if workers and workers < model:  # they know the model too
            return Limit(workers, "the KV memory of a worker (--kv-bytes)")
        return Limit(model, "the model's context")

    def _answer(
        self, chat: bool, params: Params, prompts: Prompts, limit: Limit, field: str
    ) -> Response:
        seed = secrets.randbits(63) if params.seed is None else params.seed % 2**64
        deadline = self._backend.now() + self._config.request_timeout_s
        asks = [
            Ask(
                request_id=secrets.token_bytes(16),
                tokens=tuple(tokens),
                max_tokens=_room(len(tokens), params, limit, field),
                temperature=params.temperature,
                top_p=params.top_p,
                seed=seed,
                stop_token_ids=() if params.ignore_eos else self._codec.eos_ids,
                ignore_eos=params.ignore_eos,
                num_logprobs=params.num_logprobs,
                kv_profile=params.kv_profile,
                deadline=deadline,
            )
            for tokens in prompts
        ]
        shape = Shape(chat, self._names[0], params.num_logprobs >= 0, params.return_token_ids)
        path = "/v1/chat/completions" if chat else "/v1/completions"
        return Answer(self._backend, self._codec, self._metrics, params, shape, asks, path)

    async def _models(self, request: Request) -> Response:
        return JsonAnswer({"object": "list", "data": [self._card(self._names[0])]})

    async def _model(self, request: Request) -> Response:
        self._check_model(request.path_params["model"])
        return JsonAnswer(self._card(request.path_params["model"]))

    def _card(self, name: str) -> dict[str, Any]:
        card = {"id": name, "object": "model", "created": self._created, "owned_by": "kvcore"}
        return {**card, "max_model_len": self._limit().tokens}

    async def _health(self, request: Request) -> Response:
        ready = self._backend.ready()
        status = "ok" if ready else "workers are not ready"
        body = {"status": status, "workers": self._backend.roles()}
        return JsonAnswer(body, status_code=200 if ready else 503)

    async def _show_metrics(self, request: Request) -> Response:
        return Response(self._metrics.render(), media_type="text/plain; version=0.0.4")


def _room(length: int, params: Params, limit: Limit, field: str) -> int:
    """Tokens the answer may have. Raises ApiError when prompt and answer do not fit."""
    if not length:
        raise ApiError(400, f"{field} is empty: at least one token is needed", param=field)
    left = limit.tokens - length
    if left < 1:
        raise _too_long(field, str(length), limit)
    if params.max_tokens is None:
        return min(params.default_max_tokens or left, left)
    if params.max_tokens > left:
        name = params.max_tokens_field
        raise ApiError(
            400,
            f"{name} = {params.max_tokens}: {limit.holder} holds {limit.tokens} tokens and the "
            f"prompt has {length}, so at most {left} are left",
            param=name,
            code="context_length_exceeded",
        )
    return params.max_tokens


def _too_long(field: str, tokens: str, limit: Limit) -> ApiError:
    return ApiError(
        400,
        f"{field}: {tokens} tokens, but {limit.holder} holds {limit.tokens}, answer included",
        param=field,
        code="context_length_exceeded",
    )


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    response = ApiError(error.status_code, message).response()
    response.headers.update(error.headers or {})
    return response


async def _server_error(request: Request, error: Exception) -> Response:
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return internal_error().response()
