"""merge_states: the oracle's numbers, an empty side changes no bit, any order is close."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kvcore import kernels
from kvcore import reference as ref
from support.batches import bits_of

Parts = tuple[torch.Tensor, torch.Tensor]
SINGLE = 2.0**-24


def part(seed: int, rows: int = 5, heads: int = 3, dim: int = 64, spread: float = 3.0) -> Parts:
    rng = np.random.default_rng(seed)
    out = rng.standard_normal((rows, heads, dim), np.float32)
    lse = (spread * rng.standard_normal((rows, heads))).astype(np.float32)
    return torch.from_numpy(out), torch.from_numpy(lse)


def empty(rows: int = 5, heads: int = 3, dim: int = 64) -> Parts:
    return torch.zeros(rows, heads, dim), torch.full((rows, heads), -torch.inf)


def merge(a: Parts, b: Parts) -> Parts:
    out, lse = torch.full_like(a[0], torch.nan), torch.full_like(a[1], torch.nan)
    kernels.merge_states(*a, *b, out, lse)
    return out, lse


def distance(got: Parts, want: tuple[np.ndarray, np.ndarray], size: np.ndarray) -> float:
    """Largest error in units of 2^-24 * (sum of weighted |out|, |lse| + 1)."""
    out = np.abs(got[0].double().numpy() - want[0]) / (SINGLE * size)
    lse = np.abs(got[1].double().numpy() - want[1]) / (SINGLE * (np.abs(want[1]) + 1))
    return float(max(out.max(), lse.max()))


@pytest.mark.parametrize("dim", [16, 64, 80, 256])
def test_merge_is_the_oracles(dim: int, isa: str) -> None:
    a, b = part(1, dim=dim), part(2, dim=dim)
    arrays = [t.numpy() for t in (*a, *b)]
    size = ref.merge_states(np.abs(arrays[0]), arrays[1], np.abs(arrays[2]), arrays[3])[0]
    # exp amplifies the rounding of a difference d of LSEs (|d| <= 20) by |d|, and a few more
    assert distance(merge(a, b), ref.merge_states(*arrays), size) <= 40


def test_an_empty_side_is_neutral_bit_for_bit(isa: str) -> None:
    a = part(1)
    a[0][0, 0, 0] = -0.0
    a[0][0, 0, 1] = 1e-42  # a denormal survives too
    for got in (merge(a, empty()), merge(empty(), a)):
        assert np.array_equal(bits_of(got[0]), bits_of(a[0]))
        assert np.array_equal(bits_of(got[1]), bits_of(a[1]))


def test_poison_in_an_empty_side_is_not_read(isa: str) -> None:
    a, nothing = part(1), empty()
    nothing[0].fill_(torch.nan)
    for got in (merge(a, nothing), merge(nothing, a)):
        assert np.array_equal(bits_of(got[0]), bits_of(a[0]))


def test_two_empty_sides_are_empty(isa: str) -> None:
    out, lse = merge(empty(), empty())
    assert (out == 0).all() and torch.isneginf(lse).all()


def test_empty_rows_among_others(isa: str) -> None:
    a, b = part(1), part(2)
    a[1][2, 1] = -torch.inf
    a[0][2, 1] = 0
    out, lse = merge(a, b)
    assert torch.equal(out[2, 1], b[0][2, 1]) and lse[2, 1] == b[1][2, 1]
    assert torch.isfinite(out).all() and torch.isfinite(lse).all()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seeds=st.lists(st.integers(0, 999), min_size=3, max_size=6),
    spread=st.sampled_from([0.1, 3.0, 40.0]),
)
def test_merging_is_associative_within_the_bound(seeds: list[int], spread: float, isa: str) -> None:
    parts = [part(s, spread=spread) for s in seeds]
    left = parts[0]
    for p in parts[1:]:
        left = merge(left, p)
    right = parts[-1]
    for p in reversed(parts[:-1]):
        right = merge(p, right)
    want, size = parts[0][0].double().numpy(), np.abs(parts[0][0].double().numpy())
    lse = parts[0][1].double().numpy()
    for out_b, lse_b in parts[1:]:
        size = ref.merge_states(size, lse, out_b.abs().numpy(), lse_b.numpy())[0]
        want, lse = ref.merge_states(want, lse, out_b.numpy(), lse_b.numpy())
    bound = 40 * len(seeds) * max(spread, 1)
    assert distance(left, (want, lse), size) <= bound
    assert distance(right, (want, lse), size) <= bound


def test_merge_of_halves_is_the_whole(isa: str) -> None:
    """Partial attention over two sets of pages, merged, against attention over all of them."""
    from support.batches import Batch, Sequence, Shape, to_torch

    shape = Shape(4, 2, 64, 64, 64, "f32", num_layers=1)
    batch = Batch(shape, [Sequence(8, 192, 1)])
    q = to_torch(batch.q(0, "f32"), "f32")
    whole, whole_lse = batch.attend(0, "f32")
    pieces = []
    for columns in (slice(0, 1), slice(1, 3)):
        table = np.ascontiguousarray(batch.block_table[:, columns])
        plan = kernels.AttentionPlan(batch.pool, 4, scale=shape.scale)
        plan.prepare(batch.cu_seqlens_q, np.array([64 * table.shape[1]], np.int32), table)
        out, lse = torch.empty(1, 4, 64), torch.empty(1, 4)
        plan.attend(0, q, out, lse)
        pieces.append((out, lse))
    out, lse = merge(pieces[0], pieces[1])
    torch.testing.assert_close(out, whole, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse, whole_lse, rtol=1e-6, atol=1e-6)
