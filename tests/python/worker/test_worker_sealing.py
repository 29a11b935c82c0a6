"""Engines whose full pages are compressed: the same tokens, fewer bytes, nothing lost.

The hash model reads page ids only, so that tokens show whether pages are still whose they were.
"""

import numpy as np
import pytest
from hash_model import (
    assert_baseline,
    expected,
    make,
    name_of,
    prompt_of,
    request,
    rig,
    run,
    tokens_of,
)
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kvcore._core.base import FaultPlan
from kvcore.pages import PageClass
from kvcore.worker.engine import Engine

SMALL = {"page_size": 16, "extent": 2, "profile": "small"}


def classes_of(parts, engine: Engine) -> list[list[int]]:
    """Class numbers of the pages of each running sequence."""
    return [
        [parts.pool.class_of(int(p)) for p in seq.pages[: seq.num_pages]]
        for seq in engine.scheduler.running
    ]


def test_pages_are_sealed_when_the_prompt_is_computed_and_as_they_fill() -> None:
    parts = rig(**SMALL)
    engine = make(parts, token_budget=48)
    prompt = prompt_of(np.random.default_rng(1), 100)
    engine.add(request(1, prompt, 60, ignore_eos=True))
    early = engine.step() + engine.step()
    assert not any(classes_of(parts, engine)[0])  # its chunks still read bf16 pages
    early += engine.step() + engine.step()
    assert classes_of(parts, engine) == [[0, 2, 2, 2, 2, 2, 0]]
    outputs = [output for _ in range(30) for output in engine.step()]
    (classes,) = classes_of(parts, engine)
    assert classes == [0, *[2] * (len(classes) - 2), 0] and len(classes) == 9
    stats = engine.stats()
    single = PageClass.open(parts.pool.spec).run_bytes(1)
    assert stats["compressed_pages"] == 7 and stats["open_bytes"] == 2 * single
    assert tokens_of(early + outputs + run(engine)[1]) == expected(prompt, 60, ignore_eos=True)
    assert_baseline(parts)


def most_at_once(profile: str, frames: int, pages: int) -> int:
    """Sequences of ``pages`` pages of 64 tokens that hold pages together, admitted in crowds."""
    parts = rig(frames, page_size=64, extent=2, max_position=8000, profile=profile)
    engine = make(parts, token_budget=65536, max_running=1000)
    rng = np.random.default_rng(0)
    for name in range(frames):
        prompt = prompt_of(rng, 64 * pages - 32)
        engine.add(request(name, prompt, 32, namespace=b"", ignore_eos=True))
    held = 0
    while engine.scheduler.waiting:
        engine.compute([row for row in engine.begin() if row.count > 1])  # no one grows old
        if engine.scheduler.num_live == held and not (
            parts.memory.sealer and parts.memory.sealer.waiting
        ):
            break
        held = engine.scheduler.num_live
    assert engine.scheduler.preemptions == 0
    engine.cancel_all()
    assert_baseline(parts)
    return held


def test_small_holds_3_4_times_the_sequences_of_exact_in_equal_bytes() -> None:
    exact = most_at_once("exact", 336, 60)
    assert exact == 336 * 2 // 60
    assert most_at_once("small", 336, 60) >= 3.4 * exact
    assert most_at_once("balanced", 336, 60) >= 2.9 * exact


def test_decoding_goes_on_while_little_is_sealed_per_step() -> None:
    parts = rig(**SMALL)
    parts.memory.sealer.step_pages = 2
    engine = make(parts)
    engine.add(request(1, [1, 2, 3], 200, ignore_eos=True))
    engine.step()
    engine.add(request(2, prompt_of(np.random.default_rng(0), 300), 40, ignore_eos=True))
    engine.step()
    sealer = parts.memory.sealer
    while sealer.waiting:
        before = sealer.sealed
        engine.step()
        assert 0 < sealer.sealed - before <= 2
    assert sealer.sealed >= 17
    run(engine)
    assert_baseline(parts)


def test_a_shared_prefix_is_sealed_once_and_found_sealed() -> None:
    parts = rig(**SMALL)
    engine = make(parts)
    prompt = prompt_of(np.random.default_rng(2), 97)
    engine.add(request(1, prompt, 4, ignore_eos=True))
    run(engine)
    sealer = parts.memory.sealer
    while sealer.waiting:
        engine.step()
    assert sealer.sealed == 5
    for name in (2, 3):
        engine.add(request(name, prompt, 4, ignore_eos=True))
    outputs = run(engine)
    while sealer.waiting:
        engine.step()
    for name in (2, 3):
        assert tokens_of(outputs[name]) == expected(prompt, 4, ignore_eos=True)
        assert outputs[name][-1].fields["cached_tokens"] == 96
    assert sealer.sealed == 5 and parts.pool.stats().compressed_bytes > 0
    assert_baseline(parts)


