"""Head pages: what is in them, what attention over them gives, what they cost, what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kvcore import kernels
from kvcore._core.base import FaultPlan
from kvcore.compress import seal_pages
from kvcore.errors import InvalidArgument, OutOfPages
from kvcore.head_pages import HeadAttention, HeadPages, compact, head_classes, head_pool
from kvcore.pages import PageClass, PageSpec, Pool
from support.batches import bits_of, to_torch
from support.bounds import excess
from support.head_pages import Pruned, Source, ragged, stored, tensors

LAYERS, HEADS, GROUP = 2, 3, 3
SPEC = PageSpec(LAYERS, HEADS, 64)


def ragged_heads(
    seed: int, tokens: int, mean: float, shape: tuple[int, int] = (LAYERS, HEADS)
) -> list[list[list[int]]]:
    flat = ragged(np.random.default_rng(seed), shape[0] * shape[1], tokens, mean)
    return [flat[i * shape[1] : (i + 1) * shape[1]] for i in range(shape[0])]


def rows_of(pool: Pool, heads: HeadPages, layer: int, head: int) -> tuple[np.ndarray, np.ndarray]:
    """K and V that the pages of one head hold, [tokens, head_dim]."""
    pages, count = heads.pages(layer, head), heads.num_tokens[layer, head]
    parts = [pool.read_slice(page, 0) for page in pages]
    if not parts:
        return np.empty((0, 0)), np.empty((0, 0))
    k, v = (np.concatenate([p[i][:, 0] for p in parts])[:count] for i in (0, 1))
    return k, v


@pytest.mark.parametrize("fmt", ["bf16", "f16", "f32"])
@pytest.mark.parametrize(
    ("layout", "dim_k", "dim_v", "page", "head_page"),
    [("packed", 64, 64, 64, 64), ("packed", 80, 48, 16, 32), ("canonical", 64, 96, 128, 16)],
)
def test_kept_tokens_lie_closed_up_in_order(
    fmt: str, layout: str, dim_k: int, dim_v: int, page: int, head_page: int
) -> None:
    source = Source(PageSpec(LAYERS, HEADS, dim_k, dim_v, page, 2, fmt, layout), 300)
    kept = ragged_heads(1, 300, 0.4)
    kept[0][1], kept[1][0], kept[1][2] = [], list(range(300)), [299]
    pool = head_pool(source.spec, 200, head_page, huge_pages=False)
    pruned = Pruned.of(source, kept, pool)
    before = [source.pool.read_slice(page, 0)[0].tobytes() for page in source.pages]
    for layer in range(LAYERS):
        for head in range(HEADS):
            k, v = rows_of(pool, pruned.heads, layer, head)
            assert k.tobytes() == pruned.k[layer][head].tobytes()
            assert v.tobytes() == pruned.v[layer][head].tobytes()
            count = len(kept[layer][head])
            assert pruned.heads.num_tokens[layer, head] == count
            assert len(pruned.heads.pages(layer, head)) == -(-count // head_page)
    assert before == [source.pool.read_slice(page, 0)[0].tobytes() for page in source.pages]
    mask = np.zeros((LAYERS, HEADS, 300), bool)
    for layer in range(LAYERS):
        for head in range(HEADS):
            mask[layer, head, kept[layer][head]] = True
    again = compact(source.pool, source.pages, 300, mask, pool)
    assert (again.num_tokens == pruned.heads.num_tokens).all()
    assert rows_of(pool, again, 0, 2)[0].tobytes() == pruned.k[0][2].tobytes()
    assert pool.stats().open_bytes == pool.spec.page_bytes * (
        pruned.heads.num_pages + again.num_pages
    )
    del again
    pruned.heads.release()
    pruned.heads.release()
    assert pool.stats().used_bytes == 0 and pruned.heads.released


def test_compressed_pages_give_the_numbers_they_stand_for(isa: str) -> None:
    source = Source(SPEC, 256)
    table = PageClass(SPEC, [[("k4", "v4"), ("int8", "v3"), ("bf16", "fp8")]] * LAYERS)
    wanted = [[], []]
    seal_pages(source.pool, source.pages[1:3], source.pool.add_class(table))
    for layer in range(LAYERS):
        k, v = np.empty((256, HEADS, 64), np.uint16), np.empty((256, HEADS, 64), np.uint16)
        for i, page in enumerate(source.pages):
            part = slice(64 * i, 64 * (i + 1))
            kernels.unpack_slice(source.pool, page, layer, k[part], v[part])
        wanted[layer] = [k, v]
    kept = ragged_heads(2, 256, 0.5)
    pool = head_pool(SPEC, 60, huge_pages=False)
    heads = compact(source.pool, source.pages, 256, kept, pool)
    for layer in range(LAYERS):
        for head in range(HEADS):
            got = rows_of(pool, heads, layer, head)
            for rows, want in zip(got, wanted[layer], strict=True):
                assert np.array_equal(rows, want[kept[layer][head], head])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ([5, 5], r"position 5 \(entry 1\) of head 4 .* allowed 6 to 99"),
        ([5, 4], r"position 4 \(entry 1\) of head 4"),
        ([100], r"position 100 \(entry 0\) of head 4 .* allowed 0 to 99"),
        ([-1], r"position -1 \(entry 0\) of head 4"),
        ([2**40], r"head 4"),
        ([[1]], "expected integers in one dimension"),
        ([1.5], "expected integers in one dimension"),
    ],
)
def test_wrong_positions_are_refused_by_name(wrong: list, message: str) -> None:
    source, pool = Source(SPEC, 100), head_pool(SPEC, 30, huge_pages=False)
    kept: list = [[[0, 1]] * HEADS, [[0], wrong, [1]]]
    with pytest.raises(InvalidArgument, match=message):
        compact(source.pool, source.pages, 100, kept, pool)
    assert pool.stats().used_bytes == 0


def test_what_does_not_fit_is_refused_and_takes_nothing() -> None:
    source, pool = Source(SPEC, 100), head_pool(SPEC, 11, huge_pages=False)
    every = [[range(100)] * HEADS] * LAYERS  # 12 pages
    with pytest.raises(OutOfPages):
        compact(source.pool, source.pages, 100, every, pool)
    assert pool.stats().used_bytes == 0
    for kept, message in (
        (every[:1], "2 layers of 3 heads"),
        (np.zeros((LAYERS, HEADS, 99), bool), "kept has shape"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            compact(source.pool, source.pages, 100, kept, pool)
    few = [[[3]] * HEADS] * LAYERS
    for pages, tokens, message in (
        (source.pages, 129, "num_tokens=129"),
        (source.pages[:1], 65, "allowed 0 to 64"),
        ([99], 10, "page=99"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            compact(source.pool, pages, tokens, few, pool)
    with pytest.raises(InvalidArgument, match="head pages have num_layers=1"):
        compact(source.pool, source.pages, 100, few, source.pool)
    with pytest.raises(InvalidArgument, match="allowed head_dims and format of"):
        other = head_pool(PageSpec(1, 1, 80), 4, huge_pages=False)
        compact(source.pool, source.pages, 100, few, other)
    source.pool.decref(source.pages)
    with pytest.raises(InvalidArgument, match="has no owner"):
        compact(source.pool, source.pages, 100, few, pool)
    heads = HeadPages(pool, LAYERS, HEADS)
    heads.grow(64)
    for wrong in (-1, 2**30):
        with pytest.raises(InvalidArgument, match="of head 0 is out of range"):
            heads.grow(wrong)
    with pytest.raises(OutOfPages):
        heads.grow(1)
    assert (heads.num_tokens == 64).all() and pool.stats().held_pages == 6
    with pytest.raises(InvalidArgument, match="class_numbers has 1 entries: allowed 6"):
        heads.seal([0])
    heads.release()
    with pytest.raises(InvalidArgument, match="released"):
        heads.grow(1)
    attention = HeadAttention(pool, LAYERS, HEADS, HEADS)
    with pytest.raises(InvalidArgument, match="sequence 0 was released"):
        attention.prepare([heads])
    with pytest.raises(InvalidArgument, match="allowed 2 of 3"):
        attention.prepare([HeadPages(pool, 1, HEADS)])
    with pytest.raises(InvalidArgument, match="num_q_heads=4"):
        HeadAttention(pool, LAYERS, HEADS, 4)


def test_keeping_everything_changes_no_bit(isa: str) -> None:
    source, pool = Source(SPEC, 1100), head_pool(SPEC, 36 * 6, 32, huge_pages=False)
    heads = compact(source.pool, source.pages, 1100, [[range(1100)] * HEADS] * LAYERS, pool)
    rows = 5
    wide = to_torch(stored(np.random.default_rng(3), "bf16", rows, 12, 64), "bf16")
    q = wide[:, : HEADS * GROUP]  # tokens lie further apart than their heads
    want, got = (torch.full((rows, HEADS * GROUP, 64), 7.0).bfloat16() for _ in range(2))
    want_lse, got_lse = torch.empty(rows, HEADS * GROUP), torch.empty(rows, HEADS * GROUP)
    plain = kernels.AttentionPlan(source.pool, HEADS * GROUP)
    plain.prepare([0, rows], [1100], np.array([source.pages], np.int32))
    for threads in (None, kernels.ThreadPool(2)):
        attention = HeadAttention(pool, LAYERS, HEADS, HEADS * GROUP, threads=threads)
        attention.prepare([heads], [0, rows])
        for layer in (1, 0):
            plain.attend(layer, q, want, want_lse)
            attention.attend(layer, q, got, got_lse)
            assert np.array_equal(bits_of(got), bits_of(want))
            assert torch.equal(got_lse, want_lse)


def append_and_attend(
    attention: HeadAttention, batch: list[Pruned], lengths: list[int], rng: np.random.Generator
) -> dict[int, tuple[np.ndarray, torch.Tensor, torch.Tensor]]:
    """One step over all layers; per layer q, out and lse. The batch's rows grow with it."""
    total, results = sum(lengths), {}
    attention.prepare([p.heads for p in batch], np.cumsum([0, *lengths]).tolist())
    for layer in range(attention.num_layers):
        heads = attention.num_kv_heads
        k, v = (stored(rng, "bf16", total, heads, 64) for _ in range(2))
        q = stored(rng, "bf16", total, attention.num_q_heads, 64)
        first = 0
        for pruned, n in zip(batch, lengths, strict=True):
            pruned.add(layer, k[first : first + n], v[first : first + n])
            first += n
        q_t, k_t, v_t = tensors("bf16", q, k, v)
        out, lse = torch.full_like(q_t, float("nan")), torch.empty(q.shape[:2])
        attention.run(layer, q_t, k_t, v_t, out, lse)
        results[layer] = (q, out, lse)
    return results


