"""O21 (vllm#1486), O22 (flashinfer#3130), O23 (vllm-xpu-kernels#445), O101 (aiter#2608).

Block numbers times strides overflowed 32 bits, and a guard against it aborted. Here blocks lie
gigabytes apart in a range of addresses of which only these blocks exist: any other touch crashes.
"""

from __future__ import annotations

import numpy as np
import pytest
from kvcore import kernels
from kvcore.errors import InvalidArgument
from kvcore.pages import PageSpec, Pool
from virtual_memory import reserved

BLOCK, HEADS, DIM = 16, 2, 64


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """One query token [heads, dim] over k, v [tokens, heads, dim], in float64."""
    scores = np.einsum("hd,thd->ht", q, k, dtype=np.float64) / np.sqrt(q.shape[1])
    weights = np.exp(scores - scores.max(1, keepdims=True))
    return np.einsum("ht,thd->hd", weights / weights.sum(1, keepdims=True), v)


def check_blocks(pages: kernels.TensorPages, blocks: list[int]) -> None:
    """Writes and attends over ``blocks`` by every way in, one sequence in that order."""
    heads, dk, dv = pages.spec.num_kv_heads, pages.spec.head_dim_k, pages.spec.head_dim_v
    tokens = len(blocks) * BLOCK
    rng = np.random.default_rng(1)
    k = rng.standard_normal((tokens, heads, dk)).astype(np.float32)
    v = k[:, :, :dv] if dk != dv else rng.standard_normal((tokens, heads, dv)).astype(np.float32)
    q = rng.standard_normal((1, heads, dk)).astype(np.float32)
    out = np.empty((1, heads, dv), np.float32)
    plan = kernels.AttentionPlan(pages, heads)
    half = tokens - BLOCK
    slots = np.array([b * BLOCK + i for b in blocks[:-1] for i in range(BLOCK)], np.int64)
    kernels.append_kv(pages, 0, k[:half], v[:half], slots)
    plan.prepare([0, BLOCK], [tokens], [blocks])
    plan.append(0, k[half:], v[half:])
    back_k, back_v = np.empty_like(k[:BLOCK]), np.empty_like(v[:BLOCK])
    for i, block in enumerate(blocks):
        kernels.unpack_slice(pages, block, 0, back_k, back_v)
        part = slice(i * BLOCK, (i + 1) * BLOCK)
        assert np.array_equal(back_k, k[part]) and np.array_equal(back_v, v[part]), block
    plan.prepare([0, 1], [tokens], [blocks])
    plan.attend(0, q, out)
    np.testing.assert_allclose(out[0], attention(q[0], k, v), atol=2e-6)


def test_o021_the_last_of_64k_blocks(isa: str) -> None:
    row, count = HEADS * DIM * 4, 1 << 16
    stride = 2 * BLOCK * row * 8  # as the report's: eight layers beside each other
    with reserved(count * stride) as space:
        blocks = [0, count // 2 - 1, count // 2, count - 1]
        for block in blocks:
            space.open(block * stride, 2 * BLOCK * row)
        shape = (count, 2, BLOCK, HEADS, DIM)
        cache = space.array(shape, (stride, BLOCK * row, row, DIM * 4, 4))
        assert space.bytes >= 1 << 33
        check_blocks(kernels.TensorPages([cache]), blocks)


def test_o022_a_latent_page_far_away(isa: str) -> None:
    """K of 576 dims whose first 512 are V: one latent head, page number 300,000."""
    stride, block = 16384 * 4, 300_000
    with reserved((block + 1) * stride) as space:
        for number in (1, block - 1, block):
            space.open(number * stride, BLOCK * 576 * 4)
        strides = (stride, 576 * 4, 576 * 4, 4)
        k = space.array((block + 1, BLOCK, 1, 576), strides)
        v = space.array((block + 1, BLOCK, 1, 512), strides)
        assert space.bytes > 1 << 34
        check_blocks(kernels.TensorPages([(k, v)]), [1, block - 1, block])


@pytest.mark.parametrize("block", [2065, 2066, 2067, 4131])
def test_o023_layers_beside_each_other(block: int, isa: str) -> None:
    stride, row = 1_039_680 * 4, HEADS * DIM * 4
    with reserved((block + 1) * stride) as space:
        layers = []
        for layer in range(2):
            offset = layer * 2 * BLOCK * row
            for number in (0, block):
                space.open(number * stride + offset, 2 * BLOCK * row)
            shape = (block + 1, 2, BLOCK, HEADS, DIM)
            layers.append(space.array(shape, (stride, BLOCK * row, row, DIM * 4, 4), offset))
        check_blocks(kernels.TensorPages(layers), [0, block])


def test_o101_pages_of_one_token_are_refused_not_aborted() -> None:
    row = 8 * 64 * 4
    with reserved(6_300_000 * row) as space:
        k = space.array((6_300_000, 1, 8, 64), (row, row, 256, 4))
        with pytest.raises(InvalidArgument, match="page_size=1 is not allowed: 16, 32, 64 or 128"):
            kernels.AttentionPlan(kernels.TensorPages([(k, k)]), 8)


def test_o021_own_pages_beyond_4_gib(isa: str) -> None:
    """The last page of a pool of 5 GiB, of which nothing else is touched."""
    spec = PageSpec(2, HEADS, DIM, page_size=64, extent_pages=16, format="f32")
    pool = Pool(spec, (5 << 30) // spec.frame_bytes, huge_pages=False)
    pages = pool.alloc(pool.num_pages)
    first, last = pages[0], max(pages)
    rng = np.random.default_rng(2)
    k, v = rng.standard_normal((2, 64, HEADS, DIM)).astype(np.float32)
    kernels.pack_slice(pool, last, 1, k, v)
    kernels.copy_pages(pool, [last], [first])
    q, out = (
        rng.standard_normal((1, HEADS, DIM)).astype(np.float32),
        np.empty((1, HEADS, DIM), "f4"),
    )
    plan = kernels.AttentionPlan(pool, HEADS)
    for page in (first, last):
        plan.prepare([0, 1], [64], [[page]])
        plan.attend(1, q, out)
        np.testing.assert_allclose(out[0], attention(q[0], k, v), atol=2e-6)