@pytest.mark.parametrize("chance", [0.5, 1.0])
def test_failing_seals_leave_pages_open_and_tokens_as_they_were(chance: float) -> None:
    parts = rig(24, **SMALL)
    plan = FaultPlan(3)
    parts.pool.set_faults(plan)
    plan.fail_randomly("pool.seal", chance)
    engine = make(parts, token_budget=64)
    rng = np.random.default_rng(4)
    prompts = [prompt_of(rng, int(n)) for n in rng.integers(1, 200, 20)]
    for name, prompt in enumerate(prompts):
        engine.add(request(name, prompt, 40))
    outputs = run(engine)
    for name, prompt in enumerate(prompts):
        assert tokens_of(outputs[name]) == expected(prompt, 40)
    assert (parts.memory.sealer.sealed == 0) == (chance == 1.0)
    assert_baseline(parts)


def test_a_long_answer_may_fill_the_pool_although_every_page_was_open_once() -> None:
    parts = rig(4, **SMALL)
    engine = make(parts)
    full = parts.memory.capacity_tokens
    single = PageClass.open(parts.pool.spec).run_bytes(1)
    assert full == (parts.pool.stats().free_bytes // single - 1) * 16
    engine.add(request(1, [7] * 20, full, ignore_eos=True))
    engine.add(request(2, [8] * full, 1))
    outputs = run(engine)
    assert len(tokens_of(outputs[1])) == full
    assert tokens_of(outputs[2]) == expected([8] * full, 1)
    assert_baseline(parts)


class SealingMachine(RuleBasedStateMachine):
    """Requests come, go and are cancelled while transfers hold pages and seals fail."""

    @initialize(extent=st.sampled_from([1, 2, 4]), frames=st.integers(10, 24), cached=st.booleans())
    def start(self, extent: int, frames: int, cached: bool) -> None:
        self.parts = rig(max(4, frames // extent), page_size=16, extent=extent, profile="small")
        self.options = {} if cached else {"namespace": b""}
        self.engine = make(self.parts, token_budget=64, max_running=6)
        self.plan = FaultPlan(9)
        self.parts.pool.set_faults(self.plan)
        self.rng = np.random.default_rng(frames)
        self.asked: dict[int, tuple[list[int], int]] = {}
        self.outputs: dict[int, list] = {}
        self.read: list[int] = []  # pages that a transfer reads

    @rule(size=st.integers(1, 120), count=st.integers(1, 60), shared=st.integers(0, 80))
    def add(self, size: int, count: int, shared: int) -> None:
        prompt = [5] * shared + prompt_of(self.rng, size)
        prompt = prompt[: self.parts.memory.capacity_tokens - 1]
        count = min(count, self.parts.memory.capacity_tokens + 1 - len(prompt))
        name = len(self.asked)
        self.asked[name] = (prompt, count)
        self.engine.add(request(name, prompt, count, **self.options))

    @rule(which=st.integers(0, 99))
    @precondition(lambda self: self.asked)
    def cancel(self, which: int) -> None:
        self.engine.cancel((which % len(self.asked)).to_bytes(16, "big"))

    @rule(times=st.integers(1, 12))
    def step(self, times: int) -> None:
        for _ in range(times):
            for output in self.engine.step():
                self.outputs.setdefault(name_of(output), []).append(output)

    @rule(which=st.integers(0, 99))
    def read_pages(self, which: int) -> None:
        running = self.engine.scheduler.running
        if running:
            seq = running[which % len(running)]
            pages = seq.pages[: seq.num_pages].tolist()
            self.parts.pool.io_acquire(pages)
            self.read += pages

    @precondition(lambda self: self.read)
    @rule()
    def end_reads(self) -> None:
        self.parts.pool.io_release(self.read)
        self.read = []

    @rule(chance=st.sampled_from([0.0, 0.3, 1.0]))
    def break_seals(self, chance: float) -> None:
        self.plan.fail_randomly("pool.seal", chance)

    @invariant()
    def bytes_add_up(self) -> None:
        stats = self.parts.pool.stats()
        total = self.parts.pool.spec.frame_bytes * stats.num_frames
        assert stats.free_bytes + stats.used_bytes == total
        single = self.parts.memory.sealer.page_bytes
        assert stats.compressed_bytes == single * self.parts.pool.class_pages()[2]
        freeable = self.parts.memory.tree.freeable_bytes()
        assert 0 <= freeable <= stats.used_bytes

    def teardown(self) -> None:
        if not hasattr(self, "parts"):
            return
        self.plan.clear()
        self.parts.pool.io_release(self.read)
        for name, outputs in run(self.engine).items():
            self.outputs.setdefault(name, []).extend(outputs)
        for name, (prompt, count) in self.asked.items():
            outputs = self.outputs[name]
            tokens = tokens_of(outputs)
            assert tokens == expected(prompt, count)[: len(tokens)]
            if outputs[-1].fields["reason"] != "cancelled":
                assert tokens == expected(prompt, count)
        assert_baseline(self.parts)


SealingMachine.TestCase.settings = settings(stateful_step_count=30, deadline=None)
TestSealing = SealingMachine.TestCase
