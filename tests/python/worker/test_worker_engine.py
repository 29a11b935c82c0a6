"""The engine over real pages with the hash model: wrong pages show in the tokens."""

import numpy as np
import pytest
import torch
from hash_model import (
    EOS,
    VOCAB,
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
from hypothesis import given, settings
from hypothesis import strategies as st
from kvcore import _core
from kvcore.errors import InvalidArgument, OutOfPages

SECRET = b"s" * 32


@pytest.mark.parametrize("size", [1, 2, 15, 16, 17, 31, 32, 33, 64, 65, 200])
@pytest.mark.parametrize("budget", [1, 16, 17, 512])
def test_one_request(size: int, budget: int) -> None:
    parts = rig()
    engine = make(parts, token_budget=budget)
    prompt = prompt_of(np.random.default_rng(size), size)
    engine.add(request(1, prompt, 12))
    outputs = run(engine)[1]
    want = expected(prompt, 12)
    assert tokens_of(outputs) == want
    assert outputs[-1].kind == "finished"
    assert outputs[-1].fields == {
        "request_id": (1).to_bytes(16, "big"),
        "reason": "stop" if want[-1] == EOS else "length",
        "prompt_tokens": size,
        "completion_tokens": len(want),
        "cached_tokens": 0,
        "computed_prompt_tokens": size,
    }
    assert max(parts.model.rows_seen) <= budget
    assert_baseline(parts)


def test_many_requests_at_once_give_what_each_gives_alone() -> None:
    parts = rig()
    engine = make(parts, token_budget=48, max_running=7)
    rng = np.random.default_rng(3)
    prompts = [prompt_of(rng, int(n)) for n in rng.integers(1, 150, 40)]
    for name, prompt in enumerate(prompts):
        engine.add(request(name, prompt, 1 + name % 20))
    outputs = run(engine)
    for name, prompt in enumerate(prompts):
        assert tokens_of(outputs[name]) == expected(prompt, 1 + name % 20)
    assert engine.scheduler.preemptions == 0
    assert_baseline(parts)


def test_decode_rows_go_on_while_a_long_prompt_is_cut_into_chunks() -> None:
    parts = rig()
    engine = make(parts, token_budget=32)
    engine.add(request(1, [1, 2, 3], 30, ignore_eos=True))
    engine.step()
    engine.add(request(2, prompt_of(np.random.default_rng(0), 300), 4))
    for _ in range(9):
        assert [name_of(o) for o in engine.step()] == [1]
    assert max(parts.model.rows_seen) <= 32
    assert 2 in run(engine)


def test_a_full_batch_of_decodes_does_not_starve_a_prompt() -> None:
    parts = rig()
    engine = make(parts, token_budget=4)
    for name in range(8):
        engine.add(request(name, [name], 60, ignore_eos=True))
    for _ in range(10):
        engine.step()
    engine.add(request(9, list(range(40)), 2, ignore_eos=True))
    for _ in range(15):
        engine.step()
    assert not any(seq.request_id[-1] == 9 for seq in engine.scheduler.running)
    run(engine)


def test_prefix_hit_equals_cold_and_is_counted() -> None:
    parts = rig()
    engine = make(parts)
    prompt = prompt_of(np.random.default_rng(5), 100)
    engine.add(request(1, prompt, 10))
    cold = run(engine)[1]
    engine.add(request(2, prompt, 10))
    hit = run(engine)[2]
    assert tokens_of(hit) == tokens_of(cold)
    assert (hit[-1].fields["cached_tokens"], hit[-1].fields["computed_prompt_tokens"]) == (96, 4)
    longer = prompt + tokens_of(cold) + [3, 4]
    engine.add(request(3, longer, 10))
    turn = run(engine)[3]
    assert tokens_of(turn) == expected(longer, 10)
    assert turn[-1].fields["cached_tokens"] >= 96
    assert engine.counters["cached_tokens"] == 96 + turn[-1].fields["cached_tokens"]
    assert_baseline(parts)


def test_other_namespace_is_no_hit() -> None:
    parts = rig()
    engine = make(parts)
    for name, namespace in ((1, b"a" * 32), (2, b"b" * 32), (3, b""), (4, b"")):  # b"": uncacheable
        engine.add(request(name, list(range(64)), 2, namespace=namespace))
        assert run(engine)[name][-1].fields["cached_tokens"] == 0


def test_the_prompt_is_findable_before_its_request_ends() -> None:
    parts = rig()
    engine = make(parts)
    prompt = prompt_of(np.random.default_rng(1), 80)
    engine.add(request(1, prompt, 50, ignore_eos=True))
    engine.step()
    engine.add(request(2, [*prompt, 5], 3))
    assert run(engine)[2][-1].fields["cached_tokens"] == 80


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_preemption_changes_no_token(data: st.DataObject) -> None:
    frames = data.draw(st.integers(4, 12))
    parts = rig(num_frames=frames, page_size=16, extent=data.draw(st.sampled_from([1, 2])))
    capacity = parts.memory.capacity_tokens
    engine = make(parts, token_budget=data.draw(st.sampled_from([8, 16, 64, 512])))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    shared = prompt_of(rng, 32)
    want = {}
    for name in range(data.draw(st.integers(2, 10))):
        prompt = shared[: int(rng.integers(0, 33))] + prompt_of(rng, int(rng.integers(1, 20)))
        prompt = prompt[:capacity]
        sampling = {"temperature": float(rng.integers(0, 2)), "seed": int(rng.integers(0, 2**63))}
        count = min(40, capacity + 1 - len(prompt))
        want[name] = expected(prompt, count, **sampling)
        engine.add(request(name, prompt, 40, **sampling))
    outputs = run(engine)
    assert {name: tokens_of(outputs[name]) for name in want} == want
    assert_baseline(parts)


def test_preempted_requests_are_recomputed_and_counted_apart() -> None:
    parts = rig(num_frames=6, extent=1)
    engine = make(parts)
    prompts = {name: prompt_of(np.random.default_rng(name), 20) for name in range(3)}
    for name, prompt in prompts.items():
        engine.add(request(name, prompt, 40, ignore_eos=True))
    outputs = run(engine)
    assert engine.scheduler.preemptions > 0
    assert sum(o[-1].fields["computed_prompt_tokens"] for o in outputs.values()) <= 60
    assert engine.counters["recomputed_tokens"] > 0
    assert_baseline(parts)


def test_a_lone_request_may_use_the_whole_pool_although_its_prefix_is_scattered() -> None:
    parts = rig(num_frames=4, extent=4)
    engine = make(parts)
    prompt: list[int] = []
    for name in range(3):  # each turn's cached pages end in the middle of another frame
        prompt = prompt + prompt_of(np.random.default_rng(name), 20)
        engine.add(request(name, prompt, 1))
        run(engine)
    full = parts.memory.capacity_tokens
    engine.add(request(9, prompt, full, ignore_eos=True))
    outputs = run(engine)[9]
    assert len(prompt) + len(tokens_of(outputs)) == full + 1
    assert outputs[-1].fields["reason"] == "length"
    assert_baseline(parts)


def test_context_full_ends_with_length() -> None:
    parts = rig(max_position=40)
    engine = make(parts)
    engine.add(request(1, list(range(30)), 100, ignore_eos=True))
    end = run(engine)[1][-1]
    assert (end.fields["reason"], end.fields["completion_tokens"]) == ("length", 10)


def test_stop_tokens_and_ignore_eos() -> None:
    parts = rig()
    engine = make(parts)
    prompt = [4, 8, 15]
    want = expected(prompt, 20)
    engine.add(request(1, prompt, 20, stop_token_ids=frozenset([want[3]])))
    stopped = run(engine)[1]
    assert tokens_of(stopped) == want[: want.index(want[3]) + 1]
    assert stopped[-1].fields["reason"] == "stop"
    for name, ignore in ((2, True), (3, False)):
        engine.model.config.eos_ids = (want[0],)
        engine.add(request(name, prompt, 5, ignore_eos=ignore))
        assert len(tokens_of(run(engine)[name])) == (5 if ignore else 1)


def test_seeded_sampling_does_not_depend_on_the_batch() -> None:
    sampling = {"temperature": 1.0, "top_p": 0.9}
    prompt = prompt_of(np.random.default_rng(2), 50)
    want = expected(prompt, 15, seed=77, **sampling)
    parts = rig()
    engine = make(parts, token_budget=24)
    for name in range(6):
        engine.add(request(name, [name] * 30, 12, temperature=1.0, seed=name))
    engine.add(request(9, prompt, 15, seed=77, **sampling))
    assert tokens_of(run(engine)[9]) == want
    assert want != expected(prompt, 15, seed=78, **sampling)


def test_logprobs_come_with_each_token() -> None:
    engine = make(rig())
    engine.add(request(1, [1, 2], 3, num_logprobs=2, ignore_eos=True))
    for output in run(engine)[1][1:-1]:
        assert (
            output.fields["top_ids"][0] == output.fields["token_ids"][0]
            and len(output.fields["top_logprobs"]) == 2
        )
        assert output.fields["logprobs"] == [output.fields["top_logprobs"][0]]


def test_1000_requests_20_percent_cancelled_leave_the_pool_at_baseline() -> None:
    parts = rig(num_frames=24)
    engine = make(parts, token_budget=64, max_running=12)
    rng = np.random.default_rng(11)
    doomed = {int(name): int(rng.integers(0, 12)) for name in rng.choice(1000, 200, replace=False)}
    prompts, outputs, started = {}, {}, 0
    while started < 1000 or engine.has_work:
        while started < 1000 and len(engine.scheduler.waiting) < 8:
            head = [started % 3] * int(rng.integers(0, 40))
            prompts[started] = head + prompt_of(rng, int(rng.integers(1, 60)))
            engine.add(request(started, prompts[started], int(rng.integers(1, 16))))
            started += 1
        for name in [n for n, wait in doomed.items() if n < started and wait <= 0]:
            engine.cancel(name.to_bytes(16, "big"))
            del doomed[name]
        doomed = {n: wait - (n < started) for n, wait in doomed.items()}
        for output in engine.step():
            outputs.setdefault(name_of(output), []).append(output)
    ends = [o[-1].fields["reason"] for o in outputs.values()]
    assert len(ends) == 1000 and 100 < ends.count("cancelled") <= 200
    for all_ in outputs.values():
        kinds = [output.kind for output in all_]
        assert kinds.count("finished") == 1 and "failed" not in kinds
        assert [kind for kind in kinds if kind != "tokens"].index("finished") == (len(kinds) > 1)
    for name, all_ in outputs.items():
        if all_[-1].fields["reason"] != "cancelled":
            assert tokens_of(all_) == expected(prompts[name], len(tokens_of(all_)))
    assert_baseline(parts)


def test_what_can_never_be_answered_is_refused_by_name() -> None:
    parts = rig(num_frames=4, extent=1, max_position=512)
    engine = make(parts)
    for prompt, options, field in (
        ([], {}, "tokens"),
        ([0] * 512, {}, "tokens"),
        ([VOCAB], {}, "tokens"),
        ([-1], {}, "tokens"),
        ([1], {"max_tokens": 0}, "max_tokens"),
        ([1], {"deadline_s": float("nan")}, "deadline_s"),
        ([1], {"temperature": -0.1}, "temperature"),
        ([1], {"temperature": float("nan")}, "temperature"),
        ([1], {"top_p": 0.0}, "top_p"),
        ([1], {"top_p": 1.5}, "top_p"),
        ([1], {"seed": -1}, "seed"),
        ([1], {"seed": 1 << 64}, "seed"),
        ([1], {"num_logprobs": 21}, "num_logprobs"),
        ([1], {"namespace": b"short"}, "namespace"),
    ):
        with pytest.raises(InvalidArgument, match=f"^{field} .*allowed"):
            engine.add(request(1, prompt, **options))
    with pytest.raises(OutOfPages, match=r"65 entries.*holds 64 tokens"):
        engine.add(request(1, [0] * 65))
    engine.add(request(1, [0] * 64, 5, ignore_eos=True))
    with pytest.raises(InvalidArgument, match="already in use"):
        engine.add(request(1, [0]))
    end = run(engine)[1][-1]
    assert (end.fields["reason"], end.fields["completion_tokens"]) == ("length", 1)
    assert not engine.cancel((1).to_bytes(16, "big"))
    assert_baseline(parts)


def test_deadline_ends_waiting_and_running_requests() -> None:
    now = [0.0]
    parts = rig()
    engine = make(parts, max_running=1, clock=lambda: now[0])
    engine.add(request(1, [1], 400, deadline_s=2.0, ignore_eos=True))
    engine.add(request(2, [1], 5, deadline_s=1.0))
    engine.step()
    now[0] = 1.5
    assert [(name_of(o), o.kind) for o in engine.step()] == [(2, "failed"), (1, "tokens")]
    now[0] = 2.5
    assert [(o.kind, o.fields["code"]) for o in engine.step()] == [("failed", "timeout")]
    assert not engine.has_work
    assert_baseline(parts)


def test_a_failing_step_fails_its_requests_only() -> None:
    parts = rig()
    engine = make(parts)
    engine.add(request(1, [1, 2, 3], 5))
    good = parts.model.forward
    parts.model.forward = lambda *args: (_ for _ in ()).throw(RuntimeError("broken kernel"))
    failed = engine.step()
    assert [(o.kind, o.fields["code"], o.fields["retryable"]) for o in failed] == [
        ("failed", "internal", 1)
    ]
    parts.model.forward = lambda *args: torch.full_like(good(*args), float("nan"))
    engine.add(request(2, [1, 2, 3], 5))
    assert [(o.kind, o.fields["code"]) for o in engine.step()] == [("failed", "internal")]
    parts.model.forward = good
    engine.add(request(3, [1, 2, 3], 5))
    assert tokens_of(run(engine)[3]) == expected([1, 2, 3], 5)
    assert_baseline(parts)


def keys_of(tokens, page_size: int) -> list[bytes]:
    return _core.keys.KeyChain(SECRET, b"n" * 32, page_size).extend(np.array(tokens, np.int32))


def net_events(parts) -> tuple[set[bytes], set[bytes]]:
    stored, removed, lost = parts.memory.drain_events()
    assert not lost and len(set(stored)) == len(stored)
    return set(stored), set(removed)


def test_key_events_follow_the_tree() -> None:
    parts = rig(num_frames=8, extent=1, secret=SECRET)
    engine = make(parts)
    prompt = list(range(90)) + [1] * 10
    engine.add(request(1, prompt, 2))
    run(engine)
    first = keys_of(prompt, 16)
    assert net_events(parts) == (set(first), set())
    engine.add(request(2, [5] * 120, 2))
    run(engine)
    stored, removed = net_events(parts)
    assert stored == set(keys_of([5] * 120, 16))
    assert removed <= set(first) and len(removed) >= 5
    snapshot = parts.memory.snapshot()
    assert snapshot.lost and set(snapshot.stored) == set(first) - removed | stored


def test_generated_tokens_get_keys_of_the_same_chain() -> None:
    parts = rig(secret=SECRET)
    engine = make(parts)
    prompt = prompt_of(np.random.default_rng(1), 100)
    engine.add(request(1, prompt, 60, ignore_eos=True))
    tokens = prompt + tokens_of(run(engine)[1])
    assert net_events(parts) == (set(keys_of(tokens[:-1], 16)), set())
