"""The clients' side of the router: one stream of outputs per request (a ``generation.Backend``)."""

from __future__ import annotations

import asyncio

from kvcore.router.server import Router
from kvcore.router.state import Ask, Done, Failure, Output

_SHUTTING_DOWN = Failure("shutting_down", "the server is shutting down", 1.0)


class ClientStream:
    """The outputs of one request, in order; belongs to one client task."""

    def __init__(self, backend: RouterBackend, request_id: bytes) -> None:
        self._backend, self._request_id = backend, request_id
        self._outputs: asyncio.Queue[Output] = asyncio.Queue()

    async def next(self) -> Output:
        """The next output; after Done or Failure there is none."""
        return await self._outputs.get()

    def put(self, output: Output) -> None:
        """For the backend."""
        self._outputs.put_nowait(output)

    def finish(self) -> None:
        """The answer is complete for the client (a stop string): Done follows."""
        self._backend.finish(self._request_id)

    def cancel(self) -> None:
        """The client is gone. Harmless when the request is over."""
        self._backend.cancel(self._request_id)


class RouterBackend:
    """Requests into a router's dispatcher, its outputs to the streams of those who asked."""

    def __init__(self, router: Router) -> None:
        self._router, self._dispatcher = router, router.dispatcher
        self._streams: dict[bytes, ClientStream] = {}
        self._closed = False
        router.deliver = self._deliver

    def submit(self, ask: Ask) -> ClientStream:
        """Start a request."""
        stream = ClientStream(self, ask.request_id)
        if self._closed:
            stream.put(_SHUTTING_DOWN)
            return stream
        self._streams[ask.request_id] = stream
        self._router.act(self._dispatcher.submit(ask, self.now()))
        return stream

    def finish(self, request_id: bytes) -> None:
        """End a request as stopped."""
        self._router.act(self._dispatcher.finish(request_id, self.now()))

    def cancel(self, request_id: bytes) -> None:
        """Forget a request and stop its workers."""
        self._streams.pop(request_id, None)
        self._router.act(self._dispatcher.cancel(request_id, self.now()))

    def close(self) -> None:
        """Fail what is still under way, free its workers, and refuse what comes."""
        self._closed = True
        for request_id, stream in reversed(list(self._streams.items())):  # the waiting ones first
            stream.put(_SHUTTING_DOWN)
            self.cancel(request_id)

    def ready(self) -> bool:
        """Whether a request could be served now."""
        return not self._closed and self._dispatcher.ready()

    def roles(self) -> dict[str, int]:
        """Live workers by role."""
        found = {"prefill": 0, "decode": 0, "mono": 0}
        for worker in self._dispatcher.workers.values():
            found[worker.role] += 1
        return found

    def max_context(self) -> int | None:
        """The smallest context of the live workers, tokens."""
        limits = [w.max_context for w in self._dispatcher.workers.values() if w.max_context]
        return min(limits, default=None)

    def now(self) -> float:
        """The router's clock, seconds."""
        return self._router.now()

    def _deliver(self, request_id: bytes, output: Output) -> None:
        over = isinstance(output, (Done, Failure))
        get = self._streams.pop if over else self._streams.get
        stream = get(request_id, None)
        if stream is not None:
            stream.put(output)
