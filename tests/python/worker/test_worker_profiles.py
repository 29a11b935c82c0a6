"""Profiles chosen per request: who may read what, and prompts longer than the open bytes."""

import numpy as np
import pytest
from hash_model import VOCAB, assert_baseline, expected, make, request, rig, run, tokens_of
from kvcore._core.base import FaultPlan
from kvcore.errors import InvalidArgument, OutOfPages
from kvcore.worker.engine import Engine

SMALL = {"page_size": 16, "extent": 2, "profile": "small"}


def prompt_of(seed: int, size: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB - 1, size).tolist()


def classes_of(parts, seq) -> list[int]:
    return [parts.pool.class_of(int(p)) for p in seq.pages[: seq.num_pages]]


def settle(engine: Engine) -> None:
    """Until every queued page is sealed."""
    while engine.memory.sealer.waiting:
        engine.step()


def answer(engine: Engine, name: int, prompt: list[int], profile: str = "", count: int = 4):
    """What a request comes to; (its tokens, how many were cached)."""
    engine.add(request(name, prompt, count, ignore_eos=True, kv_profile=profile))
    outputs = run(engine)[name]
    settle(engine)
    return tokens_of(outputs), outputs[-1].fields["cached_tokens"]


@pytest.mark.parametrize(
    ("own", "asked", "number"),
    [
        ("small", "", 2), ("small", "small", 2), ("small", "balanced", 1), ("small", "exact", 0),
        ("balanced", "small", 1), ("balanced", "balanced", 1), ("balanced", "exact", 0),
    ],
)  # fmt: skip
def test_a_request_gets_the_profile_it_asks_for_or_the_workers_own(own, asked, number) -> None:
    parts = rig(**SMALL | {"profile": own})
    engine = make(parts)
    seq = engine.add(request(1, prompt_of(1, 100), 30, ignore_eos=True, kv_profile=asked))
    for _ in range(20):
        engine.step()
    assert classes_of(parts, seq) == [0, *[number] * (seq.num_pages - 2), 0]
    run(engine)
    assert_baseline(parts)


def test_an_exact_worker_keeps_every_request_exact_and_an_unknown_profile_is_refused() -> None:
    engine = make(rig())
    engine.add(request(1, [1, 2, 3], 4, kv_profile="small"))
    assert tokens_of(run(engine)[1]) == expected([1, 2, 3], 4)
    for parts in (rig(), rig(**SMALL)):
        with pytest.raises(InvalidArgument, match="kv_profile is 'tiny'; allowed: exact, bal"):
            make(parts).add(request(2, [1], 4, kv_profile="tiny"))


# Who comes after whom; how many of 6 whole pages the later one may take from the cache.
@pytest.mark.parametrize(
    ("first", "then", "pages"),
    [
        ("small", "small", 6), ("small", "balanced", 1), ("small", "exact", 1),
        ("balanced", "small", 6), ("balanced", "balanced", 6), ("balanced", "exact", 1),
        ("exact", "small", 6), ("exact", "balanced", 6), ("exact", "exact", 6),
    ],
)  # fmt: skip
def test_cached_pages_are_taken_while_they_are_faithful_enough(first, then, pages) -> None:
    parts = rig(**SMALL)
    engine, prompt = make(parts), prompt_of(2, 97)
    assert answer(engine, 1, prompt, first) == (expected(prompt, 4, ignore_eos=True), 0)
    held = parts.pool.stats().held_pages
    want = expected(prompt, 4, ignore_eos=True)
    assert answer(engine, 2, prompt, then) == (want, 16 * pages)
    assert parts.pool.stats().held_pages == held  # what it computed again was its own
    assert_baseline(parts)


def test_pages_that_wait_for_sealing_are_not_taken_by_exact_requests() -> None:
    parts = rig(**SMALL)
    engine, prompt = make(parts), prompt_of(3, 97)
    plan = FaultPlan(1)
    parts.pool.set_faults(plan)
    plan.fail_randomly("pool.seal", 1.0)
    engine.add(request(1, prompt, 1, kv_profile="small"))
    run(engine)
    engine.add(request(2, prompt, 40, ignore_eos=True, kv_profile="exact"))
    outputs = engine.step() + engine.step()
    plan.clear()
    outputs += run(engine)[2]
    assert outputs[-1].fields["cached_tokens"] == 16
    assert_baseline(parts)


def test_pages_under_an_exact_request_are_not_sealed_by_one_that_shares_them() -> None:
    parts = rig(**SMALL)
    engine, prompt = make(parts), prompt_of(4, 97)
    exact = engine.add(request(1, prompt, 60, ignore_eos=True, kv_profile="exact"))
    engine.step()
    engine.add(request(2, prompt, 20, ignore_eos=True, kv_profile="small"))
    sealed_beside = 0
    while exact.num_pages:
        engine.step()
        assert not any(classes_of(parts, exact))
        sealed_beside = max(sealed_beside, parts.pool.class_pages()[2])
    assert sealed_beside > 0  # what the other one decoded
    settle(engine)
    assert answer(engine, 3, prompt, "exact")[1] == 96
    assert answer(engine, 4, prompt, "small")[1] == 96
    assert answer(engine, 5, prompt, "exact")[1] == 16  # nobody read them: sealed by then
    assert_baseline(parts)