def check(batch: list[Pruned], lengths: list[int], results: dict) -> None:
    for layer, (q, out, lse) in results.items():
        first = 0
        for pruned, n in zip(batch, lengths, strict=True):
            rows = slice(first, first + n)
            used = excess(
                out[rows], lse[rows], pruned.expected(layer, q[rows], "bf16", "bf16"),
                fmt="bf16", dtype="bf16", head_dim=64, tokens=int(pruned.heads.num_tokens.max()),
            )  # fmt: skip
            assert max(used.values()) <= 1, used
            first += n


@pytest.mark.parametrize("head_page", [16, 64])
def test_attention_is_that_over_the_kept_tokens(head_page: int, isa: str) -> None:
    rng = np.random.default_rng(4)
    pool = head_pool(SPEC, 1200, head_page, huge_pages=False)
    batch = []
    for seed, tokens in ((1, 3000), (2, 70), (3, 500)):
        kept = ragged_heads(seed, tokens, 0.5)
        kept[seed % 2][1] = []
        batch.append(Pruned.of(Source(SPEC, tokens, seed), kept, pool))
    attention = HeadAttention(pool, LAYERS, HEADS, HEADS * GROUP, threads=kernels.ThreadPool(2))
    for lengths in ([1, 1, 1], [7, 1, 40], [0, 2, 1]):
        for pruned, n in zip(batch, lengths, strict=True):
            pruned.heads.grow(n)
        check(batch, lengths, append_and_attend(attention, batch, lengths, rng))


