import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kvcore.model.sampling import sample, uniforms
from kvcore.worker.request import Request


def params_of(temperature: float = 0.0, top_p: float = 1.0, seed: int = 0, num_logprobs: int = -1):
    return Request(
        b"",
        np.zeros(1, np.int32),
        1,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        num_logprobs=num_logprobs,
    )


def draws(logits: torch.Tensor, params: Request, count: int) -> np.ndarray:
    rows = sample(logits.expand(count, -1), [params] * count, range(count))
    return np.array([row.token_ids[0] for row in rows])


def test_greedy_is_the_first_maximum() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0], [5.0, 1.0, 5.0]])
    chosen = sample(logits, [params_of()] * 2, [4, 9])
    assert [row.token_ids[0] for row in chosen] == [1, 0]
    assert chosen[0].logprobs == []


def test_uniforms_look_uniform_and_differ_by_seed_and_position() -> None:
    points = uniforms([5] * 20_000, range(20_000))
    assert points.min() >= 0.0 and points.max() < 1.0
    counts = np.histogram(points, bins=20, range=(0, 1))[0]
    assert abs(counts - 1000).max() < 160
    other = uniforms([6] * 20_000, range(20_000))
    assert abs(np.corrcoef(points, other)[0, 1]) < 0.03
    assert abs(np.corrcoef(points[:-1], points[1:])[0, 1]) < 0.03
    assert len(set(points)) == 20_000
    assert uniforms([2**64 - 1], [0])[0] != uniforms([0], [0])[0]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_softmax(temperature: float) -> None:
    logits = torch.tensor([[1.0, 2.0, 0.0, -1.0, 1.5]])
    want = torch.softmax(logits[0].double() / temperature, 0).numpy()
    got = np.bincount(draws(logits, params_of(temperature), 20_000), minlength=5) / 20_000
    assert abs(got - want).max() < 0.015


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    logits = torch.log(torch.tensor([[0.1, 0.5, 0.15, 0.25]]))
    seen = set(draws(logits, params_of(1.0, top_p=0.7), 2000))
    assert seen == {1, 3}
    assert set(draws(logits, params_of(1.0, top_p=0.76), 2000)) == {1, 2, 3}
    for least in (1e-9, 1e-10, 5e-324):  # all that the API lets through
        params = params_of(1.0, top_p=least)
        params.check(vocab_size=4, max_context=8)
        assert set(draws(logits, params, 50)) == {1}


def test_flat_distribution_beyond_the_narrow_nucleus() -> None:
    logits = torch.zeros(1, 5000)
    seen = draws(logits, params_of(1.0, top_p=0.9), 4000)
    assert len(set(seen)) > 2200  # 1024 candidates alone could not give so many


def test_extreme_temperatures() -> None:
    logits = torch.tensor([[1.0, 2.0, 1.999]])
    assert set(draws(logits, params_of(1e-30), 100)) == {1}
    assert set(draws(logits, params_of(1e30), 200)) == {0, 1, 2}
    masked = torch.tensor([[float("-inf"), 0.0, float("-inf")]])
    assert set(draws(masked, params_of(1.0), 200)) == {1}
    assert set(draws(masked, params_of(1.0, top_p=0.5), 200)) == {1}


def test_logprobs_of_chosen_and_top() -> None:
    logits = torch.tensor([[0.0, 1.0, 3.0, 2.0]])
    want = torch.log_softmax(logits[0].double(), 0)
    row = sample(logits, [params_of(num_logprobs=2)], [0])[0]
    assert row.token_ids == [2] and row.top_ids == [2, 3]
    assert row.logprobs == pytest.approx([float(want[2])])
    assert row.top_logprobs == pytest.approx([float(want[2]), float(want[3])])
    bare = sample(logits, [params_of(num_logprobs=0)], [0])[0]
    assert len(bare.logprobs) == 1 and bare.top_ids == []


def test_not_finite_rows_are_told_and_leave_others_alone() -> None:
    logits = torch.tensor([[0.0, float("nan")], [0.0, 1.0], [float("inf"), 0.0]])
    chosen = sample(logits, [params_of(1.0, num_logprobs=1)] * 3, [0, 0, 0])
    assert chosen[0] is None and chosen[2] is None and chosen[1] is not None


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_row_does_not_depend_on_its_batch(data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 12))
    seed = data.draw(st.integers(0, 2**32))
    vocab = data.draw(st.sampled_from([5, 97, 3000]))
    logits = torch.from_numpy(np.random.default_rng(seed).normal(0, 3, (size, vocab)))
    logits = logits.float()
    params = [
        params_of(
            data.draw(st.sampled_from([0.0, 0.3, 1.0, 1.7])),
            data.draw(st.sampled_from([1.0, 0.2, 0.9, 0.999])),
            data.draw(st.integers(0, 2**64 - 1)),
            data.draw(st.integers(-1, 5)),
        )
        for _ in range(size)
    ]
    positions = [data.draw(st.integers(0, 9000)) for _ in range(size)]
    together = sample(logits, params, positions)
    for i in range(size):
        assert sample(logits[i : i + 1], [params[i]], [positions[i]]) == [together[i]]
