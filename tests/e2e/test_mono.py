"""One process generating over pages: equal to transformers, and to itself however it is cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from pair import assert_baseline, make_mono, prompt, request, run_mono

SIZES = [1, 15, 16, 17, 63, 64, 65, 200]


@pytest.mark.parametrize("page_size", [16, 64])
def test_greedy_equals_transformers(tiny_f32: Any, tiny_path: Path, page_size: int) -> None:
    reference = transformers.AutoModelForCausalLM.from_pretrained(tiny_path, dtype="float32")
    engine = make_mono(tiny_f32, page_size, token_budget=48)
    prompts = [prompt(size) for size in SIZES]
    answers = run_mono(engine, *(request(tokens, 24) for tokens in prompts))
    for tokens, answer in zip(prompts, answers, strict=True):
        with torch.inference_mode():
            want = reference.generate(
                torch.tensor([tokens]), max_new_tokens=24, min_new_tokens=24, do_sample=False
            )
        suppressed = want[0, len(tokens) :].tolist()
        if 2 not in answer.tokens:  # min_new_tokens bans the end token, ignore_eos only ignores it
            assert answer.tokens == suppressed
    assert sum(2 not in answer.tokens for answer in answers) >= len(answers) // 2


def alone(model: Any, tokens: list[int], count: int = 12, **options: Any) -> list[int]:
    return run_mono(make_mono(model), request(tokens, count, **options))[0].tokens


def test_batched_equals_alone(tiny: Any) -> None:
    prompts = [prompt(size, seed) for seed in range(3) for size in SIZES]
    want = [alone(tiny, tokens) for tokens in prompts]
    engine = make_mono(tiny, frames=100, token_budget=64, max_running=13)
    answers = run_mono(engine, *(request(tokens, 12) for tokens in prompts))
    assert [answer.tokens for answer in answers] == want
    assert len({tuple(tokens) for tokens in want}) > len(want) // 2
    assert_baseline(engine)


@pytest.mark.parametrize("page_size", [16, 64])
def test_prefix_hit_equals_cold(tiny: Any, page_size: int) -> None:
    engine = make_mono(tiny, page_size)
    tokens = prompt(200)
    cold, hit = (run_mono(engine, request(tokens, 12))[0] for _ in range(2))
    assert hit.tokens == cold.tokens
    assert hit.end["cached_tokens"] == 199 // page_size * page_size
    turn = tokens + cold.tokens + prompt(30)
    assert run_mono(engine, request(turn, 12))[0].tokens == alone(tiny, turn)


@pytest.mark.parametrize("budget", [16, 17, 100, 512])
def test_chunk_budgets_change_nothing(tiny: Any, budget: int) -> None:
    prompts = [prompt(size) for size in (5, 64, 300)]
    engine = make_mono(tiny, token_budget=budget)
    answers = run_mono(engine, *(request(tokens, 12) for tokens in prompts))
    assert [a.tokens for a in answers] == [alone(tiny, tokens) for tokens in prompts]


def test_preemption_changes_nothing(tiny: Any) -> None:
    prompts = [prompt(size) for size in (100, 120, 90, 110)]
    engine = make_mono(tiny, frames=10)  # 320 tokens, where all would need 660
    answers = run_mono(engine, *(request(tokens, 60) for tokens in prompts))
    assert engine.scheduler.preemptions > 0
    assert [a.tokens for a in answers] == [alone(tiny, tokens, 60) for tokens in prompts]
    assert_baseline(engine)


def test_seeded_sampling_does_not_depend_on_the_batch(tiny: Any) -> None:
    options = {"temperature": 1.0, "top_p": 0.95, "seed": 5}
    want = alone(tiny, prompt(50), **options)
    engine = make_mono(tiny, token_budget=40)
    others = [request(prompt(30, i), 12, temperature=0.7, seed=i) for i in range(5)]
    assert run_mono(engine, *others, request(prompt(50), 12, **options))[-1].tokens == want
    assert want != alone(tiny, prompt(50), **(options | {"seed": 6}))


def test_threads_change_nothing(tiny: Any) -> None:
    from kvcore import kernels

    engine = make_mono(tiny)
    config = tiny.config
    engine.plan = kernels.AttentionPlan(
        engine.memory.pool, config.num_q_heads, config.attention_scale, kernels.ThreadPool(3)
    )
    assert run_mono(engine, request(prompt(200), 12))[0].tokens == alone(tiny, prompt(200))
