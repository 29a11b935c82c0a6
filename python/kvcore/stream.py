"""The layer-wise hand-over of KV pages from a prefill worker to a decode worker.

The decode side grants pages; the prefill side opens the grant, publishes each (chunk, layer) as
soon as it is appended, and commits with a small payload. The decode side is told once: "complete"
when every slice of every layer and the commit have arrived, or "failed". All layers or nothing.

    # decode worker                                   # prefill worker
    grant = ep.grant(request_id, pages, num_tokens)   sender = ep.open(grant, pages)
    ...                                               step = LayerStep(plan, [(sender, 0)])
    for event in ep.poll(): ...                       ...; sender.commit(payload)

Unlike workers: a prefill group of several ranks sends in shares, each rank the layers and KV heads
it holds (:func:`plan_shares`, ``grant(shares=...)``, ``open(share=...)``). Page size, layout and
element format may differ; where the granted pages are of a compressed class, the sender encodes
them on the way, to the bytes that sealing them there would make.

Pages in flight are held by io refs, so their owners may drop them at any time; a released or failed
hand-over is fenced first: when ``release`` returns, no byte can land in its pages. See
``csrc/stream``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, NamedTuple

from kvcore import _core
from kvcore.errors import InvalidArgument
from kvcore.kernels import AttentionPlan
from kvcore.pages import PageSpec, Pool

__all__ = [
    "Endpoint",
    "EndpointStats",
    "LayerStep",
    "LoopbackHub",
    "Sender",
    "Share",
    "Side",
    "StreamStats",
    "describe_grant",
    "heads_of_rank",
    "plan_shares",
    "stream_addresses",
]

Sender = _core.stream.Sender
LoopbackHub = _core.stream.LoopbackHub

log = logging.getLogger(__name__)

_CHECKSUMS = {"off": 0, "sampled": 1, "all": 2}


class Share(NamedTuple):
    """What one sender gives of a receiver's pages; layers and KV heads as the model counts them."""

    layer_begin: int
    num_layers: int
    head_begin: int
    num_heads: int


class Side(NamedTuple):
    """What a worker's pages hold: ``spec``'s layers and KV heads, from these of the model on."""

    spec: PageSpec
    layer_begin: int = 0
    head_begin: int = 0


def heads_of_rank(num_kv_heads: int, tp_degree: int, tp_rank: int) -> tuple[int, int]:
    """First KV head and number of KV heads that a rank of tensor parallelism holds.

    An equal share, or one head where there are more ranks than heads (ranks are replicas then).

    Raises:
        Unsupported: neither number divides the other.
    """
    return _core.stream.heads_of_rank(num_kv_heads, tp_degree, tp_rank)


def plan_shares(
    senders: Sequence[Side], receiver: Side, spread: int = 0
) -> list[tuple[int, Share]]:
    """Which sender (index) gives what of all that ``receiver`` holds; each head of each layer once.

    Args:
        spread: any number, such as the receiver's rank: of several senders with the same heads it
            chooses one, so that not all receivers read the first.

    Raises:
        Unsupported: head_dims or latent differ, or no sender holds a layer or head; names it.
    """
    plan = _core.stream.plan_shares(list(senders), receiver, spread % 2**32)
    return [(sender, Share(*share)) for sender, share in plan]


@dataclass(frozen=True)
class StreamStats:
    """What one hand-over moved and when.

    Times ending in ``_ns`` are CLOCK_MONOTONIC: of the receiver, but for ``mark_ns`` (the sender's
    last attention ended) and ``commit_ns`` (the sender gave the payload, prefill is over), which
    compare with the others only when ``same_clock``. A "sent" event fills bytes, kv_bytes,
    num_layers and transport only.

    Attributes:
        bytes, kv_bytes: that arrived, and of all slices of the grant, headers included.
        arrived_fraction: of kv_bytes, what had arrived when the sender's last attention ended;
            across hosts what the sender knew to have arrived by then (a lower bound). 0 without a
            mark.
        tail_s: from the end of the last attention to the last slice; 0 without a common clock.
        exposed_s: from the commit to complete: what the hand-over adds to the time to first token.
        duplicates, dropped: slices that came again; messages and arrivals that did not fit.
        transport: "shm", "rdma", "tcp" or "loopback".
    """

    bytes: int
    kv_bytes: int
    num_layers: int
    first_ns: int
    last_ns: int
    mark_ns: int
    commit_ns: int
    end_ns: int
    same_clock: bool
    arrived_fraction: float
    tail_s: float
    exposed_s: float
    duplicates: int
    dropped: int
    transport: str