def test_a_chunk_gives_the_bits_of_single_tokens(isa: str) -> None:
    rng = np.random.default_rng(5)
    source, pool = Source(SPEC, 400), head_pool(SPEC, 100, huge_pages=False)
    kept = ragged_heads(5, 400, 0.3)
    one, many = (compact(source.pool, source.pages, 400, kept, pool) for _ in range(2))
    q, k, v = tensors("bf16", *(stored(rng, "bf16", 70, n, 64) for n in (9, 3, 3)))
    attention = HeadAttention(pool, LAYERS, HEADS, HEADS * GROUP)
    many.grow(70)
    whole, single = torch.empty_like(q), torch.empty_like(q)
    attention.prepare([many], [0, 70])
    attention.run(1, q, k, v, whole)
    for i in range(70):
        one.grow(1)
        attention.prepare([one])
        attention.run(1, q[i : i + 1], k[i : i + 1], v[i : i + 1], single[i : i + 1])
    assert np.array_equal(bits_of(whole), bits_of(single))


@pytest.mark.parametrize("formats", [None, ("k4", "v4")])
def test_two_hundred_steps_and_everything_comes_back(
    formats: tuple[str, str] | None, isa: str
) -> None:
    rng = np.random.default_rng(6)
    pool = head_pool(SPEC, 160, page_ids=400, huge_pages=False)
    kept = ragged_heads(6, 400, 0.4)
    kept[0][0] = []
    pruned = Pruned.of(Source(SPEC, 400), kept, pool)
    attention = HeadAttention(pool, LAYERS, HEADS, HEADS * GROUP)
    table = PageClass(SPEC, [[formats or ("bf16", "bf16")] * HEADS] * LAYERS)
    classes, sealed = head_classes(pool, table), 0
    for step in range(200):
        sealed += pruned.heads.seal(classes)
        pruned.heads.grow(1)
        results = append_and_attend(attention, [pruned], [1], rng)
        if step % 40 != 39:
            continue
        if formats is None:
            check([pruned], [1], results)
            continue
        for layer, (q, out, lse) in results.items():
            want = pruned.expected(layer, q, "bf16", "bf16", formats)
            assert np.abs(out.double().numpy() - want.out).max() < 6e-2
            assert np.abs(lse.double().numpy() - want.lse).max() < 8e-2
    counts = pruned.heads.num_tokens
    assert (counts == [[len(p) + 200 for p in layer] for layer in kept]).all()
    seen = counts - 1  # the last seal() came before the last token
    expected_sealed = int(np.maximum(seen // 64 - 1, 0).sum()) if formats else 0
    assert sealed == expected_sealed and pool.class_pages()[1:] == ([sealed] if formats else [])
    pruned.heads.release()
    stats = pool.stats()
    assert stats.used_bytes == 0 and stats.held_pages == 0 and stats.free_frames == 160


def test_sealing_goes_on_where_it_can() -> None:
    pool = head_pool(SPEC, 14, page_ids=60, huge_pages=False)
    source = Source(SPEC, 192)
    bad = source.pages[1]
    k, v = source.pool.read_slice(bad, 0)
    k[3, 1] = 0x7FC0  # NaN: cannot be encoded
    source.pool.write_slice(bad, 0, k, v)
    kept = [[range(192), range(192), range(64)], [[], [], range(192)]]
    heads = compact(source.pool, source.pages, 192, kept, pool)
    table = PageClass(SPEC, [[("k4", "v4"), ("k4", "v4"), ("k4", "v4")], [("bf16", "bf16")] * 3])
    classes = head_classes(pool, table)
    assert classes == [1, 1, 1, 0, 0, 0]
    plan = FaultPlan(1)
    pool.set_faults(plan)
    plan.fail_nth("pool.seal", 2)
    assert heads.seal(classes) == 1
    plan.clear()
    assert heads.seal(classes) == 2  # and the page with the NaN stays open
    assert heads.seal(classes) == 0
    numbers = [[pool.class_of(p) for p in heads.pages(0, h)] for h in range(3)]
    assert numbers == [[0, 1, 1], [0, 0, 1], [0]]
    with pytest.raises(InvalidArgument, match="class_number"):
        heads.seal([9] * 6)


@pytest.mark.parametrize(("layers", "heads", "dim"), [(6, 3, 64), (2, 8, 128)])
def test_a_ragged_quarter_takes_a_quarter_of_the_bytes(layers: int, heads: int, dim: int) -> None:
    """The 27 % of the design; layers are alike, so a few of them stand for all."""
    spec, tokens = PageSpec(layers, heads, dim), 8192
    source = Pool(spec, tokens // spec.page_size // spec.extent_pages, huge_pages=False)
    pages = source.alloc(tokens // spec.page_size)
    kept = ragged_heads(7, tokens, 0.25, (layers, heads))
    counts = np.array([len(p) for layer in kept for p in layer])
    assert abs(counts.mean() / tokens - 0.25) < 1e-3 and counts.max() > 4 * counts.min()
    room = 60 * layers * heads
    pool = head_pool(spec, room, page_ids=4 * room, huge_pages=False)
    pruned = compact(source, pages, tokens, kept, pool)
    ratio = pool.stats().used_bytes / source.stats().used_bytes
    assert 0.25 < ratio < 0.26
    assert pool.stats().used_bytes == pruned.num_pages * (64 * dim * 4 + 64)
    pruned.seal(head_classes(pool, PageClass(spec, [[("k4", "v4")] * heads] * layers)))
    assert pool.stats().used_bytes < 0.085 * source.stats().used_bytes
    # Codes of a head lie in order but for a few jumps; what the open pages left is nearly whole.
    jumps = 0
    for layer in range(layers):
        full = pruned.num_tokens[layer] // 64
        for head in range(heads):
            sealed = pruned.pages(layer, head)[1 : full[head]]
            addresses = [pool.slice_address(page, 0) for page in sealed]
            size = pool.page_class(1).page_bytes
            jumps += int((np.diff(addresses) != size).sum())
    assert jumps < 0.1 * pruned.num_pages
    assert pool.free_pages() > 0.95 * pool.stats().free_bytes / pool.spec.page_bytes
