"""Pool: allocation by frames, two kinds of refs, generations, seals, slices."""

from __future__ import annotations

import ctypes
import threading

import numpy as np
import pytest
from kvcore.errors import InvalidArgument, OutOfPages
from kvcore.pages import Arena, PageSpec, Pool, block_table, slot_mapping


def small_pool(num_frames: int = 4, extent_pages: int = 2) -> Pool:
    spec = PageSpec(1, 1, 16, page_size=16, extent_pages=extent_pages)
    return Pool(spec, num_frames, huge_pages=False)


def test_alloc_gives_whole_frames_in_order() -> None:
    pool = small_pool(extent_pages=4)
    pages = pool.alloc(5)
    assert len(pages) == 8
    for frame in (pages[:4], pages[4:]):
        assert frame == list(range(frame[0], frame[0] + 4)) and frame[0] % 4 == 0
    assert all(pool.refs(p) == (1, 0) for p in pages)
    assert pool.stats().free_frames == 2
    assert pool.alloc(0) == []


def test_alloc_is_all_or_nothing() -> None:
    pool = small_pool()
    held = pool.alloc(3)
    with pytest.raises(OutOfPages, match=r"wanted 5 pages = 3 frames .* 2 of 4 frames are free"):
        pool.alloc(5)
    assert pool.stats().free_frames == 2 and pool.stats().held_pages == len(held) == 4


def test_frame_is_free_when_no_page_has_any_ref() -> None:
    pool = small_pool()
    a, b = pool.alloc(2)
    generation = pool.generation(a)
    pool.io_acquire([b])
    pool.decref([a, b])
    assert pool.stats().free_frames == 3 and pool.generation(a) == generation
    pool.io_release([b])
    assert pool.stats().free_frames == 4
    assert pool.generation(a) == pool.generation(b) == generation + 1


def test_failing_calls_change_nothing() -> None:
    pool = small_pool()
    a, b = pool.alloc(2)
    pool.incref([a])
    free = next(p for p in range(pool.num_pages) if p not in (a, b))
    before = pool.stats()
    for call in (pool.decref, pool.io_release, pool.incref, pool.io_acquire, pool.seal):
        for bad in ([a, free], [a, -1], [b, pool.num_pages]):
            with pytest.raises(InvalidArgument, match=r"page=-?\d+ "):
                call(bad)
    with pytest.raises(InvalidArgument, match=r"position 3 of 4"):
        pool.decref([b, a, a, a])
    assert pool.refs(a) == (2, 0) and pool.refs(b) == (1, 0)
    assert pool.stats() == before


def test_an_unowned_page_gains_no_owner_while_a_transfer_ends() -> None:
    pool = small_pool()
    a, b = pool.alloc(2)
    pool.io_acquire([a])
    pool.decref([a, b])
    with pytest.raises(InvalidArgument, match="has no owner"):
        pool.incref([a])
    pool.io_acquire([a])
    pool.io_release([a, a])
    assert pool.stats().free_frames == 4


def test_seal_ends_with_the_frame() -> None:
    pool = small_pool()
    pages = pool.alloc(2)
    pool.seal(pages)
    pool.seal(pages[:1])
    assert pool.stats().sealed_pages == 2 and pool.is_sealed(pages[0])
    k, v = pool.read_slice(pages[0], 0)
    with pytest.raises(InvalidArgument, match="is sealed"):
        pool.write_slice(pages[0], 0, k, v)
    pool.decref(pages)
    assert pool.stats().sealed_pages == 0
    assert not pool.is_sealed(pool.alloc(1)[0])


def test_two_pools_of_one_arena_do_not_overlap() -> None:
    spec = PageSpec(1, 1, 16, page_size=16, extent_pages=1, format="f32")
    arena = Arena(2 << 20, huge_pages=False)
    one, two = Pool(spec, 3, arena), Pool(spec, 3, arena)
    ones = np.full((16, 1, 16), 1, np.float32)
    for page in one.alloc(3):
        one.write_slice(page, 0, ones, ones)
    for page in two.alloc(3):
        assert not two.read_slice(page, 0)[0].any()
    with pytest.raises(InvalidArgument, match="does not fit"):
        Pool(spec, 512, arena)