@dataclass(frozen=True)
class EndpointStats:
    """Counters of an endpoint since it was made.

    Attributes:
        receiving, sending: hand-overs now.
        completed, receive_failed, released, sent, send_failed: hand-overs that ended.
        bytes_received, bytes_sent: of completed and sent hand-overs.
        dropped: events for unknown or finished hand-overs, messages that do not parse.
        fallbacks: connections made to another address than the preferred one (allow_fallback).
        refs_lost: must be 0.
        staged_bytes: of converted slices that have not arrived yet.
        links: addresses of the outgoing links that are up.
    """

    receiving: int
    sending: int
    completed: int
    receive_failed: int
    released: int
    sent: int
    send_failed: int
    bytes_received: int
    bytes_sent: int
    dropped: int
    fallbacks: int
    refs_lost: int
    staged_bytes: int
    links: tuple[str, ...]


class Endpoint(_core.stream.Endpoint):
    """One worker's end of all its hand-overs, with its own I/O thread.

    Args:
        pool: the pages to send from and receive into.
        listen: addresses to receive on: "shm:/path.sock", "tcp:127.0.0.1:0" (a port is picked),
            "rdma:10.0.0.1:0", "loopback:NAME" (with ``hub``). A sender uses shm on the same host,
            else rdma, else tcp. Empty: this worker only sends.
        key: pre-shared, 32 bytes; empty only for shm and loopback addresses.
        identity: told to peers in the handshake, at most 256 bytes.
        checksums: "all" (each slice verified), "sampled" (each over tcp, one in 16 over shm) or
            "off". Both sides should agree: a receiver that verifies refuses slices without a sum.
        pacing_bytes_per_s: limit of each link; 0 = none.
        max_inflight_bytes: unacknowledged bytes of one hand-over. Publishing never waits for it.
        max_write_bytes: of one write; adjacent slices are sent together up to this.
        allow_fallback: try the grant's next address when the preferred one cannot be reached;
            counted in ``stats().fallbacks``. Otherwise the hand-over fails and says so.
        keepalive_s: a peer silent this long is dead.
        hub: for "loopback:" addresses (tests): endpoints of one process on one LoopbackHub.
        flip_slice: tests only: flips one bit of the n-th run of slices that arrives; 0 = none.
        layer_begin, head_begin: the layer and KV head of the model that are the pool's first.
        staging_bytes: memory for slices that are converted before they are sent, of all
            hand-overs; made when first needed. What does not fit waits.

    Raises:
        InvalidArgument: a value out of range, or a tcp address that is not loopback without a key.

    Every method may be called from any thread. ``event_fd`` is readable while events wait.
    """

    def __init__(
        self,
        pool: Pool,
        listen: Sequence[str] = (),
        *,
        key: bytes = b"",
        identity: str = "",
        checksums: Literal["off", "sampled", "all"] = "sampled",
        pacing_bytes_per_s: int = 0,
        max_inflight_bytes: int = 16 << 20,
        max_write_bytes: int = 1 << 20,
        allow_fallback: bool = False,
        keepalive_s: float = 2.0,
        hub: LoopbackHub | None = None,
        flip_slice: int = 0,
        layer_begin: int = 0,
        head_begin: int = 0,
        staging_bytes: int = 32 << 20,
    ) -> None:
        if checksums not in _CHECKSUMS:
            raise InvalidArgument(f"checksums='{checksums}' is unknown: allowed off, sampled, all")
        if isinstance(listen, str):
            raise InvalidArgument(f"listen={listen!r} must be a list of addresses")
        super().__init__(
            pool,
            list(listen),
            key,
            identity,
            _CHECKSUMS[checksums],
            pacing_bytes_per_s,
            max_inflight_bytes,
            max_write_bytes,
            allow_fallback,
            keepalive_s,
            hub,
            flip_slice,
            layer_begin,
            head_begin,
            staging_bytes,
        )
        self.pool = pool
        self._fallbacks_told = 0

    def grant(
        self,
        request_id: bytes,
        pages: Sequence[int],
        num_tokens: int,
        first_token: int = 0,
        deadline_s: float = 60.0,
        shares: Sequence[tuple[int, int, int, int]] = (),
        tell_layers: bool = False,
    ) -> bytes:
        """Lets senders write these pages. They hold io refs until the hand-over has ended.

        Args:
            request_id: 16 random bytes, the name of the hand-over.
            pages: ids in token order, exactly ceil(num_tokens / page_size) of them: open ones, and
                those of one compressed class (``Pool.alloc_in_class``), which must be full and are
                sealed when the hand-over is complete.
            num_tokens: of the range; the last page may be partly filled.
            first_token: where the range starts in the sequence, a multiple of page_size.
            deadline_s: seconds from now; then the hand-over fails with Timeout.
            shares: what each of several senders gives (:class:`Share`), together all that this pool
                holds; empty: one sender gives all. Complete: every share is, and committed.
            tell_layers: an event for each layer that is in place, before the hand-over is complete.

        Returns:
            The grant for :meth:`open` on the prefill side. Who holds it may write these pages.
        """
        return super().grant(
            request_id, list(pages), num_tokens, first_token, deadline_s, list(shares), tell_layers
        )

    def open(self, grant: bytes, pages: Sequence[int], share: int = 0) -> Sender:
        """Starts a hand-over to the endpoint that made ``grant``; connects in the background.

        Args:
            pages: this side's page ids from the one with the grant's first token to the one with
                its last, in order. They need not be computed yet; each is published when it is.
            share: which of the grant's shares this side gives.

        Compressed pages go into the receiver's compressed ones of an equal class as they are; open
        ones are encoded on the way. Where a value cannot be encoded (it is not finite) the
        hand-over fails with Unsupported: it can be granted again, to open pages.

        Raises:
            Corrupt: not a grant. Unsupported: KV that cannot become the receiver's (names the
            field), a share that this side does not hold, or no address that can be used from here.
            InvalidArgument: a wrong number of pages, or opened already.
        """
        return super().open(grant, list(pages), share)

    def release(self, request_id: bytes) -> bool:
        """Ends a granted hand-over on this side: fence, io refs back, the sender is told.

        No event follows. Returns False if it had ended already (its event may still wait in
        ``poll``) or was never granted. When this returns, no byte can land in the pages any more.
        """
        return super().release(request_id)

    def poll(self) -> list[tuple[Any, ...]]:
        """Takes the events that wait; never blocks.

        Each is one of::

            ("layer", request_id, layer: int)                      # granted with tell_layers
            ("complete", request_id, payload: bytes, StreamStats)  # all slices and the commit came
            ("sent", request_id, StreamStats)                      # the receiver has everything
            ("failed", request_id, code, message)                  # of either side

        ``code`` is the name of a class in ``kvcore.errors``. Each side gets exactly one end of a
        hand-over, but nothing after ``release``. ``layer``: all KV of this layer of the pool is in
        place and verified, so that its first attention can begin; layers come in any order, all
        before ``complete``, which alone says that the request is whole. Once its end is there the
        hand-over holds no refs (a failed sender: as soon as its writes under way have ended).
        """
        events: list[tuple[Any, ...]] = []
        waiting = self._poll()
        if waiting and (fallbacks := self._stats()["fallbacks"]) > self._fallbacks_told:
            self._fallbacks_told = fallbacks
            log.warning(
                "%d hand-over links fell back to another address than the preferred one", fallbacks
            )
        for kind, request_id, what, message, stats in waiting:
            if kind == "complete":
                events.append((kind, request_id, what, StreamStats(**stats)))
            elif kind == "sent":
                events.append((kind, request_id, StreamStats(**stats)))
            elif kind == "layer":
                events.append((kind, request_id, what))
            else:
                events.append((kind, request_id, what, message))
        return events

    async def events(self) -> AsyncIterator[tuple[Any, ...]]:
        """The events of :meth:`poll` as they come, for one asyncio task."""
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        loop.add_reader(self.event_fd, ready.set)
        try:
            while True:
                ready.clear()
                for event in self.poll():
                    yield event
                await ready.wait()
        finally:
            loop.remove_reader(self.event_fd)

    def stats(self) -> EndpointStats:
        """The counters now."""
        return EndpointStats(**self._stats())

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class LayerStep(_core.stream.LayerStep):
    """One call per layer of a prefill worker: append, publish what became whole, attend.

    Args:
        plan: prepared for the batch of this step.
        senders: pairs (sender, row of the batch whose pages it sends). A row's context_len says up
            to where its KV is in place: chunks should end on page boundaries, a partly filled page
            is sent only with the last chunk.

    Has the plan's ``run_ptr``, ``pool``, ``num_seqs``, ``num_tokens`` and ``num_q_heads``. Where
    the last slice of a hand-over leaves in this step, the end of the last layer's attention is
    marked.

    Raises:
        InvalidArgument: a row outside the batch, or a sender of another pool's pages.
    """

    def __init__(self, plan: AttentionPlan, senders: Sequence[tuple[Sender, int]] = ()) -> None:
        super().__init__(plan, list(senders))
        self.plan = plan
        self.pool = plan.pool


def stream_addresses(transport: str, socket: str) -> list[str]:
    """Where a worker of this host receives.

    Args:
        transport: "shm", "tcp", "rdma", or "rdma-or-tcp": both, and tcp alone where there can be no
            rdma link, which is logged as a warning.
        socket: the path of the shm address.
    """
    if transport == "shm":
        return [f"shm:{socket}"]
    schemes = transport.split("-or-")
    if len(schemes) > 1 and (missing := _core.transport.rdma_missing()):
        log.warning("transport = %s: KV moves over tcp, %s", transport, missing)
        schemes = ["tcp"]
    return [f"{scheme}:127.0.0.1:0" for scheme in schemes]


def describe_grant(grant: bytes) -> dict[str, Any]:
    """What a grant says: request_id, first_token, num_tokens, num_pages, sealed_pages, shares,
    kv_bytes, ttl_s and addresses.

    Raises:
        Corrupt: not a grant, cut short, or with fields out of range.
    """
    return _core.stream.describe_grant(grant)
