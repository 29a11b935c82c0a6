"""The prefill and decode roles: an engine each, and a layer-wise stream of pages between them.

The decode side owns the request's output and grants pages for what its prefix cache lacks. The
prefill side computes the prompt, publishes every (chunk, layer) as it is appended, samples the
first token and sends it as the stream's payload, with what it did, so that one worker tells all.
All layers or nothing: a broken hand-over frees both sides' pages and is reported as retryable.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from typing import Any

from kvcore import wire
from kvcore.errors import Corrupt, InvalidArgument
from kvcore.model.sampling import Sampled
from kvcore.stream import LayerStep
from kvcore.worker.engine import Engine, snake
from kvcore.worker.request import Request, Sequence, State
from kvcore.worker.scheduler import Row


def pack_first(token: Sampled, request_id: bytes, done: dict[str, Any]) -> bytes:
    """The stream's payload: what the prefill side did, and the first token, as two messages."""
    name = {"request_id": request_id}
    head = wire.encode("prefilled", name | done)
    return len(head).to_bytes(4, "little") + head + wire.encode("tokens", name | vars(token))


def unpack_first(payload: bytes, vocab_size: int) -> tuple[Sampled, dict[str, Any]]:
    """The first token and what the prefill side did. Raises Corrupt."""
    cut = 4 + int.from_bytes(payload[:4], "little")
    head, done = wire.decode(payload[4:cut])
    kind, fields = wire.decode(payload[cut:])
    ids = fields.get("token_ids", [])
    if head != "prefilled" or kind != "tokens" or len(ids) != 1 or not 0 <= ids[0] < vocab_size:
        raise Corrupt(
            f"the payload holds {head}, and {kind} with token_ids {ids}, not a first token"
        )
    chosen = (fields[name] for name in ("token_ids", "logprobs", "top_ids", "top_logprobs"))
    return Sampled(*chosen), {name: done[name] for name in done if name != "request_id"}


