"""Multi-head latent attention: V is the first dims of K, and stored once."""

import numpy as np
import pytest
import torch
from kvcore import kernels, pages
from kvcore.errors import InvalidArgument, Unsupported
from support.batches import Batch, Sequence, Shape, bits_of, to_torch
from support.bounds import excess

LENGTHS = [Sequence(0, 1, 1), Sequence(1, 63, 1), Sequence(2, 64, 1), Sequence(3, 65, 2)]
LONG = [Sequence(4, 130, 1), Sequence(5, 70, 66), Sequence(6, 1030, 1), Sequence(7, 3, 5)]


def shape_of(q_heads: int, fmt: str = "bf16", page: int = 64) -> Shape:
    return Shape(q_heads, 1, 576, 512, page, fmt, "canonical", 1, latent=True)


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("fmt", ["bf16", "f16", "f32"])
def test_lengths_around_pages(fmt: str, heads: int, isa: str) -> None:
    batch = Batch(shape_of(heads, fmt), LENGTHS + (LONG if heads == 16 else LONG[:1]))
    out, lse = batch.attend(0, fmt)
    used = excess(
        out, lse, batch.expected(0, fmt), fmt=fmt, dtype=fmt, head_dim=576, tokens=1030
    )  # fmt: skip
    assert max(used.values()) <= 1, used


def test_the_same_as_pages_that_store_v_again(isa: str) -> None:
    """Bit for bit, whatever the page size."""
    latent = Batch(shape_of(16, page=16), LENGTHS + LONG)
    twice = Batch(Shape(16, 1, 576, 512, 64, "bf16", "packed", 1), LENGTHS + LONG, fill=False)
    for seq, row, few in zip(
        latent.sequences, twice.block_table, latent.block_table, strict=True
    ):  # fmt: skip
        k, v = torch.zeros(16, 1, 576).bfloat16(), torch.zeros(16, 1, 512).bfloat16()
        for i in range(-(-seq.context_len // 16)):
            kernels.unpack_slice(latent.pool, int(few[i]), 0, k, v)
            assert torch.equal(k[:, :, :512].view(torch.int16), v.view(torch.int16))
            kernels.pack_slice(twice.pool, int(row[i // 4]), 0, k, v, i % 4 * 16)
    twice.q = latent.q  # type: ignore[method-assign]
    for want, got in zip(twice.attend(), latent.attend(), strict=True):
        assert np.array_equal(bits_of(want), bits_of(got))


def test_append_takes_k_alone(isa: str) -> None:
    filled = Batch(shape_of(16), LENGTHS)
    k = to_torch(filled.new_kv(0)[0], "bf16")
    for v in (None, k[:, :, :512]):
        grown = Batch(shape_of(16), LENGTHS, fill=True)
        for index in range(len(LENGTHS)):  # what the new tokens overwrite
            last = grown.block_table[index, (LENGTHS[index].context_len - 1) // 64]
            at = (LENGTHS[index].context_len - 1) % 64
            nothing = torch.full((1, 1, 576), float("nan"), dtype=torch.bfloat16)
            kernels.pack_slice(grown.pool, int(last), 0, nothing, v=None, first=at)
        grown.plan().append(0, k, v)
        for want, got in zip(filled.attend(), grown.attend(), strict=True):
            assert np.array_equal(bits_of(want), bits_of(got))
    slots = np.array([5, -1, 6, 7, 8], np.int64)
    kernels.append_kv(grown.pool, 0, k[:5], None, slots)


def test_bytes_are_stored_once() -> None:
    """Header and K: 64 tokens of 576 bf16 numbers, where V apart would add 64 KiB a layer."""
    spec = shape_of(16).spec
    assert spec.slice_bytes == 64 + 64 * 576 * 2
    assert spec.page_bytes == spec.slice_bytes == shape_of(16).geometry.slice_bytes
    assert spec.latent and spec.describe().endswith("layout=canonical latent")
    apart = pages.PageSpec(1, 1, 576, 512, layout="canonical")
    assert apart.slice_bytes - spec.slice_bytes == 64 * 512 * 2
    assert spec != pages.PageSpec(1, 1, 576, 512, layout="canonical", extent_pages=2)
    assert apart.describe() != spec.describe()


def test_slices_read_and_written_by_the_pool() -> None:
    pool = pages.Pool(shape_of(16).spec, 1, huge_pages=False)
    page = pool.alloc(1)[0]
    k = np.random.default_rng(1).integers(0, 1 << 15, (64, 1, 576), np.uint16)
    v = np.zeros((64, 1, 512), np.uint16)  # not what is stored
    pool.write_slice(page, 0, k, v)
    got_k, got_v = pool.read_slice(page, 0)
    assert np.array_equal(got_k, k) and np.array_equal(got_v, k[:, :, :512])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_kv_heads": 2}, "num_kv_heads=2"),
        ({"head_dim_v": 592}, "head_dim_v=592"),
        ({"layout": "packed"}, "layout='packed'"),
    ],
)
def test_specs_that_cannot_be_latent(fields: dict[str, object], message: str) -> None:
    options = {"num_kv_heads": 1, "head_dim_v": 512, "layout": "canonical"} | fields
    with pytest.raises(InvalidArgument, match=message):
        pages.PageSpec(1, head_dim_k=576, latent=True, **options)  # type: ignore[arg-type]


def test_codecs_are_refused() -> None:
    for formats in (("int8", "bf16"), ("bf16", "v4"), ("fp8", "fp8")):
        with pytest.raises(Unsupported, match="latent"):
            pages.PageClass(shape_of(16).spec, [[formats]])


def test_other_pages_want_their_v() -> None:
    batch = Batch(Shape(4, 2, num_layers=1), [Sequence(1, 70, 1)])
    with pytest.raises(InvalidArgument, match="v is a NoneType"):
        batch.plan().append(0, torch.zeros(1, 2, 64), None)
