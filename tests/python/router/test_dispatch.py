"""The dispatcher as a pure state machine: events in, actions out."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from kvcore.router.dispatch import Dispatcher
from kvcore.router.policy import uncached
from kvcore.router.state import Action, Ask, Deliver, Done, Failure, Output, Send, Tokens, Worker

PREFILL, DECODE, DECODE2, MONO = b"P" * 16, b"D" * 16, b"E" * 16, b"M" * 16


class DictIndex:
    def __init__(self) -> None:
        self.held: dict[bytes, set[bytes]] = {}
        self.verdict = "ok"

    def apply(self, worker_id, incarnation, seq, stored, removed) -> str:  # type: ignore[no-untyped-def]
        if self.verdict == "ok":
            held = self.held.setdefault(worker_id, set())
            self.held[worker_id] = (held | set(stored)) - set(removed)
        return self.verdict

    def drop(self, worker_id: bytes) -> None:
        self.held.pop(worker_id, None)

    def query(self, keys: list[bytes]) -> Mapping[bytes, int]:
        found = {}
        for worker_id, held in self.held.items():
            units = next((i for i, key in enumerate(keys) if key not in held), len(keys))
            if units:
                found[worker_id] = units
        return found


def keys_of(worker: Worker | None, tokens: Sequence[int]) -> tuple[bytes, list[bytes]]:
    return b"ns", [bytes(32 - 1) + bytes([tokens[u * 64] % 251]) for u in range(len(tokens) // 64)]


class World:
    """A dispatcher, a clock, and what came out of it."""

    def __init__(self, *roles: tuple[bytes, str], **limits: Any) -> None:
        self.index = DictIndex()
        self.dispatcher = Dispatcher(self.index, keys_of, **limits)
        self.now = 0.0
        self.sent: list[Send] = []
        self.outputs: dict[bytes, list[Output]] = {}
        for worker_id, role in roles:
            self.up(worker_id, role)

    def take(self, actions: Sequence[Action]) -> list[Send]:
        sends = [a for a in actions if isinstance(a, Send)]
        self.sent += sends
        for action in actions:
            if isinstance(action, Deliver):
                self.outputs.setdefault(action.request_id, []).append(action.output)
        return sends

    def up(self, worker_id: bytes, role: str, incarnation: int = 1) -> list[Send]:
        worker = Worker(worker_id, incarnation, role, num_frames=100, free_frames=100)
        return self.take(self.dispatcher.worker_up(worker, self.now))

    def down(self, worker_id: bytes) -> list[Send]:
        return self.take(self.dispatcher.worker_down(worker_id, "killed", self.now))

    def ask(self, name: str, size: int = 10, max_tokens: int = 5, **more: Any) -> list[Send]:
        request_id = name.encode().ljust(16)
        ask = Ask(request_id, tuple(range(size)), max_tokens, stop_token_ids=(99,), **more)
        return self.take(self.dispatcher.submit(ask, self.now))

    def says(self, worker_id: bytes, kind: str, attempt: bytes, **fields: Any) -> list[Send]:
        full = {"request_id": attempt, **DEFAULTS.get(kind, {}), **fields}
        return self.take(self.dispatcher.message(worker_id, kind, full, self.now))

    def tick(self, seconds: float) -> list[Send]:
        self.now += seconds
        return self.take(self.dispatcher.tick(self.now))

    def out(self, name: str) -> list[Output]:
        return self.outputs.get(name.encode().ljust(16), [])

    def ids(self, name: str) -> list[int]:
        return [t for o in self.out(name) if isinstance(o, Tokens) for t in o.ids]


DEFAULTS: dict[str, dict[str, Any]] = {
    "reserved": {"grant": b"grant", "cached_tokens": 0},
    "prefilled": {
        "cached_tokens": 3,
        "computed_tokens": 7,
        "kv_bytes": 700,
        "transport": "shm",
        "prefill_s": 0.5,
        "queue_s": 0.1,
    },
    "tokens": {"first_index": 0, "logprobs": [], "top_ids": [], "top_logprobs": []},
    "finished": {"reason": "stop", "computed_prompt_tokens": 0, "arrived_fraction": 0.99},
    "failed": {"message": "no", "retryable": 1},
}


def attempt_of(sends: Sequence[Send]) -> bytes:
    return bytes(sends[0].fields["request_id"])


def pair() -> World:
    return World((PREFILL, "prefill"), (DECODE, "decode"))


def test_prefill_and_decode() -> None:
    world = pair()
    sends = world.ask("a")
    assert [(s.worker_id, s.type) for s in sends] == [(DECODE, "reserve")]
    attempt = attempt_of(sends)
    assert attempt != b"a".ljust(16)
    sends = world.says(DECODE, "reserved", attempt, cached_tokens=64)
    assert [(s.worker_id, s.type) for s in sends] == [(PREFILL, "prefill")]
    assert (sends[0].fields["grant"], sends[0].fields["start_token"]) == (b"grant", 64)
    assert sends[0].fields["tokens"] == list(range(10))
    world.says(PREFILL, "prefilled", attempt, prefill_s=9.0)
    world.says(DECODE, "prefilled", attempt)
    world.says(DECODE, "tokens", attempt, token_ids=[1])
    world.says(DECODE, "tokens", attempt, token_ids=[2, 99], first_index=1)
    world.says(DECODE, "finished", attempt, computed_prompt_tokens=1)
    assert world.ids("a") == [1, 2, 99]
    done = world.out("a")[-1]
    assert isinstance(done, Done)
    assert (done.reason, done.prompt_tokens, done.completion_tokens) == ("stop", 10, 3)
    assert (done.cached_tokens, done.kv_bytes, done.transport) == (3, 700, "shm")
    assert (done.computed_prompt_tokens, done.prefill_s, done.queue_s) == (7 + 1, 0.5, 0.1)
    assert done.arrived_fraction == 0.99
    assert world.dispatcher.num_running == world.dispatcher.num_waiting == 0
    assert all(not w.attempts for w in world.dispatcher.workers.values())


def test_mono() -> None:
    world = World((MONO, "mono"))
    sends = world.ask("a")
    assert [(s.worker_id, s.type) for s in sends] == [(MONO, "generate")]
    world.says(MONO, "prefilled", attempt_of(sends))
    world.says(MONO, "tokens", attempt_of(sends), token_ids=[4])
    assert world.dispatcher.workers[MONO].attempts[attempt_of(sends)].pending == 0
    world.says(MONO, "finished", attempt_of(sends), reason="length", computed_prompt_tokens=7)
    done = world.out("a")[-1]
    assert isinstance(done, Done) and done.arrived_fraction is None
    assert (done.computed_prompt_tokens, done.prefill_s, done.queue_s) == (7, 0.5, 0.1)


@pytest.mark.parametrize("stopped", [True, False])
def test_what_the_prefill_worker_says_late_is_not_missed(stopped: bool) -> None:
    """All of an answer and how it was made comes from one worker, in order."""
    world = pair()
    attempt = attempt_of(world.ask("a"))
    world.says(DECODE, "reserved", attempt)
    world.says(DECODE, "prefilled", attempt)
    world.says(DECODE, "tokens", attempt, token_ids=[1])
    if stopped:
        world.take(world.dispatcher.finish(b"a".ljust(16), world.now))
    else:
        world.says(DECODE, "finished", attempt)
    world.says(PREFILL, "prefilled", attempt)
    done = world.out("a")[-1]
    assert isinstance(done, Done) and (done.prefill_s, done.kv_bytes) == (0.5, 700)
    assert (done.cached_tokens, done.computed_prompt_tokens) == (3, 7)
    assert world.dispatcher.counters["late_messages"] == 1


@pytest.mark.parametrize("dead", [PREFILL, DECODE])
@pytest.mark.parametrize("reserved", [False, True])
def test_death_before_the_first_token_retries(dead: bytes, reserved: bool) -> None:
    world = pair()
    attempt = attempt_of(world.ask("a"))
    if reserved:
        world.says(DECODE, "reserved", attempt)
    other = DECODE if dead == PREFILL else PREFILL
    sends = world.down(dead)
    assert [(s.worker_id, s.type) for s in sends] == [(other, "cancel")]
    sends = world.up(dead, "prefill" if dead == PREFILL else "decode", 2)
    assert [s.type for s in sends] == ["reserve"]
    assert attempt_of(sends) != attempt
    # What the broken attempt still says is not heard.
    world.says(other, "tokens", attempt, token_ids=[7])
    assert world.ids("a") == []


def test_decode_death_in_mid_answer_goes_on_elsewhere() -> None:
    world = World((PREFILL, "prefill"), (DECODE, "decode"), (DECODE2, "decode"))
    sends = world.ask("a", size=70, max_tokens=5)
    attempt, first = attempt_of(sends), sends[0].worker_id
    second = DECODE2 if first == DECODE else DECODE
    world.says(first, "reserved", attempt)
    world.says(PREFILL, "prefilled", attempt)
    world.says(first, "tokens", attempt, token_ids=[1, 2])
    sends = world.down(first)
    assert [(s.worker_id, s.type) for s in sends if s.type != "cancel"] == [(second, "reserve")]
    again = next(s for s in sends if s.type == "reserve")
    assert again.fields["tokens"] == [*range(70), 1, 2]
    assert again.fields["max_tokens"] == 3
    attempt = bytes(again.fields["request_id"])
    world.says(second, "reserved", attempt)
    world.says(second, "tokens", attempt, token_ids=[3])
    world.says(second, "finished", attempt, reason="length")
    assert world.ids("a") == [1, 2, 3]
    done = world.out("a")[-1]
    assert isinstance(done, Done)
    assert (done.prompt_tokens, done.completion_tokens, done.attempts) == (70, 3, 2)


@pytest.mark.parametrize(("tokens", "reason"), [([1, 99], "stop"), ([1, 2, 3, 4, 5], "length")])
def test_death_after_the_last_token_is_no_loss(tokens: list[int], reason: str) -> None:
    world = World((MONO, "mono"))
    attempt = attempt_of(world.ask("a"))
    world.says(MONO, "tokens", attempt, token_ids=tokens)
    world.down(MONO)
    done = world.out("a")[-1]
    assert isinstance(done, Done) and done.reason == reason


def test_nobody_left_fails_soon_and_says_why() -> None:
    world = pair()
    attempt = attempt_of(world.ask("a"))
    world.says(DECODE, "reserved", attempt)
    world.down(DECODE)
    world.tick(0.9)
    assert world.out("a") == []
    world.tick(0.2)
    failure = world.out("a")[-1]
    assert isinstance(failure, Failure) and failure.code == "worker_lost"
    assert "decode" in failure.message


def test_no_workers_at_all() -> None:
    world = World((PREFILL, "prefill"))
    world.ask("a")
    world.tick(1.1)
    failure = world.out("a")[-1]
    assert isinstance(failure, Failure) and failure.code == "no_workers"
    assert not world.dispatcher.ready()


@pytest.mark.parametrize("dead", [PREFILL, DECODE])
def test_a_worker_that_is_started_again_is_waited_for(dead: bytes) -> None:
    world = pair()
    world.take(world.dispatcher.expect({"prefill", "decode"}, world.now))
    attempt = attempt_of(world.ask("a"))
    world.says(DECODE, "reserved", attempt)
    world.says(DECODE, "tokens", attempt, token_ids=[1, 2])
    world.down(dead)
    for _ in range(30):
        world.tick(1.0)
    assert world.ids("a") == [1, 2] and len(world.out("a")) == 1
    sends = world.up(dead, "prefill" if dead == PREFILL else "decode", 2)
    assert sends[0].type == "reserve" and sends[0].fields["tokens"][-2:] == [1, 2]


def test_a_worker_that_is_given_up_is_waited_for_no_longer() -> None:
    world = pair()
    world.take(world.dispatcher.expect({"prefill", "decode"}, world.now))
    world.ask("a")
    world.down(DECODE)
    world.tick(20.0)
    world.take(world.dispatcher.expect({"prefill"}, world.now))
    world.tick(0.9)
    assert world.out("a") == []
    world.tick(0.2)
    failure = world.out("a")[-1]
    assert isinstance(failure, Failure) and failure.code == "worker_lost"


def test_another_role_is_not_worth_waiting_for() -> None:
    world = World((PREFILL, "prefill"))
    world.take(world.dispatcher.expect({"prefill"}, world.now))
    world.ask("a")
    world.tick(1.1)
    failure = world.out("a")[-1]
    assert isinstance(failure, Failure) and failure.code == "no_workers"


def test_even_a_worker_that_is_expected_is_waited_for_with_a_limit() -> None:
    world = World((PREFILL, "prefill"), (DECODE, "decode"), max_wait_s=30)
    world.take(world.dispatcher.expect({"prefill", "decode"}, world.now))
    world.ask("a")
    world.down(DECODE)
    world.ask("b")
    world.tick(29.0)
    assert world.out("a") == world.out("b") == []
    world.tick(2.0)
    codes = [world.out(name)[-1].code for name in "ab"]  # type: ignore[union-attr]
    assert codes == ["worker_lost", "no_workers"]


def test_attempts_are_bounded() -> None:
    world = World((MONO, "mono"))
    sends = world.ask("a")
    for _ in range(3):
        sends = world.says(MONO, "failed", attempt_of(sends), code="internal")
    assert sends == []
    failure = world.out("a")[-1]
    assert isinstance(failure, Failure) and failure.code == "internal"


def test_failed_prefers_another_worker_and_cancels_the_partner() -> None:
    world = World((PREFILL, "prefill"), (DECODE, "decode"), (DECODE2, "decode"))
    sends = world.ask("a")
    first = sends[0].worker_id
    world.says(first, "reserved", attempt_of(sends))
    sends = world.says(first, "failed", attempt_of(sends), code="transport_error")
    assert next((s.worker_id, s.type) for s in sends) == (PREFILL, "cancel")
    assert sends[1].type == "reserve" and sends[1].worker_id != first


def test_final_failure_is_not_retried() -> None:
    world = pair()
    attempt = attempt_of(world.ask("a"))
    world.says(DECODE, "reserved", attempt)
    sends = world.says(PREFILL, "failed", attempt, code="invalid_argument", retryable=0)
    assert [(s.worker_id, s.type) for s in sends] == [(DECODE, "cancel")]
    assert isinstance(world.out("a")[-1], Failure)


@pytest.mark.parametrize("phase", ["waiting", "reserving", "prefilling", "decoding"])
def test_cancel_at_every_phase(phase: str) -> None:
    world = World() if phase == "waiting" else pair()
    sends = world.ask("a")
    if phase in ("prefilling", "decoding"):
        attempt = attempt_of(sends)
        world.says(DECODE, "reserved", attempt)
        if phase == "decoding":
            world.says(PREFILL, "prefilled", attempt)
            world.says(DECODE, "tokens", attempt, token_ids=[1])
    sends = world.take(world.dispatcher.cancel(b"a".ljust(16), world.now))
    told = set() if phase == "waiting" else {(PREFILL, "cancel"), (DECODE, "cancel")}
    assert {(s.worker_id, s.type) for s in sends} == told
    assert world.dispatcher.num_running == world.dispatcher.num_waiting == 0
    assert all(not isinstance(o, (Done, Failure)) for o in world.out("a"))
    assert world.take(world.dispatcher.cancel(b"a".ljust(16), world.now)) == []


def test_finish_for_a_stop_string() -> None:
    world = World((MONO, "mono"))
    attempt = attempt_of(world.ask("a"))
    world.says(MONO, "tokens", attempt, token_ids=[1, 2])
    sends = world.take(world.dispatcher.finish(b"a".ljust(16), world.now))
    assert [(s.worker_id, s.type) for s in sends] == [(MONO, "cancel")]
    done = world.out("a")[-1]
    assert isinstance(done, Done) and (done.reason, done.completion_tokens) == ("stop", 2)


def test_deadline() -> None:
    world = pair()
    attempt = attempt_of(world.ask("a", deadline=10.0))
    world.says(DECODE, "reserved", attempt)
    sends = world.tick(10.0)
    assert {s.type for s in sends} == {"cancel"}
    failure = world.out("a")[-1]
    assert isinstance(failure, Failure) and failure.code == "timeout"


def test_a_late_request_is_never_dispatched() -> None:
    """The deadline passed between two ticks: what a worker would refuse is not sent to it."""
    world = World((PREFILL, "prefill"))
    world.ask("a", deadline=0.5)
    world.now = 0.6
    assert world.up(DECODE, "decode") == []
    failure = world.out("a")[-1]
    assert isinstance(failure, Failure) and failure.code == "timeout"


def test_duplicate_and_missing_tokens() -> None:
    world = World((MONO, "mono"))
    sends = world.ask("a", num_logprobs=1)
    attempt = attempt_of(sends)
    more = {"logprobs": [-1.0, -2.0], "top_ids": [8, 9], "top_logprobs": [-1.0, -2.0]}
    world.says(MONO, "tokens", attempt, token_ids=[1, 2], **more)
    more = {"logprobs": [-2.0, -3.0], "top_ids": [9, 7], "top_logprobs": [-2.0, -3.0]}
    world.says(MONO, "tokens", attempt, token_ids=[2, 3], first_index=1, **more)
    assert world.ids("a") == [1, 2, 3]
    assert world.out("a")[-1] == Tokens([3], [-3.0], [7], [-3.0])
    sends = world.says(MONO, "tokens", attempt, token_ids=[9], first_index=7)
    assert [s.type for s in sends] == ["cancel", "generate"]
    assert sends[1].fields["tokens"][-3:] == [1, 2, 3]


def test_waiting_keeps_order_and_room() -> None:
    world = pair()
    first = attempt_of(world.ask("a", size=3000))
    assert world.ask("b") == [] and world.ask("c") == []
    assert world.dispatcher.num_waiting == 2
    world.says(DECODE, "reserved", first)
    sends = world.says(PREFILL, "prefilled", first)
    assert [s.type for s in sends] == ["reserve", "reserve"]
    assert sends[0].worker_id == DECODE


def test_decode_pages_are_not_promised_twice() -> None:
    world = pair()
    for worker in world.dispatcher.workers.values():
        worker.num_frames = 3
    first = attempt_of(world.ask("a", size=130))
    world.says(DECODE, "reserved", first)
    assert world.ask("b", size=130) == []
    world.says(PREFILL, "prefilled", first)
    assert world.dispatcher.num_waiting == 1
    sends = world.says(DECODE, "finished", first)
    assert [s.type for s in sends] == ["reserve"]


def test_a_prompt_that_no_worker_can_hold_fails_at_once() -> None:
    world = pair()
    world.dispatcher.workers[DECODE].num_frames = 2
    world.ask("a", size=130)
    failure = world.out("a")[-1]
    assert isinstance(failure, Failure) and failure.code == "context_length_exceeded"


def test_queue_limit_and_long_wait() -> None:
    world = World((PREFILL, "prefill"), (DECODE, "decode"), max_queue=1, max_wait_s=30)
    world.ask("a", size=3000)
    world.ask("b")
    world.ask("c")
    failure = world.out("c")[-1]
    assert isinstance(failure, Failure) and failure.code == "no_capacity"
    assert failure.retry_after_s > 0
    world.tick(31)
    failure = world.out("b")[-1]
    assert isinstance(failure, Failure) and failure.code == "no_capacity"
    assert world.out("a") == []


def test_the_worker_with_the_prefix_is_chosen() -> None:
    other = b"Q" * 16
    for holder in (PREFILL, other):
        world = World((PREFILL, "prefill"), (other, "prefill"), (DECODE, "decode"))
        _, keys = keys_of(None, range(600))
        fields = {"incarnation": 1, "seq": 1, "stored": keys[:5], "removed": [], "snapshot": 0}
        world.take(world.dispatcher.message(holder, "prefix_events", fields, 0.0))
        attempt = attempt_of(world.ask("a", size=600))
        assert [s.worker_id for s in world.says(DECODE, "reserved", attempt)] == [holder]
        assert world.dispatcher.workers[holder].pending_tokens == 600 - 5 * 64


def test_load_beats_a_small_match() -> None:
    other = b"Q" * 16
    world = World((PREFILL, "prefill"), (other, "prefill"), (DECODE, "decode"))
    _, keys = keys_of(None, range(600))
    fields = {"incarnation": 1, "seq": 1, "stored": keys[:1], "removed": [], "snapshot": 0}
    world.take(world.dispatcher.message(PREFILL, "prefix_events", fields, 0.0))
    first = attempt_of(world.ask("a", size=600))
    second = attempt_of(world.ask("b", size=600))
    assert world.says(DECODE, "reserved", first)[0].worker_id == PREFILL
    assert world.says(DECODE, "reserved", second)[0].worker_id == other


def test_uncached_leaves_at_least_one_token() -> None:
    assert uncached(128, 2, 64) == 64
    assert uncached(129, 2, 64) == 1
    assert uncached(129, 8, 16) == 1
    assert uncached(10, 0, 64) == 10


def test_prefix_gap_asks_for_a_snapshot() -> None:
    world = World((PREFILL, "prefill"))
    world.index.verdict = "resync"
    fields = {"incarnation": 1, "seq": 9, "stored": [], "removed": [], "snapshot": 0}
    sends = world.take(world.dispatcher.message(PREFILL, "prefix_events", fields, 0.0))
    assert [(s.worker_id, s.type) for s in sends] == [(PREFILL, "prefix_resync")]


def test_silence_and_stalls() -> None:
    world = pair()
    world.now = 1.9
    heartbeat = {"running": 0, "waiting": 0, "free_frames": 5, "num_frames": 10}
    heartbeat |= {"stats_names": ["x"], "stats_values": [2.0]}
    world.take(world.dispatcher.message(DECODE, "heartbeat", heartbeat, world.now))
    assert world.dispatcher.workers[DECODE].stats == {"x": 2.0}
    for told, known in ({"kv_table": "aa"}, "aa"), ({}, "aa"), ({"kv_table": "bb"}, "bb"):
        fields = heartbeat | told  # a table changes with the text of the day
        world.take(world.dispatcher.message(DECODE, "heartbeat", fields, world.now))
        assert world.dispatcher.workers[DECODE].kv_table == known
    assert world.dispatcher.silent(2.1) == [world.dispatcher.workers[PREFILL]]
    world.dispatcher.stalled(1.0)
    assert world.dispatcher.silent(2.1) == []


def test_workers_of_another_model_are_refused() -> None:
    world = pair()
    other = Worker(MONO, 1, "decode", page_spec="page_size=16")
    assert "page_spec" in world.dispatcher.refusal(other)
    assert "role" in world.dispatcher.refusal(Worker(MONO, 1, "king"))
    assert world.dispatcher.refusal(Worker(MONO, 1, "decode")) == ""


def test_what_the_router_serves_is_not_for_the_first_worker_to_say() -> None:
    world = World(serves={"model_epoch": "e", "page_size": "64"})
    refusal = world.dispatcher.refusal
    fitting = Worker(MONO, 1, "mono", model_epoch="e", page_spec="layers=1 page_size=64")
    assert refusal(fitting) == ""
    other = dataclasses.replace(fitting, page_spec="layers=1 page_size=32")
    assert refusal(other) == "page_size = '32', but this router serves '64'"
    assert "model_epoch = 'f'" in refusal(dataclasses.replace(fitting, model_epoch="f"))
    assert "page_size = None" in refusal(dataclasses.replace(fitting, page_spec="page_size"))


@pytest.mark.parametrize("seed", range(30))
def test_no_request_hangs_whatever_happens(seed: int) -> None:
    """Random deaths, failures, cancels and late messages: each request ends exactly once."""
    rng = random.Random(seed)
    world = World(max_wait_s=20)
    fleet = [(PREFILL, "prefill"), (DECODE, "decode"), (DECODE2, "decode"), (MONO, "mono")]
    asked: list[str] = []
    cancelled: set[str] = set()
    for step in range(400):
        dice = rng.random()
        worker_id, role = rng.choice(fleet)
        alive = worker_id in world.dispatcher.workers
        if dice < 0.05 and not alive:
            world.up(worker_id, role, step)
        elif dice < 0.08 and alive:
            world.down(worker_id)
        elif dice < 0.3:
            name = f"r{step}"
            asked.append(name)
            world.ask(name, size=rng.choice([1, 64, 700]), deadline=world.now + 40)
        elif dice < 0.34 and asked:
            name = rng.choice(asked)
            world.take(world.dispatcher.cancel(name.encode().ljust(16), world.now))
            cancelled.add(name)
        elif dice < 0.4:
            world.tick(rng.choice([0.05, 0.3]))
        elif world.sent:
            send = rng.choice(world.sent[-20:])
            attempt = bytes(send.fields.get("request_id", b""))
            kind = rng.choice(["reserved", "prefilled", "tokens", "tokens", "finished", "failed"])
            extra: dict[str, Any] = {"code": "x"} if kind == "failed" else {}
            if kind == "tokens":
                extra = {"token_ids": [5], "first_index": rng.choice([0, 1, 2])}
            world.says(send.worker_id, kind, attempt, **extra)
    for _ in range(60):
        world.tick(1.0)
    for name in asked:
        ends = [o for o in world.out(name) if isinstance(o, (Done, Failure))]
        assert len(ends) == 1 or (name in cancelled and not ends), name
        assert not ends or world.out(name)[-1] is ends[0]
    assert world.dispatcher.num_running == world.dispatcher.num_waiting == 0
    assert all(not w.attempts for w in world.dispatcher.workers.values())
