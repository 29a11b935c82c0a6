"""Sealing: what is in a sealed page, what is refused, and what a failure leaves behind."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from kvcore import reference
from kvcore._core.base import FaultPlan, xxh3_64
from kvcore.compress import PROFILES, Sealer, profile_class, seal_pages
from kvcore.errors import InvalidArgument, OutOfPages, Unsupported
from kvcore.pages import PageClass, PageSpec, Pool, page_ids_for

LAYERS, HEADS = 2, 3
TABLE = [
    [("k4", "v4"), ("int8", "v3"), ("k4", "int8")],
    [("fp8", "fp8"), ("own", "v4"), ("k4", "own")],
]


def pool_of(spec: PageSpec, formats: list, num_frames: int) -> tuple[Pool, PageClass, int]:
    formats = [
        [tuple(f.replace("own", spec.format) for f in pair) for pair in row] for row in formats
    ]
    page_class = PageClass(spec, formats)
    pool = Pool(spec, num_frames, huge_pages=False, page_ids=page_ids_for(page_class, num_frames))
    return pool, page_class, pool.add_class(page_class)


def fill(pool: Pool, page: int, rng: np.random.Generator) -> list[tuple[np.ndarray, np.ndarray]]:
    """Stored elements of K and V per layer, as written."""
    spec, written = pool.spec, []
    for layer in range(spec.num_layers):
        k, v = (
            reference.encode(rng.normal(size=(spec.page_size, spec.num_kv_heads, dim)), spec.format)
            for dim in (spec.head_dim_k, spec.head_dim_v)
        )
        pool.write_slice(page, layer, k, v)
        written.append((k, v))
    return written


def slice_bytes(pool: Pool, page: int, layer: int) -> np.ndarray:
    size = pool.page_class(pool.class_of(page)).slice_bytes(layer)
    return np.frombuffer(ctypes.string_at(pool.slice_address(page, layer), size), np.uint8)


def wanted_slice(page_class: PageClass, layer: int, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """The bytes behind the header that the reference gives for canonical stored elements."""
    spec = page_class.spec
    out = np.zeros(page_class.slice_bytes(layer), np.uint8)
    offsets = page_class.block_offsets(layer)
    for head, pair in enumerate(page_class.formats[layer]):
        for part, fmt, at, rows in zip("kv", pair, offsets[head], (k, v), strict=True):
            rows = rows[:, head]
            if fmt == spec.format:
                pack = reference.pack_k if part == "k" else reference.pack_v
                block = pack(rows, fmt).view(np.uint8)
            else:
                block = reference.encode_block(fmt, part, reference.decode(rows, spec.format))
            out[at : at + block.size] = block
    return out[64:]


@pytest.mark.parametrize("fmt", ["bf16", "f16", "f32"])
@pytest.mark.parametrize(
    ("page_size", "dim_k", "dim_v"), [(16, 64, 64), (64, 80, 128), (128, 32, 208)]
)
def test_a_sealed_page_holds_the_blocks_of_its_rows(
    fmt: str, page_size: int, dim_k: int, dim_v: int, isa: str
) -> None:
    spec = PageSpec(LAYERS, HEADS, dim_k, dim_v, page_size, 2, fmt)
    pool, page_class, number = pool_of(spec, TABLE, num_frames=4)
    rng = np.random.default_rng(page_size)
    pages = pool.alloc(2, run_pages=1) + pool.alloc(1)[:1]
    written = {page: fill(pool, page, rng) for page in pages}
    view = pool.view_address
    seal_pages(pool, pages[1:], number)
    assert [pool.class_of(p) for p in pages] == [0, number, number]
    assert view == pool.view_address
    for page in pages[1:]:
        for layer, (k, v) in enumerate(written[page]):
            got = slice_bytes(pool, page, layer)
            assert np.array_equal(got[64:], wanted_slice(page_class, layer, k, v))
            header = got[:64].tobytes()
            assert header[:4] == b"KVC1"
            assert np.frombuffer(header[4:12], np.uint16).tolist() == [number, 0, layer, page_size]
            unsummed = header[:16] + bytes(8) + got[24:].tobytes()
            assert int.from_bytes(header[16:24], "little") == xxh3_64(unsummed)
    for layer, (k, v) in enumerate(written[pages[0]]):
        got_k, got_v = pool.read_slice(pages[0], layer)
        assert got_k.tobytes() == k.tobytes() and got_v.tobytes() == v.tobytes()
    with pytest.raises(Unsupported, match="is compressed"):
        pool.read_slice(pages[1], 0)


def test_equal_rows_give_equal_slices_whatever_lay_there_before() -> None:
    spec = PageSpec(1, HEADS, 64, page_size=64, extent_pages=1)
    pool, _, number = pool_of(spec, TABLE[:1], num_frames=4)
    seen = set()
    for _ in range(3):
        pages = pool.alloc(2, run_pages=1)
        for page in pages:
            fill(pool, page, np.random.default_rng(1))
        seal_pages(pool, pages, number)
        seen |= {slice_bytes(pool, page, 0).tobytes() for page in pages}
        ctypes.memset(pool.slice_address(pages[0], 0), 0xA5, 64)
        pool.decref(pages)
    assert len(seen) == 1


def test_wrong_pages_are_refused_before_anything_changes() -> None:
    spec = PageSpec(LAYERS, HEADS, 64, page_size=16, extent_pages=2)
    pool, _, number = pool_of(spec, TABLE, num_frames=4)
    a, b, c = pool.alloc(3, run_pages=1)
    for page in (a, b, c):
        fill(pool, page, np.random.default_rng(0))
    seal_pages(pool, [c], number)
    pool.decref([b])
    before = pool.stats()
    for pages, message in (
        ([a, b], "has no owner"),
        ([a, c], "of class 1 already"),
        ([a, a], "named twice"),
        ([a, -1], "out of range"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            seal_pages(pool, pages, number)
        assert pool.stats() == before and pool.class_of(a) == 0
    with pytest.raises(InvalidArgument, match="class_number=7"):
        seal_pages(pool, [a], 7)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30])
def test_a_number_that_cannot_be_encoded_leaves_its_page_open(bad: float) -> None:
    spec = PageSpec(LAYERS, HEADS, 64, page_size=16, extent_pages=2)
    pool, _, number = pool_of(spec, TABLE, num_frames=4)
    pages = pool.alloc(3, run_pages=1)
    b = pages[1]
    written = [fill(pool, page, np.random.default_rng(0)) for page in pages]
    k, v = written[1][1]
    k[3, 2, 5] = reference.encode(np.array([bad]), "bf16")[0]
    pool.write_slice(b, 1, k, v)
    with pytest.raises(InvalidArgument, match=f"page={b} layer=1 head=2 K: .*token 3"):
        seal_pages(pool, pages, number)
    assert [pool.class_of(p) for p in pages] == [number, 0, 0]
    assert np.array_equal(pool.read_slice(b, 1)[0], k) and not pool.is_sealed(b)
    assert pool.class_pages() == [2, 1]
    pool.decref(pages)
    assert pool.stats().free_bytes == 4 * spec.frame_bytes


def test_sealing_needs_room_for_one_page_and_loses_nothing_without() -> None:
    spec = PageSpec(LAYERS, HEADS, 64, page_size=64, extent_pages=1)
    pool, page_class, number = pool_of(spec, TABLE, num_frames=4)
    pages = pool.alloc(4)
    for page in pages:
        fill(pool, page, np.random.default_rng(page))
    with pytest.raises(OutOfPages, match="finds no run"):
        seal_pages(pool, pages, number)
    assert pool.stats().open_bytes == 4 * spec.frame_bytes
    pool.decref(pages[3:])
    seal_pages(pool, pages[:3], number)
    assert pool.stats().compressed_bytes == 3 * page_class.run_bytes(1)
    assert pool.stats().open_bytes == 0
    plan = FaultPlan(1)
    pool.set_faults(plan)
    page = pool.alloc(1)
    plan.fail_nth("pool.seal", 1)
    with pytest.raises(OutOfPages):
        seal_pages(pool, page, number)
    assert pool.class_of(page[0]) == 0 and pool.refs(page[0]) == (1, 0)


def test_profiles_are_classes_of_bf16_pages_that_codecs_can_take() -> None:
    spec = PageSpec(4, 2, 64)
    assert profile_class(spec, "exact") is None
    sizes = [profile_class(spec, name).page_bytes for name in PROFILES[1:]]
    assert sorted(sizes, reverse=True) == sizes and sizes[-1] < 0.25 * spec.page_bytes
    with pytest.raises(InvalidArgument, match="kv_profile is 'tiny'; allowed: exact"):
        profile_class(spec, "tiny")
    for other in (
        PageSpec(4, 2, 64, format="f32"),
        PageSpec(4, 2, 272),
        PageSpec(4, 2, 64, layout="canonical"),
    ):
        with pytest.raises(Unsupported, match="kv_profile 'small'"):
            profile_class(other, "small")


def test_a_queue_passes_over_pages_that_are_gone_sealed_or_cannot_be() -> None:
    spec = PageSpec(1, HEADS, 64, page_size=64, extent_pages=2)
    page_class = PageClass(spec, TABLE[:1])
    pool = Pool(spec, 8, huge_pages=False, page_ids=page_ids_for(page_class, 8))
    sealer = Sealer(pool, page_class)
    a, b, c, d, e = pages = pool.alloc(5, run_pages=1)
    for page in pages:
        k, v = fill(pool, page, np.random.default_rng(0))[0]
    pool.write_slice(c, 0, np.full_like(k, 0x7FC0), v)  # NaN
    sealer.add([a, b, c])
    sealer.add([a, d, e])
    pool.decref([b])
    reused = pool.alloc(1, run_pages=1)
    assert sealer.run(2) == 2  # a and d
    assert [pool.class_of(p) for p in (a, *reused, c, d, e)] == [1, 0, 0, 1, 0]
    plan = FaultPlan(1)
    pool.set_faults(plan)
    plan.fail_nth("pool.seal", 1)
    assert sealer.run(9) == 0 and len(sealer) == 1
    assert sealer.run(9) == 1 and len(sealer) == 0
    assert (sealer.sealed, sealer.refused) == (3, 1)
