"""Copies between layouts and pages: the oracle's bytes, and nothing else."""

import numpy as np
import pytest
from kvcore import kernels
from kvcore import reference as ref
from kvcore.errors import InvalidArgument
from support.batches import Batch, Sequence, Shape, to_torch
from support.table import PAGE_SIZES

FORMATS = ["bf16", "f16", "f32"]


def rows(seed: int, count: int, shape: Shape, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    k = rng.standard_normal((count, shape.num_kv_heads, shape.head_dim_k))
    v = rng.standard_normal((count, shape.num_kv_heads, shape.head_dim_v))
    return ref.encode(k, dtype), ref.encode(v, dtype)


@pytest.mark.parametrize("layout", ["packed", "canonical"])
@pytest.mark.parametrize("page", PAGE_SIZES)
@pytest.mark.parametrize("fmt", FORMATS)
def test_part_of_a_slice_there_and_back(fmt: str, page: int, layout: str) -> None:
    shape = Shape(4, 2, 48, 80, page, fmt, layout)
    batch = Batch(shape, [Sequence(1, 3 * page)])
    target = int(batch.block_table[0, 1])
    want = ref.read_slice(batch.arena, batch.geometry, target, 1)
    for first, count in [(0, page), (0, 1), (page - 1, 1), (3, 10)]:
        k, v = rows(first, count, shape, fmt)
        want[0][first : first + count], want[1][first : first + count] = k, v
        kernels.pack_slice(batch.pool, target, 1, to_torch(k, fmt), to_torch(v, fmt), first)
        got = ref.read_slice(batch.arena, batch.geometry, target, 1)
        assert np.array_equal(got[0], want[0]) and np.array_equal(got[1], want[1])
        back = np.zeros_like(k), np.zeros_like(v)
        kernels.unpack_slice(batch.pool, target, 1, *back, first)
        assert np.array_equal(back[0], k) and np.array_equal(back[1], v)


@pytest.mark.parametrize("fmt", FORMATS)
def test_the_pool_reads_what_kernels_wrote(fmt: str) -> None:
    shape = Shape(4, 2, 32, 16, 16, fmt)
    batch = Batch(shape, [Sequence(1, 16)])
    k, v = rows(3, 16, shape, fmt)
    kernels.pack_slice(
        batch.pool, int(batch.block_table[0, 0]), 0, to_torch(k, fmt), to_torch(v, fmt)
    )
    got = batch.pool.read_slice(int(batch.block_table[0, 0]), 0)
    assert np.array_equal(np.asarray(got[0]).view(k.dtype), k)
    assert np.array_equal(np.asarray(got[1]).view(v.dtype), v)


def test_copied_pages_take_all_layers_and_change_nothing_else() -> None:
    shape = Shape(4, 2, 32, 16, 16, "bf16", num_layers=3, extent_pages=2)
    batch = Batch(shape, [Sequence(1, 40), Sequence(2, 40)])
    before = batch.arena.copy()
    source, target = batch.block_table[0, :2].tolist(), batch.block_table[1, :2].tolist()
    kernels.copy_pages(batch.pool, source, target)
    want = before.copy()
    size = batch.geometry.slice_bytes
    for a, b in zip(source, target, strict=True):
        for layer in range(3):
            i, j = batch.geometry.slice_offset(a, layer), batch.geometry.slice_offset(b, layer)
            want[j : j + size] = before[i : i + size]
    assert np.array_equal(batch.arena, want)


def test_geometry_of_the_library_is_the_oracles() -> None:
    for page in PAGE_SIZES:
        for fmt in FORMATS:
            for heads, dk, dv, layers in [(3, 64, 64, 30), (8, 128, 128, 32), (1, 16, 256, 2)]:
                shape = Shape(heads, heads, dk, dv, page, fmt, num_layers=layers)
                spec, geo = shape.spec, shape.geometry
                assert spec.extent_pages == geo.resolved_extent
                assert spec.slice_bytes == geo.slice_bytes
                assert spec.layer_stride_bytes == geo.layer_stride_bytes
                assert spec.frame_bytes == geo.frame_bytes
                assert spec.page_bytes == geo.page_bytes
                for n in (0, 1, page - 1, page, page + 1, 3000):
                    assert spec.usable_prefix(n) == ref.usable_prefix(n, page)


@pytest.mark.parametrize(
    ("page", "layer", "first", "count"),
    [(-1, 0, 0, 1), (99, 0, 0, 1), (0, 2, 0, 1), (0, -1, 0, 1), (0, 0, 16, 1), (0, 0, 0, 17),
     (0, 0, -1, 2)],
)  # fmt: skip
def test_slices_out_of_range_are_refused(page: int, layer: int, first: int, count: int) -> None:
    shape = Shape(4, 2, 32, 16, 16, "bf16")
    batch = Batch(shape, [Sequence(1, 16)])
    before = batch.arena.copy()
    k, v = rows(1, count, shape, "bf16")
    with pytest.raises(InvalidArgument):
        kernels.pack_slice(batch.pool, page, layer, k, v, first)
    assert np.array_equal(batch.arena, before)