class _StreamEngine(Engine):
    """An engine with an end of a stream."""

    def __init__(self, *args: Any, endpoint: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.endpoint, self.event_fd = endpoint, endpoint.event_fd

    def close(self) -> None:
        self.endpoint.close()


class DecodeEngine(_StreamEngine):
    """Receives prompts' pages and decodes; ``add`` reserves pages and answers ``reserved``."""

    receives = True
    grant_limit_s = 600.0  # of requests without a deadline; a peer's death is noticed at once

    def poll(self) -> None:
        """Takes what the stream did: arrived sequences join the next step's batch."""
        for kind, request_id, *rest in self.endpoint.poll():
            seq = self._live.get(request_id)
            if seq is None or seq.state is not State.RECEIVING:
                continue  # ended here while its last event was under way
            if kind == "complete":
                self._received(seq, *rest)
            else:
                self._fail(seq, snake(rest[0]), rest[1], retryable=True)

    def _admitted(self, seq: Sequence) -> None:
        super()._admitted(seq)
        if seq.state is not State.RECEIVING:
            return  # preempted before: its tokens are known, it recomputes
        first = seq.num_computed // seq.page_size
        last = -(-seq.num_prompt // seq.page_size)
        limit_s = seq.request.deadline_s or self.grant_limit_s
        if self.memory.sealer:  # what arrives full arrives compressed, a sequence's first excepted
            full = slice(max(first, 1), seq.num_prompt // seq.page_size)
            seq.pages[full] = self.memory.sealer.exchange(seq.pages[full].tolist(), seq.kv_table)
        grant = self.endpoint.grant(
            seq.request_id,
            seq.pages[first:last].tolist(),
            seq.num_prompt - seq.num_computed,
            seq.num_computed,
            max(0.001, seq.arrival_s + limit_s - self.clock()),
        )
        self._tell("reserved", seq, grant=grant, cached_tokens=seq.num_computed)

    def _received(self, seq: Sequence, payload: bytes, stats: Any) -> None:
        try:
            token, done = unpack_first(payload, self.model.config.vocab_size)
        except Corrupt as error:
            self._fail(seq, "corrupt", str(error), retryable=True)
            return
        moved = {"kv_bytes": stats.bytes, "transport": stats.transport}
        seq.extra = moved | {
            "cached_tokens": done["cached_tokens"],
            "arrived_fraction": stats.arrived_fraction,
            # From the end of prefill to here, where the first decode step begins.
            "exposed_s": self.clock() - stats.commit_ns * 1e-9 if stats.same_clock else 0.0,
        }
        done["queue_s"] += seq.started_s - seq.arrival_s
        self.counters["kv_bytes_received"] += stats.bytes
        self.scheduler.received(seq)
        seq.num_computed = seq.computed_mark = seq.num_prompt
        self.memory.publish(seq)
        self.memory.fill(seq)
        self._tell("prefilled", seq, **(done | moved))
        self._accept(seq, token)

    def _ended(self, seq: Sequence) -> None:
        if seq.state is State.RECEIVING:
            self.endpoint.release(seq.request_id)  # fence, then the pages may go

    def _facts(self, seq: Sequence) -> dict[str, Any]:
        return seq.extra or {}


@dataclass
class _Handover:
    """A prompt's way out of the prefill worker: where to, and what was done for it."""

    grant: bytes
    start_token: int
    sender: Any = None
    done: dict[str, Any] = field(default_factory=dict)


class PrefillEngine(_StreamEngine):
    """Computes prompts and hands their pages over; keeps what it computed as a prefix cache."""

    decodes = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._sending: dict[bytes, Sequence] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._sending) or super().has_work

    def prefill(self, request: Request, grant: bytes, start_token: int) -> None:
        """Queues a prompt whose tokens from ``start_token`` on go to ``grant``."""
        size = request.tokens.size
        if not 0 <= start_token < max(size, 1):
            raise InvalidArgument(f"start_token is {start_token}; allowed: 0 to {size - 1}")
        if request.request_id in self._sending:
            raise InvalidArgument(f"request_id {request.request_id.hex()} is already in use here")
        self.add(request, extra=_Handover(grant, start_token))

    def cancel(self, request_id: bytes) -> bool:
        seq = self._sending.pop(request_id, None)
        if seq is None:
            return super().cancel(request_id)
        seq.extra.sender.abort("cancelled")
        self._tell_finished(seq, "cancelled")
        return True

    def cancel_all(self) -> None:
        super().cancel_all()
        for request_id in list(self._sending):
            self.cancel(request_id)

    def poll(self) -> None:
        """Takes what the stream did: sent prompts are reported, broken ones end."""
        for kind, request_id, *rest in self.endpoint.poll():
            seq = self._sending.pop(request_id, None)
            if seq is not None and kind == "sent":
                self._sent(seq, rest[0])
            elif seq is not None:
                self._tell("failed", seq, code=snake(rest[0]), message=rest[1], retryable=1)
            elif request_id in self._live:
                self._fail(self._live[request_id], snake(rest[0]), rest[1], retryable=True)

    def _sent(self, seq: Sequence, stats: Any) -> None:
        self.counters["kv_bytes_sent"] += stats.bytes
        moved = {"kv_bytes": stats.bytes, "transport": stats.transport}
        self._tell("prefilled", seq, **(seq.extra.done | moved))

    def _admitted(self, seq: Sequence) -> None:
        super()._admitted(seq)
        handover = seq.extra
        first = handover.start_token // seq.page_size
        last = -(-seq.num_prompt // seq.page_size)
        handover.sender = self.endpoint.open(handover.grant, seq.pages[first:last].tolist())
        # Known here, unknown there: these go at once.
        handover.sender.push_cached_upto(seq.num_computed)

    def _attention(self, rows: Rows[Row]) -> Any:
        senders = [(row.seq.extra.sender, index) for index, row in enumerate(rows)]
        return LayerStep(self.plan, senders)

    def _sampled(self, seq: Sequence, token: Sampled) -> None:
        """The prompt is done: the stream holds the pages it still reads, the cache the rest."""
        seq.extra.done = self._prefilled(seq)
        seq.extra.sender.commit(pack_first(token, seq.request_id, seq.extra.done))
        del self._live[seq.request_id]
        self._sending[seq.request_id] = seq
        self.scheduler.remove(seq)

    def _ended(self, seq: Sequence) -> None:
        if seq.extra.sender is not None:
            seq.extra.sender.abort("cancelled")
