"""Bounds of pages against the float64 oracle, and what selection relies on: no key scores more."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kvcore import kernels
from kvcore import reference as ref
from kvcore.compress import seal_pages
from kvcore.errors import InvalidArgument
from kvcore.pages import PageClass, PageSpec, Pool, page_ids_for
from support.batches import Batch, Sequence, Shape, to_torch

FORMATS = ["bf16", "f16", "f32"]
CODES = ["k4", "int8", "fp8"]
DIMS = [64, 80, 128, 256]
PAGES = [16, 32, 64, 128]
examples = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def tokens_of(batch: Batch) -> np.ndarray:
    """int32 [num_seqs, max_pages], the valid tokens of each entry of the block table."""
    size = batch.shape.page_size
    starts = np.arange(batch.block_table.shape[1]) * size
    return np.clip(batch.context_lens[:, None] - starts, 0, size).astype(np.int32)


def expected(batch: Batch, layer: int, tokens: np.ndarray) -> np.ndarray:
    """The oracle's bounds of the first tokens of every entry of the block table."""
    found = []
    for page, count in zip(batch.block_table.flat, tokens.flat, strict=True):
        k, _ = ref.read_slice(batch.arena, batch.geometry, max(page, 0), layer)
        found.append(ref.page_bounds(ref.decode(k, batch.shape.fmt), count))
    return np.stack(found)


