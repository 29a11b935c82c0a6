"""The dispatcher: a pure state machine from events (requests, messages, deaths, time) to actions.

It holds no socket, thread or clock. Each attempt of a request has a random id of its own, so that
a late message of a broken attempt finds nothing and is counted. An attempt starts from the prompt
and all tokens delivered so far; sampling is keyed by (seed, position), so an answer goes on where
it broke as if nothing had happened.
"""

from __future__ import annotations

import collections
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any

from kvcore.pages import geometry
from kvcore.router.policy import TYPICAL_ANSWER, can_serve, choose, frames, uncached
from kvcore.router.state import (
    Action,
    Ask,
    Deliver,
    Done,
    Failure,
    Flight,
    Load,
    Output,
    Phase,
    Send,
    Tokens,
    Worker,
)

if TYPE_CHECKING:
    from kvcore.prefix import ClusterIndex

_NOBODY: AbstractSet[bytes] = frozenset()
_MIN_RATED_TOKENS = 64  # a shorter prefill says little about the rate
_TOO_LATE = Failure("timeout", "the request's deadline passed")
_NO_WORKERS = Failure("no_workers", "no worker is ready to serve this request", 1.0)
KeysOf = Callable[[Worker, Sequence[int]], "tuple[bytes, list[bytes]]"]