def test_what_was_computed_over_lossy_pages_is_lossy() -> None:
    parts = rig(**SMALL)
    engine, prompt = make(parts, token_budget=32), prompt_of(5, 130)
    plan = FaultPlan(1)
    parts.pool.set_faults(plan)
    answer(engine, 1, prompt[:97], "small")
    plan.fail_randomly("pool.seal", 1.0)  # the rest of the longer one stays in bf16
    engine.add(request(2, prompt, 1, kv_profile="small"))
    run(engine)
    found = parts.memory.tree.match(b"n" * 32, np.array([*prompt, 1], np.int32))
    parts.pool.decref(found.pages)
    assert [parts.pool.class_of(p) for p in found.pages] == [0, 2, 2, 2, 2, 2, 0, 0]
    assert parts.memory.sealer.faithful(found.pages[6:], 0) == 0
    assert_baseline(parts)


@pytest.mark.parametrize("profile", ["small", "balanced"])
def test_a_prompt_longer_than_the_open_bytes_is_sealed_as_it_is_computed(profile: str) -> None:
    parts = rig(8, **SMALL | {"profile": profile})
    engine = make(parts, token_budget=64)
    whole, opened = parts.memory.capacity(), parts.memory.capacity_tokens
    assert whole > 2 * opened
    prompt = prompt_of(6, min(whole, 500) - 8)
    assert answer(engine, 1, prompt, count=8)[0] == expected(prompt, 8, ignore_eos=True)
    assert engine.scheduler.preemptions == 0 and parts.pool.class_pages()[-1] > 0
    with pytest.raises(OutOfPages, match=f"the pool holds {opened} tokens"):
        engine.add(request(2, prompt, 4, kv_profile="exact"))
    again = prompt_of(7, opened - 4)
    assert answer(engine, 3, again, "exact")[0] == expected(again, 4, ignore_eos=True)
    assert_baseline(parts)


@pytest.mark.parametrize("profile", ["small", "balanced"])
@pytest.mark.parametrize("before", [[], [100], [40] * 6, [900, 300]])
@pytest.mark.parametrize("budget", [16, 64, 512])
def test_the_longest_prompt_that_is_taken_is_answered(profile, before, budget) -> None:
    """At the first go, whatever the prefix cache has made of the pool before."""
    for frames in (10, 17, 21, 26, 33, 42):
        parts = rig(frames, **SMALL | {"profile": profile}, max_position=8000)
        engine, longest = make(parts, token_budget=budget), parts.memory.capacity()
        for name, size in enumerate(before):
            answer(engine, name, prompt_of(name, min(size, longest - 4)))
        prompt = prompt_of(99, longest - 3)
        assert answer(engine, 99, prompt)[0] == expected(prompt, 4, ignore_eos=True), frames
        assert engine.scheduler.preemptions == 0
        with pytest.raises(OutOfPages, match=f"the pool holds {longest} tokens"):
            engine.add(request(100, prompt_of(1, longest + 1), 1))


def test_short_memory_seals_prompts_before_it_preempts_anyone() -> None:
    parts = rig(8, **SMALL)
    engine = make(parts, token_budget=64)
    opened = parts.memory.capacity_tokens
    first, long = prompt_of(8, 20), prompt_of(9, opened)
    engine.add(request(1, first, 60, ignore_eos=True))
    early = engine.step()
    engine.add(request(2, long, 20, ignore_eos=True))
    outputs = run(engine)
    assert tokens_of(early + outputs[1]) == expected(first, 60, ignore_eos=True)
    assert tokens_of(outputs[2]) == expected(long, 20, ignore_eos=True)
    assert engine.scheduler.preemptions == 0
    assert_baseline(parts)


def test_a_prompt_that_needs_sealing_fails_alone_where_nothing_can_be_sealed() -> None:
    parts = rig(8, **SMALL)
    engine = make(parts, token_budget=64)
    plan = FaultPlan(1)
    parts.pool.set_faults(plan)
    plan.fail_randomly("pool.seal", 1.0)
    engine.add(request(1, prompt_of(10, parts.memory.capacity_tokens + 40), 4))
    engine.add(request(2, [1, 2, 3], 4, ignore_eos=True))
    outputs = run(engine)
    assert outputs[1][-1].fields["code"] == "kv_cannot_be_compressed"
    assert tokens_of(outputs[2]) == expected([1, 2, 3], 4, ignore_eos=True)
    assert_baseline(parts)