def keys_like(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Keys [pages, tokens, heads, dim] whose channels differ in size and place, as bf16 bits."""
    rng = np.random.default_rng(seed)
    sizes = np.exp2(rng.integers(-3, 3, shape[2:]))
    return ref.to_bf16(4 * rng.normal(size=shape[2:]) + sizes * rng.normal(size=shape))


def stored(k: np.ndarray, formats: list[str]) -> tuple[Pool, list[int]]:
    """A pool with pages of these keys (bf16 bits), in the formats of their heads, and their ids."""
    num_pages, page_size, _, dim = k.shape
    spec = PageSpec(1, len(formats), dim, page_size=page_size, extent_pages=1)
    number, ids = 0, 0
    if set(formats) != {"bf16"}:
        page_class = PageClass(spec, [[(fmt, "bf16") for fmt in formats]])
        ids = page_ids_for(page_class, num_pages + 1)
    pool = Pool(spec, num_pages + 1, huge_pages=False, page_ids=ids)
    if ids:
        number = pool.add_class(page_class)
    pages = []
    for rows in k:
        pages += pool.alloc(1, run_pages=1)
        pool.write_slice(pages[-1], 0, rows, rows)
        if number:
            seal_pages(pool, pages[-1:], number)
    return pool, pages


def decoded(k: np.ndarray, fmt: str) -> np.ndarray:
    """Stored bf16 keys [tokens, dim] of one head as attention reads them from `fmt`, float64."""
    rows = ref.decode(k, "bf16")
    if fmt in FORMATS:
        return rows
    block = ref.encode_block(fmt, "k", rows)
    return ref.decode_block(fmt, "k", block, *rows.shape).astype(np.float64)


def slack(q: np.ndarray, bounds: np.ndarray, scale: float) -> np.ndarray:
    """What float32 sums may be off by, [rows, q heads, pages]."""
    sizes = np.abs(bounds).max(axis=2).repeat(q.shape[1] // bounds.shape[1], axis=1)
    sizes = np.where(np.isinf(sizes), 0, sizes)
    return (2 * q.shape[2] + 4) * 2.0**-24 * scale * np.einsum("rhd,phd->rhp", np.abs(q), sizes)


@examples
@given(
    heads=st.sampled_from([1, 3, 8]),
    dim=st.sampled_from(DIMS),
    page=st.sampled_from(PAGES),
    fmt=st.sampled_from(FORMATS),
    layout=st.sampled_from(["packed", "canonical"]),
    poison=st.sampled_from(["nan", "inf", "huge"]),
    lengths=st.lists(st.integers(0, 300), min_size=1, max_size=3),
    behind=st.integers(0, 20),
)
def test_bounds_of_numbers_are_exact(
    heads: int,
    dim: int,
    page: int,
    fmt: str,
    layout: str,
    poison: str,
    lengths: list[int],
    behind: int,
    isa: str,
) -> None:
    """Partly filled pages too, whatever lies behind their tokens: poison, or `behind` others."""
    shape = Shape(heads, heads, dim, 16, page, fmt, layout)
    batch = Batch(shape, [Sequence(i, n, 0) for i, n in enumerate(lengths)], poison=poison)
    tokens = np.maximum(tokens_of(batch).reshape(-1) - behind, 0).astype(np.int32)
    for layer in range(2):
        got = kernels.page_bounds(batch.pool, layer, batch.block_table.reshape(-1), tokens)
        assert np.array_equal(got, expected(batch, layer, tokens))


@pytest.mark.parametrize("fmt", FORMATS)
def test_every_number_of_tokens(fmt: str, isa: str) -> None:
    for layout in ("packed", "canonical"):
        batch = Batch(
            Shape(2, 2, 64, 16, 64, fmt, layout, 1), [Sequence(1, n, 0) for n in range(66)]
        )
        tokens = tokens_of(batch).reshape(-1)
        got = kernels.page_bounds(batch.pool, 0, batch.block_table.reshape(-1), tokens)
        assert np.array_equal(got, expected(batch, 0, tokens))


def test_latent_pages(isa: str) -> None:
    batch = Batch(
        Shape(4, 1, 576, 512, 64, "bf16", "canonical", 1, latent=True), [Sequence(1, 100, 0)]
    )
    tokens = tokens_of(batch)[0]
    got = kernels.page_bounds(batch.pool, 0, batch.block_table[0], tokens)
    assert np.array_equal(got, expected(batch, 0, tokens))


@pytest.mark.parametrize("order", ["NHD", "HND"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_tensors_of_another_engine(fmt: str, order: str, isa: str) -> None:
    k = np.random.default_rng(1).normal(size=(5, 2, 32, 3, 80))
    cache = to_torch(ref.encode(k, fmt), fmt)
    if order == "HND":
        cache = cache.transpose(2, 3).contiguous()
    pages = kernels.TensorPages([cache], order)
    tokens = [32, 7, 0, 16, 31]
    got = kernels.page_bounds(pages, 0, [4, 0, -1, 2, 1], tokens)
    keys = ref.decode(ref.encode(k, fmt), fmt)[:, 0]
    for i, page in enumerate([4, 0, 0, 2, 1]):
        assert np.array_equal(got[i], ref.page_bounds(keys[page], tokens[i]))


@examples
@given(
    dim=st.sampled_from(DIMS),
    page=st.sampled_from(PAGES),
    seed=st.integers(0, 2**20),
    tokens=st.integers(1, 128),
)
def test_bounds_of_codes(dim: int, page: int, seed: int, tokens: int, isa: str) -> None:
    """int8 and fp8 exactly, of the valid tokens; k4 by its minima and scales."""
    k = keys_like((1, page, 4, dim), seed)
    pool, pages = stored(k, [*CODES, "bf16"])
    tokens = min(tokens, page)
    got = kernels.page_bounds(pool, 0, pages, [tokens])[0]
    for head, fmt in enumerate([*CODES, "bf16"]):
        keys = decoded(k[0, :, head], fmt)
        if fmt != "k4":
            assert np.array_equal(got[head], ref.page_bounds(keys[:, None], tokens)[0])
            continue
        block = ref.encode_block("k4", "k", ref.decode(k[0, :, head], "bf16"))
        z, step = ref.k4_channels(ref.split_block("k4", "k", block, page, dim))
        assert np.array_equal(got[head], np.stack([z, z + np.float32(15) * step]))
        low, high = got[head]
        assert (low <= keys).all() and (keys <= high).all()


@examples
@given(
    heads=st.sampled_from([(1, 1), (9, 3), (12, 2), (8, 8), (71, 1)]),
    dim=st.sampled_from(DIMS),
    dtype=st.sampled_from(FORMATS),
    rows=st.integers(1, 3),
    seed=st.integers(0, 2**20),
)
def test_scores_equal_the_reference(
    heads: tuple[int, int], dim: int, dtype: str, rows: int, seed: int, isa: str
) -> None:
    rng = np.random.default_rng(seed)
    q = ref.encode(rng.normal(size=(rows, heads[0], dim)), dtype)
    bounds = np.sort(rng.normal(size=(7, heads[1], 2, dim)), axis=2).astype(np.float32)
    bounds[3] = [[[np.inf] * dim, [-np.inf] * dim]] * heads[1]
    got = kernels.page_score_bounds(q, bounds)
    numbers = ref.decode(q, dtype)
    want = ref.page_score_bounds(numbers, bounds.astype(np.float64), dim**-0.5)
    assert np.array_equal(np.isneginf(got), np.isneginf(want))
    assert np.isneginf(got[:, :, 3]).all() and np.isfinite(np.delete(got, 3, axis=2)).all()
    grouped = slack(numbers, bounds, dim**-0.5).reshape(rows, heads[1], -1, 7).max(axis=2)
    live = np.isfinite(want)
    assert (np.abs(got[live] - want[live]) <= grouped[live] + 1e-30).all()
    for row in range(rows):  # a row's bits are its own, and its pages' order does not matter
        alone = kernels.page_score_bounds(q[row : row + 1], bounds[::-1].copy())
        assert np.array_equal(alone[0, :, ::-1], got[row])


@pytest.mark.parametrize("fmt", ["bf16", *CODES])
@pytest.mark.parametrize("group", [1, 3, 4])
@pytest.mark.parametrize("page", PAGES)
def test_no_key_of_a_page_scores_more(page: int, group: int, fmt: str, isa: str) -> None:
    """q . k of the keys that attention reads, for every query head of the group."""
    for dim in DIMS:
        k = keys_like((3, page, 2, dim), page + dim)
        pool, pages = stored(k, [fmt, fmt])
        rng = np.random.default_rng(dim)
        q = ref.encode(rng.normal(size=(4, 2 * group, dim)), "f32")
        bounds = kernels.page_bounds(pool, 0, pages, [page] * 3)
        got = kernels.page_score_bounds(q, bounds, scale=0.3)
        off = slack(q.astype(np.float64), bounds, 0.3)
        for i in range(3):
            for q_head in range(2 * group):
                keys = decoded(k[i, :, q_head // group], fmt)
                scores = 0.3 * (q[:, q_head].astype(np.float64) @ keys.T).max(axis=1)
                assert (got[:, q_head // group, i] + off[:, q_head, i] >= scores).all()


def test_the_bound_is_reached_by_a_page_of_one_token(isa: str) -> None:
    """Least and largest are the key itself: the bound is its score, not above."""
    batch = Batch(Shape(6, 2, num_layers=1), [Sequence(3, 1, 1)])
    bounds = kernels.page_bounds(batch.pool, 0, batch.block_table[0], tokens_of(batch)[0])
    q = ref.decode(batch.q(0, "f32"), "f32")
    got = kernels.page_score_bounds(q.astype(np.float32), bounds, scale=batch.shape.scale)
    k, _ = ref.gather(batch.arena, batch.geometry, 0, batch.block_table[0], 1)
    scores = batch.shape.scale * np.einsum("rhgd,hd->rhg", q.reshape(1, 2, 3, 64), k[0])
    np.testing.assert_allclose(got[:, :, 0], scores.max(axis=2), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fmt", ["bf16", *CODES])
def test_the_page_of_a_needle_is_selected(fmt: str, isa: str) -> None:
    """One token of 32 pages that answers one query head: its page is among the best two."""
    page, dim, heads, group, num_pages = 64, 128, 2, 4, 32
    rng = np.random.default_rng(7)
    q = rng.normal(size=(1, heads * group, dim)).astype(np.float32)
    k = rng.normal(size=(num_pages, page, heads, dim))
    needles = {0: (5, 2), 1: (30, 7)}  # KV head -> (page, query head)
    for head, (at, q_head) in needles.items():
        k[at, rng.integers(page), head] = 3 * q[0, q_head]
    pool, pages = stored(ref.to_bf16(k), [fmt] * heads)
    scores = kernels.page_score_bounds(q, kernels.page_bounds(pool, 0, pages, [page] * num_pages))
    for head, (at, _) in needles.items():
        assert at in np.argsort(scores[0, head])[-2:]


@pytest.fixture
def batch() -> Batch:
    return Batch(Shape(4, 2, 32, 16, 16, num_layers=2), [Sequence(1, 40, 0)])


@pytest.mark.parametrize(
    ("layer", "page_ids", "tokens", "message"),
    [
        (2, [0], [1], r"layer=2 is out of range: allowed 0 to 1"),
        (-1, [0], [1], r"layer=-1"),
        (0, [0, 10**6], [1, 1], r"page_ids\[1\]=1000000 is out of range: allowed 0 to"),
        (0, [-1], [1], r"page_ids\[0\]=-1"),
        (0, [0], [17], r"valid_tokens\[0\]=17 is out of range: allowed 0 to 16"),
        (0, [0], [-1], r"valid_tokens\[0\]=-1"),
        (0, [0, 1], [1], r"valid_tokens has 1 entries: expected one for each of 2 pages"),
        (0, np.array([0]), [1], "page_ids has dtype int64: expected int32"),
        (0, [[0]], [1], "page_ids has 2 dimensions: expected 1"),
        (0, [0], np.array([1.0]), "valid_tokens has dtype float64: expected int32"),
    ],
)
def test_bad_pages_are_refused(
    batch: Batch, layer: int, page_ids: object, tokens: object, message: str
) -> None:
    with pytest.raises(InvalidArgument, match=message):
        kernels.page_bounds(batch.pool, layer, page_ids, tokens)


def test_bad_outputs_and_scores_are_refused(batch: Batch) -> None:
    for wrong in (
        np.empty((1, 2, 2, 16), np.float32),
        np.empty((1, 2, 2, 32)),
        np.empty((1, 2, 2, 64), np.float32)[..., ::2],
    ):
        with pytest.raises(InvalidArgument, match="out is"):
            kernels.page_bounds(batch.pool, 0, [0], [1], wrong)
    bounds = kernels.page_bounds(batch.pool, 0, [0, 1], [16, 16])
    q = torch.zeros(1, 4, 32)
    cases = [
        (q[0], bounds, {}, r"q has shape \[4, 32\]: expected \[rows, num_q_heads, 32\]"),
        (q[:, :3], bounds, {}, "num_q_heads=3 must be a multiple of num_kv_heads=2"),
        (q[:, :0], bounds, {}, "num_q_heads=0 is out of range"),
        (q.double(), bounds, {}, "q has dtype float64"),
        (torch.zeros(1, 4, 16), bounds, {}, r"q has shape \[1, 4, 16\]: expected \[1, 4, 32\]"),
        (q, bounds[0], {}, r"bounds has shape \[2, 2, 32\]: expected \[pages, num_kv_heads"),
        (q, bounds[:, :, :1], {}, "bounds has shape"),
        (q, bounds.astype(np.float64), {}, "bounds is float64"),
        (torch.zeros(1, 4, 24), bounds[..., :24].copy(), {}, "head_dim=24.*multiples of 16"),
        (q, bounds, {"scale": 0.0}, "scale=0 is out of range: allowed finite numbers above 0"),
        (q, bounds, {"scale": float("nan")}, "scale=nan"),
        (q, bounds, {"out": np.empty((1, 2, 3), np.float32)}, "out is float32"),
    ]
    for rows, wrong, options, message in cases:
        with pytest.raises(InvalidArgument, match=message):
            kernels.page_score_bounds(rows, wrong, **options)


def test_nothing_asked_for() -> None:
    batch = Batch(Shape(4, 2, 32, 16, 16, num_layers=1), [Sequence(1, 40, 0)])
    bounds = kernels.page_bounds(batch.pool, 0, [], [])
    assert bounds.shape == (0, 2, 2, 32)
    assert kernels.page_score_bounds(torch.zeros(2, 4, 32), bounds).shape == (2, 2, 0)