@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
@pytest.mark.parametrize("layout", ["packed", "canonical"])
@pytest.mark.parametrize("format", ["bf16", "f16", "f32"])
def test_slices_round_trip_and_do_not_touch_each_other(
    page_size: int, layout: str, format: str
) -> None:
    spec = PageSpec(3, 2, 80, 112, page_size, 2, format, layout)
    pool = Pool(spec, 2, huge_pages=False)
    rng = np.random.default_rng(7)
    dtype = np.float32 if format == "f32" else np.uint16
    written = {}
    for page in pool.alloc(4):
        for layer in range(3):
            k = rng.integers(0, 65536, (page_size, 2, 80)).astype(dtype)
            v = rng.integers(0, 65536, (page_size, 2, 112)).astype(dtype)
            pool.write_slice(page, layer, k, v)
            written[page, layer] = (k, v)
    for (page, layer), (k, v) in written.items():
        got_k, got_v = pool.read_slice(page, layer)
        assert np.array_equal(got_k, k) and np.array_equal(got_v, v)


@pytest.mark.parametrize("page_size", [16, 128])
@pytest.mark.parametrize("format", ["bf16", "f16"])
def test_packed_bytes_follow_the_layout_of_page_layout_h(page_size: int, format: str) -> None:
    dim_k, dim_v, heads = 48, 80, 2
    spec = PageSpec(2, heads, dim_k, dim_v, page_size, 2, format)
    pool = Pool(spec, 1, huge_pages=False)
    rng = np.random.default_rng(3)
    k = rng.integers(0, 65536, (page_size, heads, dim_k)).astype(np.uint16)
    v = rng.integers(0, 65536, (page_size, heads, dim_v)).astype(np.uint16)
    page = pool.alloc(1)[1]
    pool.write_slice(page, 1, k, v)
    at = pool.arena.address + spec.layer_stride_bytes + spec.slice_bytes
    header = ctypes.string_at(at, 12)
    assert header[:4] == b"KVC1" and header[8:12] == bytes([1, 0, page_size, 0])
    raw = np.frombuffer(
        ctypes.string_at(at + 64, heads * page_size * (dim_k + dim_v) * 2), np.uint16
    )
    pair = 2 if format == "bf16" else 1
    block = min(page_size, 64)
    want = []
    for head in range(heads):
        tokens = k[:, head].reshape(page_size // block, block, dim_k // pair, pair)
        want.append(tokens.transpose(0, 2, 1, 3).ravel())
        for first in range(0, dim_v, 64):
            dims = v[:, head, first : first + 64].reshape(page_size // pair, pair, -1)
            want.append(dims.transpose(0, 2, 1).ravel())
    assert np.array_equal(raw, np.concatenate(want))


def test_write_slice_names_wrong_arrays() -> None:
    pool = small_pool()
    (page, _) = pool.alloc(1)
    good = np.zeros((16, 1, 16), np.uint16)
    with pytest.raises(InvalidArgument, match="k has dtype float32: allowed uint16"):
        pool.write_slice(page, 0, good.astype(np.float32), good)
    with pytest.raises(InvalidArgument, match=r"v has shape \(15, 1, 16\): allowed \(16, 1, 16\)"):
        pool.write_slice(page, 0, good, good[1:])
    with pytest.raises(InvalidArgument, match="layer=1 is out of range: allowed 0 to 0"):
        pool.read_slice(page, 1)


def test_spec_names_bad_fields() -> None:
    for field, value in (
        ("head_dim_k", 17),
        ("page_size", 48),
        ("num_layers", 0),
        ("format", "int9"),
    ):
        options = {"num_layers": 1, "num_kv_heads": 1, "head_dim_k": 16, field: value}
        with pytest.raises(InvalidArgument, match=f"{field}='?{value}'?"):
            PageSpec(**options)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="num_frames=0 is out of range"):
        small_pool(num_frames=0)


def test_block_tables_and_slot_mappings() -> None:
    table = block_table([[3, 4], [], [9]], max_pages=3)
    assert table.dtype == np.int32
    assert table.tolist() == [[3, 4, -1], [-1, -1, -1], [9, -1, -1]]
    with pytest.raises(InvalidArgument, match="row 0 has 2 pages: allowed max_pages = 1"):
        block_table([[3, 4]], max_pages=1)
    slots = slot_mapping([5, 2], 16, 14, 4)
    assert slots.dtype == np.int64 and slots.tolist() == [94, 95, 32, 33]
    with pytest.raises(InvalidArgument, match="do not lie in 2 pages of 16"):
        slot_mapping([5, 2], 16, 30, 3)


def test_threads_never_share_a_page() -> None:
    pool = small_pool(num_frames=8, extent_pages=1)
    owners = [0] * pool.num_pages
    failures: list[int] = []

    def work() -> None:
        for _ in range(2000):
            try:
                pages = pool.alloc(2)
            except OutOfPages:
                continue
            for page in pages:
                owners[page] += 1
                if owners[page] != 1:
                    failures.append(page)
            for page in pages:
                owners[page] -= 1
            pool.decref(pages)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and pool.stats().free_frames == 8