class Dispatcher:
    """Requests in flight and the workers that carry them.

    Args:
        index: who holds which key, rebuilt from the workers' events.
        keys_of: (a worker, tokens) -> (namespace digest of what it runs, keys of whole units).
        serves: what workers must say of themselves: ``model_epoch``, and parts of ``page_spec`` by
            name. What is not here the first worker to join decides.
        max_queue: requests that may wait here; more are refused with ``no_capacity``.
        max_wait_s: longest wait here, for room or for a worker that is on its way (``expect``).
        max_attempts: times one request is dispatched.
        rejoin_wait_s: how long a request waits while no worker can serve it and none is expected.
        heartbeat_timeout_s: silence after which a worker is given up.
    """

    def __init__(
        self,
        index: ClusterIndex,
        keys_of: KeysOf,
        *,
        serves: Mapping[str, str] | None = None,
        max_queue: int = 256,
        max_wait_s: float = 60.0,
        max_attempts: int = 3,
        rejoin_wait_s: float = 1.0,
        heartbeat_timeout_s: float = 2.0,
        new_id: Callable[[], bytes] = lambda: secrets.token_bytes(16),
    ) -> None:
        self.workers: dict[bytes, Worker] = {}
        self.counters: collections.Counter[str] = collections.Counter()
        self._index, self._keys_of, self._new_id = index, keys_of, new_id
        self._serves = serves or {}
        self._max_queue, self._max_wait_s = max_queue, max_wait_s
        self._max_attempts, self._rejoin_wait_s = max_attempts, rejoin_wait_s
        self.heartbeat_timeout_s = heartbeat_timeout_s
        self._flights: dict[bytes, Flight] = {}
        self._attempts: dict[bytes, Flight] = {}
        self._waiting: collections.deque[Flight] = collections.deque()
        self._actions: list[Action] = []
        self._expected: AbstractSet[str] = frozenset()
        self._now = 0.0
        self._room = False  # something changed that may let a waiting request go

    @property
    def num_waiting(self) -> int:
        """Requests that no worker has yet."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests at workers."""
        return len(self._attempts)

    def ready(self) -> bool:
        """Whether a request could be served now."""
        return can_serve(self.workers.values())

    def submit(self, ask: Ask, now: float) -> list[Action]:
        """A new request."""
        self._now = now
        if len(self._waiting) >= self._max_queue:
            text = f"{len(self._waiting)} requests are waiting already; try again later"
            self._actions.append(Deliver(ask.request_id, self._busy(text)))
            return self._take()
        flight = Flight(ask, now)
        self._flights[ask.request_id] = flight
        self._room = True
        self._waiting.append(flight)
        self._pump()
        return self._take()

    def cancel(self, request_id: bytes, now: float) -> list[Action]:
        """The client is gone; unknown ids are those of requests that are over."""
        self._now = now
        flight = self._flights.get(request_id)
        if flight is not None:
            self.counters["cancelled"] += 1
            self._drop(flight)
            self._pump()
        return self._take()

    def finish(self, request_id: bytes, now: float) -> list[Action]:
        """The answer is complete for the client (a stop string): end it as stopped."""
        self._now = now
        flight = self._flights.get(request_id)
        if flight is not None:
            self._drop(flight)
            self._deliver(flight, self._done(flight, "stop", {}))
            self._pump()
        return self._take()

    def worker_up(self, worker: Worker, now: float) -> list[Action]:
        """A worker said hello; an older one of the same id is dead."""
        self._now = now
        if worker.worker_id in self.workers:
            self._bury(worker.worker_id, "replaced by a newer process")
        worker.last_seen = now
        self._room = True
        self.workers[worker.worker_id] = worker
        self._pump()
        return self._take()

    def worker_down(self, worker_id: bytes, reason: str, now: float) -> list[Action]:
        """A worker's connection is gone: its requests start again elsewhere."""
        self._now = now
        if worker_id in self.workers:
            self._bury(worker_id, reason)
            self._pump()
        return self._take()

    def expect(self, roles: AbstractSet[str], now: float) -> list[Action]:
        """The roles whose workers somebody starts again when they die: a request that only lacks
        those waits for them instead of failing soon."""
        self._now = now
        self._expected, self._room = frozenset(roles), True
        self._pump()
        return self._take()

    def stalled(self, seconds: float) -> None:
        """The router itself stood still: what workers sent meanwhile is not read yet."""
        for worker in self.workers.values():
            worker.last_seen += seconds

    def refusal(self, worker: Worker) -> str:
        """Why a worker cannot join, "" when it can: all share one model and page geometry."""
        if worker.role not in ("prefill", "decode", "mono"):
            return f"role = {worker.role!r}: must be prefill, decode or mono"
        parts = (part.split("=", 1) for part in worker.page_spec.split() if "=" in part)
        told = {"model_epoch": worker.model_epoch, **dict(parts)}
        for field, wanted in self._serves.items():
            if told.get(field) != wanted:
                return f"{field} = {told.get(field)!r}, but this router serves {wanted!r}"
        for other in self.workers.values():
            for field in ("model_epoch", "page_spec"):
                ours, theirs = getattr(other, field), getattr(worker, field)
                if ours != theirs and other.worker_id != worker.worker_id:
                    return f"{field} = {theirs!r}, but {other.name} has {ours!r}"
        return ""

    def silent(self, now: float) -> list[Worker]:
        """Workers whose heartbeats stopped; the caller closes their connections."""
        limit = now - self.heartbeat_timeout_s
        return [w for w in self.workers.values() if w.last_seen < limit]

    def tick(self, now: float) -> list[Action]:
        """Time passed: deadlines, long waits, requests that no worker can serve."""
        self._now = now
        for flight in list(self._flights.values()):
            if now >= flight.ask.deadline:
                self._fail(flight, _TOO_LATE)
            elif flight.phase is Phase.WAITING and now >= flight.give_up:
                self._fail(flight, flight.facts.get("error") or _NO_WORKERS)
            elif flight.phase is Phase.WAITING and now >= flight.since + self._max_wait_s:
                self._fail(flight, self._waited_long(flight))
        self._pump()
        return self._take()

    def message(
        self, worker_id: bytes, kind: str, fields: Mapping[str, Any], now: float
    ) -> list[Action]:
        """A message of a live worker. Unknown requests and kinds are counted and dropped."""
        self._now = now
        worker = self.workers.get(worker_id)
        if worker is None:
            return []
        worker.last_seen = now
        if kind == "heartbeat":
            self._heartbeat(worker, fields)
        elif kind == "prefix_events":
            self._prefix_events(worker, fields)
        elif kind == "drained":
            self._room = True
            worker.draining = True
        else:
            self._request_message(worker, kind, fields)
        self._pump()
        return self._take()

    # Messages.

    def _heartbeat(self, worker: Worker, fields: Mapping[str, Any]) -> None:
        self._room = True
        worker.running, worker.waiting = fields["running"], fields["waiting"]
        worker.free_frames, worker.num_frames = fields["free_frames"], fields["num_frames"]
        worker.kv_table = fields.get("kv_table") or worker.kv_table
        names, values = fields["stats_names"], fields["stats_values"]
        worker.stats = dict(zip(names, values, strict=False))

    def _prefix_events(self, worker: Worker, fields: Mapping[str, Any]) -> None:
        sender = (worker.worker_id, fields["incarnation"], fields["seq"])
        if fields["snapshot"]:
            verdict = self._index.apply_snapshot(*sender, fields["stored"])
        else:
            verdict = self._index.apply(*sender, fields["stored"], fields["removed"])
        if verdict == "resync":
            self.counters["prefix_resyncs"] += 1
            self._actions.append(Send(worker.worker_id, "prefix_resync", {}))

    def _request_message(self, worker: Worker, kind: str, fields: Mapping[str, Any]) -> None:
        flight = self._attempts.get(bytes(fields.get("request_id", b"")))
        if flight is None:
            self.counters["late_messages"] += 1
            return
        handlers = {"prefilled": self._prefilled, "failed": self._failed}
        if worker.worker_id == flight.decode_id:
            answer = {"tokens": self._tokens, "finished": self._finished}
            handlers |= {"reserved": self._reserved, **answer}
        handler = handlers.get(kind)
        if handler is None or worker.worker_id not in (flight.prefill_id, flight.decode_id):
            self.counters["unknown_messages"] += 1
            return
        handler(flight, worker, fields)

    def _reserved(self, flight: Flight, worker: Worker, fields: Mapping[str, Any]) -> None:
        if flight.phase is not Phase.RESERVING:
            return
        flight.phase = Phase.PREFILLING
        request = self._request(flight)
        request |= {"grant": fields["grant"], "start_token": fields["cached_tokens"]}
        self._actions.append(Send(flight.prefill_id, "prefill", request))

    def _prefilled(self, flight: Flight, worker: Worker, fields: Mapping[str, Any]) -> None:
        flight.phase = Phase.DECODING
        if worker.worker_id == flight.decode_id:  # of the whole attempt, before its first token
            flight.facts |= {name: fields[name] for name in fields if name != "request_id"}
            return
        self._room = True
        worker.attempts.pop(flight.attempt_id, None)
        computed, seconds = fields["computed_tokens"], fields["prefill_s"]
        if computed >= _MIN_RATED_TOKENS and seconds > 0:
            share = 0.2 if worker.tokens_per_s else 1.0
            worker.tokens_per_s += share * (computed / seconds - worker.tokens_per_s)

    def _tokens(self, flight: Flight, worker: Worker, fields: Mapping[str, Any]) -> None:
        skip = len(flight.emitted) - flight.base - fields["first_index"]
        ids = list(fields["token_ids"])
        if skip < 0:
            failure = Failure("internal_error", f"{worker.name} skipped {-skip} tokens")
            self._retry(flight, failure)
            return
        top = max(0, flight.ask.num_logprobs)
        rows = (("logprobs", skip), ("top_ids", skip * top), ("top_logprobs", skip * top))
        new = Tokens(ids[skip:], *(list(fields[name])[first:] for name, first in rows))
        flight.phase = Phase.DECODING
        load = worker.attempts[flight.attempt_id]
        if load.pending:  # a mono worker's prompt is computed
            load.pending, self._room = 0, True
        if new.ids:
            flight.emitted += new.ids
            self._deliver(flight, new)

    def _finished(self, flight: Flight, worker: Worker, fields: Mapping[str, Any]) -> None:
        if fields["reason"] == "cancelled":
            self._retry(flight, Failure("worker_lost", f"{worker.name} gave it back"))
            return
        done = self._done(flight, fields["reason"], fields)
        self._land(flight)
        self._deliver(flight, done)

    def _failed(self, flight: Flight, worker: Worker, fields: Mapping[str, Any]) -> None:
        if not fields["retryable"]:  # about the request, whoever has it
            failure = Failure(fields["code"], fields["message"])
            self._fail(flight, failure, gone={worker.worker_id})
            return
        failure = Failure(fields["code"], f"{worker.name}: {fields['message']}")
        if fields["code"] == "draining":
            worker.draining = True
            flight.attempts -= 1
        flight.avoid.add(worker.worker_id)
        self._retry(flight, failure, gone={worker.worker_id})

    # The life of a flight.

    def _pump(self) -> None:
        """Dispatch from the head of the queue as long as there is room."""
        if not self._room:
            return
        serving = self.ready()
        hopeful = serving or can_serve(self.workers.values(), self._expected)
        for flight in self._waiting:
            if hopeful:
                flight.give_up = math.inf
            elif flight.give_up == math.inf:
                flight.give_up = self._now + self._rejoin_wait_s
        while self._waiting and serving:
            flight = self._waiting[0]
            if self._now >= flight.ask.deadline:
                self._fail(flight, _TOO_LATE)
                continue
            if flight.keys is None:
                any_worker = next(iter(self.workers.values()))
                flight.namespace, flight.keys = self._keys_of(any_worker, flight.tokens)
            matched = self._index.query(flight.keys) if flight.keys else {}
            length = len(flight.ask.tokens) + len(flight.emitted)
            left = flight.ask.max_tokens - len(flight.emitted)
            choice = choose(length, left, matched, self.workers.values(), flight.avoid)
            if isinstance(choice, tuple):
                self._waiting.popleft()
                units = matched.get(choice[0].worker_id, 0)
                self.counters["prefix_hits"] += units > 0
                unit = geometry(choice[0].page_spec).page_size
                self._launch(flight, *choice, uncached(length, units, unit))
            elif choice.reason == "too_long":
                text = f"{length} tokens and an answer of {left} fit into no worker's pages"
                self._fail(flight, Failure("context_length_exceeded", text))
            else:
                break
        self._room = False

    def _launch(self, flight: Flight, prefill: Worker, decode: Worker, pending: int) -> None:
        flight.attempts += 1
        flight.attempt_id = self._new_id()
        flight.base = len(flight.emitted)
        flight.facts.setdefault("wait_s", self._now - flight.since)
        flight.prefill_id, flight.decode_id = prefill.worker_id, decode.worker_id
        self._attempts[flight.attempt_id] = flight
        length = len(flight.ask.tokens) + len(flight.emitted)
        answer = min(flight.ask.max_tokens - len(flight.emitted), TYPICAL_ANSWER)
        mono = prefill is decode
        if not mono:
            prefill.attempts[flight.attempt_id] = Load(pending, frames(length, prefill))
        held = frames(length + answer, decode)
        decode.attempts[flight.attempt_id] = Load(pending if mono else 0, held)
        flight.phase = Phase.PREFILLING if mono else Phase.RESERVING
        kind = "generate" if mono else "reserve"
        self._actions.append(Send(flight.decode_id, kind, self._request(flight)))
        self.counters["dispatched"] += 1

    def _request(self, flight: Flight) -> dict[str, Any]:
        ask = flight.ask
        left = ask.deadline - self._now
        same = ("temperature", "top_p", "seed", "num_logprobs", "kv_profile")
        return {name: getattr(ask, name) for name in same} | {
            "request_id": flight.attempt_id,
            "tokens": flight.tokens,
            "keys": flight.keys,
            "namespace": flight.namespace,
            "max_tokens": ask.max_tokens - len(flight.emitted),
            "stop_token_ids": list(ask.stop_token_ids),
            "ignore_eos": int(ask.ignore_eos),
            "deadline_s": left if math.isfinite(left) else 0.0,
        }

    def _bury(self, worker_id: bytes, reason: str) -> None:
        self._room = True
        worker = self.workers.pop(worker_id)
        self._index.drop(worker_id)
        self.counters["workers_lost"] += 1
        for attempt_id in list(worker.attempts):
            flight = self._attempts.get(attempt_id)
            if flight is not None:
                failure = Failure("worker_lost", f"{worker.name} was lost: {reason}")
                self._retry(flight, failure, gone={worker_id})

    def _retry(self, flight: Flight, failure: Failure, gone: AbstractSet[bytes] = _NOBODY) -> None:
        """Start again from what was delivered, unless that was all or it was tried enough."""
        self._recall(flight, gone)
        ended = self._ended(flight)
        if ended:
            self._forget(flight)
            self._deliver(flight, self._done(flight, ended, {}))
        elif flight.attempts >= self._max_attempts:
            self._fail(flight, failure)
        else:
            self.counters["retries"] += 1
            flight.facts["error"] = failure
            flight.phase, flight.since = Phase.WAITING, self._now
            flight.keys = None if flight.emitted else flight.keys
            self._room = True
            self._waiting.appendleft(flight)

    def _ended(self, flight: Flight) -> str:
        """Why what was delivered is the whole answer, "" when it is not."""
        ask = flight.ask
        if flight.emitted and not ask.ignore_eos and flight.emitted[-1] in ask.stop_token_ids:
            return "stop"
        return "length" if len(flight.emitted) >= ask.max_tokens else ""

    def _fail(self, flight: Flight, failure: Failure, gone: AbstractSet[bytes] = _NOBODY) -> None:
        self.counters["failed"] += 1
        self._recall(flight, gone)
        self._forget(flight)
        self._deliver(flight, failure)

    def _drop(self, flight: Flight) -> None:
        """Forget a flight and stop whoever works on it."""
        self._recall(flight)
        self._forget(flight)

    def _recall(self, flight: Flight, gone: AbstractSet[bytes] = _NOBODY) -> None:
        """Cancel the current attempt at its workers but those that no longer know it."""
        if flight.attempt_id not in self._attempts:
            return
        for worker_id in {flight.prefill_id, flight.decode_id} - gone:
            if worker_id in self.workers:
                fields = {"request_id": flight.attempt_id}
                self._actions.append(Send(worker_id, "cancel", fields))
        self._land(flight, forget=False)

    def _land(self, flight: Flight, forget: bool = True) -> None:
        """The current attempt is over."""
        self._room = True
        self._attempts.pop(flight.attempt_id, None)
        for worker_id in (flight.prefill_id, flight.decode_id):
            worker = self.workers.get(worker_id)
            if worker is not None:
                worker.attempts.pop(flight.attempt_id, None)
        if forget:
            self._forget(flight)

    def _forget(self, flight: Flight) -> None:
        self._flights.pop(flight.ask.request_id, None)
        if flight.phase is Phase.WAITING and flight in self._waiting:
            self._waiting.remove(flight)

    def _done(self, flight: Flight, reason: str, fields: Mapping[str, Any]) -> Done:
        known = flight.facts
        split = flight.prefill_id != flight.decode_id and bool(flight.attempts)
        cached = known.get("cached_tokens", fields.get("cached_tokens", 0))
        return Done(
            reason=reason,
            prompt_tokens=len(flight.ask.tokens),
            completion_tokens=len(flight.emitted),
            cached_tokens=min(cached, len(flight.ask.tokens)),
            computed_prompt_tokens=known.get("computed_tokens", 0)
            + (fields.get("computed_prompt_tokens", 0) if split else 0),
            kv_bytes=fields.get("kv_bytes") or known.get("kv_bytes", 0),
            transport=fields.get("transport") or known.get("transport", ""),
            arrived_fraction=fields.get("arrived_fraction") if split else None,
            exposed_s=fields.get("exposed_s", 0.0),
            prefill_s=known.get("prefill_s", 0.0),
            queue_s=known.get("queue_s", 0.0) + known.get("wait_s", 0.0),
            attempts=flight.attempts,
        )

    def _waited_long(self, flight: Flight) -> Failure:
        if not self.ready():
            return flight.facts.get("error") or _NO_WORKERS
        return self._busy(f"no worker had room for {self._max_wait_s:g} s; try again later")

    def _busy(self, text: str) -> Failure:
        self.counters["refused"] += 1
        seconds = 1.0 + len(self._waiting) / 8
        return Failure("no_capacity", text, retry_after_s=min(seconds, 60.0))

    def _deliver(self, flight: Flight, output: Output) -> None:
        self._actions.append(Deliver(flight.ask.request_id, output))

    def _take(self) -> list[Action]:
        actions, self._actions = self._actions, []
        return actions
