"""Attention and appends straight on the KV tensors of another engine."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kvcore import kernels
from kvcore import reference as ref
from kvcore.errors import InvalidArgument, Unsupported
from kvcore.pages import PageSpec, Pool

DTYPE = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
BLOCKS, LAYERS = 24, 2


def make_caches(kind: str, order: str, block: int, heads: int, dims: tuple[int, int], fmt: str):
    """Per layer a tensor or a pair, filled with numbers, and K and V of it as [blocks, P, H, D]."""
    generator = torch.Generator().manual_seed(5)
    caches: list[Any] = []
    views = []
    for _ in range(LAYERS):
        shape = [block, heads] if order == "NHD" else [heads, block]
        if kind == "fused":
            both = torch.randn(BLOCKS, 2, *shape, dims[0], generator=generator).to(DTYPE[fmt])
            caches.append(both)
            k, v = both[:, 0], both[:, 1]
        else:
            k, v = (
                torch.randn(BLOCKS, *shape, d, generator=generator).to(DTYPE[fmt]) for d in dims
            )
            caches.append((k, v))
        views.append((k, v) if order == "NHD" else (k.transpose(1, 2), v.transpose(1, 2)))
    return caches, views


@given(
    kind=st.sampled_from(["fused", "split"]),
    order=st.sampled_from(["NHD", "HND"]),
    block=st.sampled_from([16, 32, 64, 128]),
    heads=st.sampled_from([(4, 4), (6, 2), (5, 1)]),
    dim=st.sampled_from([64, 96, 128]),
    fmt=st.sampled_from(["bf16", "f16", "f32"]),
    lengths=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 150)), min_size=1, max_size=3),
    isa=st.sampled_from(kernels.available_isas()),
)
def test_equals_the_same_tokens_in_pages_of_our_own(
    kind: str,
    order: str,
    block: int,
    heads: tuple[int, int],
    dim: int,
    fmt: str,
    lengths: list[tuple[int, int]],
    isa: str,
) -> None:
    q_heads, kv_heads = heads
    caches, views = make_caches(kind, order, block, kv_heads, (dim, dim), fmt)
    theirs = kernels.TensorPages(caches, order)
    assert theirs.spec == kernels.TensorSpec(LAYERS, kv_heads, dim, dim, block, fmt)
    pool = Pool(
        PageSpec(LAYERS, kv_heads, dim, page_size=block, extent_pages=1, format=fmt), BLOCKS
    )
    ours = pool.alloc(BLOCKS)
    contexts = np.array([q + c for q, c in lengths], np.int32)
    starts = np.concatenate([[0], np.cumsum([q for q, _ in lengths])]).astype(np.int32)
    needed = [-(-int(c) // block) for c in contexts]
    if sum(needed) > BLOCKS:
        return
    blocks = np.random.default_rng(1).permutation(BLOCKS).astype(np.int32)
    table = np.full((len(lengths), max(needed)), -1, np.int32)
    for row, (first, last) in zip(table, pairwise(np.cumsum([0, *needed])), strict=True):
        row[: last - first] = blocks[first:last]
    total = int(starts[-1])
    for layer, (k, v) in enumerate(views):
        for page in ours:
            kernels.pack_slice(pool, page, layer, k[page].contiguous(), v[page].contiguous())
    q = torch.randn(total, q_heads, dim).to(DTYPE[fmt])
    new_k, new_v = (torch.randn(total, kv_heads, dim).to(DTYPE[fmt]) for _ in range(2))
    outs = []
    before = kernels.isa()
    kernels.set_isa(isa)
    try:
        for pages in (theirs, pool):
            plan = kernels.AttentionPlan(pages, q_heads)
            plan.prepare(starts, contexts, table)
            out, lse = torch.empty_like(q), torch.empty(total, q_heads)
            plan.run(1, q, new_k, new_v, out, lse)
            outs.append((out, lse))
    finally:
        kernels.set_isa(before)
    assert torch.equal(outs[0][0], outs[1][0])
    assert torch.equal(outs[0][1], outs[1][1])
    for row, (q_len, _), first in zip(table, lengths, starts[:-1], strict=True):
        for i in range(q_len):  # the appended tokens stand in the tensors
            place = int(contexts[list(starts).index(first)]) - q_len + i
            k, v = views[1][0], views[1][1]
            at = (int(row[place // block]), place % block)
            assert torch.equal(k[at], new_k[first + i])
            assert torch.equal(v[at], new_v[first + i])


def test_equals_the_reference() -> None:
    caches, _ = make_caches("fused", "NHD", 16, 2, (64, 64), "f32")
    pages = kernels.TensorPages(caches)
    plan = kernels.AttentionPlan(pages, 4)
    blocks = np.array([[7, 3, 11, 0]], np.int32)
    plan.prepare(np.array([0, 1], np.int32), np.array([55], np.int32), blocks)
    q = torch.randn(1, 4, 64)
    out = torch.empty_like(q)
    plan.attend(0, q, out)
    k, v = ref.gather_from_blocks(caches[0].numpy(), "f32", blocks[0], 55)
    want = ref.attention(q.numpy(), k, v, np.array([54]), 64**-0.5)
    np.testing.assert_allclose(out.numpy(), want.out, rtol=2e-5, atol=2e-6)


def test_two_dims_of_one_block_distance_and_strided_views() -> None:
    wide = torch.randn(8, 16, 2, 160)
    k, v = wide[..., :96], wide[..., 96:]  # dims 96 and 64 inside one tensor
    pages = kernels.TensorPages([(k, v)])
    plan = kernels.AttentionPlan(pages, 2)
    table = np.array([[5, 2]], np.int32)
    plan.prepare(np.array([0, 1], np.int32), np.array([20], np.int32), table)
    q, out = torch.randn(1, 2, 96), torch.empty(1, 2, 64)
    plan.attend(0, q, out)
    rows = [torch.cat([part[5], part[2]])[:20].double().numpy() for part in (k, v)]
    want = ref.attention(q.numpy(), *rows, np.array([19]), float(np.float32(96**-0.5)))
    np.testing.assert_allclose(out.numpy(), want.out, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("caches", "order", "words"),
    [
        ([], "NHD", "caches is empty"),
        ([np.zeros((4, 2, 16, 2, 64), np.float32)], "NDH", "order='NDH'"),
        ([np.zeros((4, 3, 16, 2, 64), np.float32)], "NHD", r"caches\[0\] has shape"),
        ([np.zeros((4, 2, 16, 64), np.float32)], "NHD", r"caches\[0\] has shape"),
        ([np.zeros((4, 2, 16, 2, 64), np.int8)], "NHD", "dtype int8"),
        ([np.zeros((4, 2, 16, 2, 128), np.float32)[..., ::2]], "NHD", "last contiguous"),
        ([(np.zeros((4, 16, 2, 64), np.float32),)], "NHD", "has 1 entries"),
        ([np.zeros((0, 2, 16, 2, 64), np.float32)], "NHD", "none empty"),
        (
            [np.zeros((4, 2, 16, 2, 64), np.float32), np.zeros((5, 2, 16, 2, 64), np.float32)],
            "NHD",
            r"caches\[1\] k is",
        ),
        (
            [(np.zeros((4, 16, 2, 64), np.float32), np.zeros((4, 16, 3, 64), np.float32))],
            "NHD",
            "all but head_dim equal",
        ),
    ],
)
def test_refusals(caches: list[Any], order: str, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        kernels.TensorPages(caches, order)


def test_parts_at_different_distances_are_refused() -> None:
    k, v = np.zeros((4, 16, 2, 64), np.float32), np.zeros((4, 16, 2, 96), np.float32)
    with pytest.raises(Unsupported, match="block strides"):
        kernels.TensorPages([(k, v)])
    odd = np.zeros((4, 2, 24, 2, 64), np.float32)
    with pytest.raises(InvalidArgument, match="page_size=24"):
        kernels.AttentionPlan(kernels.TensorPages([odd]), 2)


def test_read_only_pages_are_attended_to_but_never_appended_to() -> None:
    rng = np.random.default_rng(3)
    cache = rng.standard_normal((4, 2, 16, 2, 64), np.float32)
    frozen = cache.copy()
    frozen.flags.writeable = False
    with pytest.raises(InvalidArgument, match="read-only"):
        kernels.TensorPages([frozen])
    q = rng.standard_normal((1, 4, 64), np.float32)
    outs = []
    for pages in (kernels.TensorPages([cache]), kernels.TensorPages([frozen], writable=False)):
        plan = kernels.AttentionPlan(pages, 4)
        plan.prepare([0, 1], [40], [[2, 0, 3]])
        out = np.empty((1, 4, 64), np.float32)
        plan.attend(0, q, out)
        outs.append(out)
    assert np.array_equal(*outs)
    row = np.ones((1, 2, 64), np.float32)
    with pytest.raises(InvalidArgument, match="writable=False"):
        plan.append(0, row, row)
    assert np.array_equal(frozen, cache)
