"""The oracle itself, against independent sources: ml_dtypes, hashlib, torch and plain algebra."""

import hashlib

import ml_dtypes
import numpy as np
import pytest
from kvcore import reference as ref

RNG = np.random.default_rng(7)


def test_bf16_rounding_matches_ml_dtypes() -> None:
    bits = np.concatenate([RNG.integers(0, 2**32, 200_000, np.uint32), _special_bits()])
    values = bits.view(np.float32)
    with np.errstate(invalid="ignore"):
        want = values.astype(ml_dtypes.bfloat16)
    got = ref.to_bf16(values)
    nan = np.isnan(values)
    assert np.array_equal(got[~nan], want.view(np.uint16)[~nan])
    assert np.isnan(ref.from_bf16(got)[nan]).all()


def _special_bits() -> np.ndarray:
    """Ties, subnormals, infinities, NaNs, both signs."""
    upper = np.array([0, 1, 0x7F7F, 0x7F80, 0x7FC0, 0x3F80, 0x3F81, 0x0080], np.uint32)
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    bits = ((upper[:, None] << 16) | lower).reshape(-1)
    return np.concatenate([bits, bits | np.uint32(1 << 31)])


def test_bf16_widening_is_exact() -> None:
    bits = np.arange(2**16, dtype=np.uint16)
    want = bits.view(ml_dtypes.bfloat16).astype(np.float32)
    assert np.array_equal(ref.from_bf16(bits), want, equal_nan=True)


@pytest.mark.parametrize("fmt", ref.FORMATS)
@pytest.mark.parametrize("tokens", [16, 32, 64, 128])
@pytest.mark.parametrize("dims", [16, 64, 80, 96, 112, 128, 256])
def test_packing_is_a_permutation_with_an_inverse(fmt: str, tokens: int, dims: int) -> None:
    block = np.arange(tokens * dims).reshape(tokens, dims)
    for pack, unpack in ((ref.pack_k, ref.unpack_k), (ref.pack_v, ref.unpack_v)):
        packed = pack(block, fmt)
        assert np.array_equal(np.sort(packed), np.arange(tokens * dims))
        assert np.array_equal(unpack(packed, tokens, dims, fmt), block)


def test_packed_layout_by_the_formula() -> None:
    """Element (token, dim) stands where the index formula of the layout says."""
    tokens, dims = 128, 80
    block = np.arange(tokens * dims).reshape(tokens, dims)
    k16, v16 = ref.pack_k(block, "bf16"), ref.pack_v(block, "bf16")
    k32, v32 = ref.pack_k(block, "f32"), ref.pack_v(block, "f32")
    for t, d in [(0, 0), (1, 0), (0, 1), (63, 79), (64, 0), (127, 79), (77, 64), (76, 63), (5, 70)]:
        tb, first = t // 64, d // 64 * 64
        width = min(dims - first, 64)
        assert k16[((tb * dims // 2 + d // 2) * 64 + t % 64) * 2 + d % 2] == block[t, d]
        assert k32[(tb * dims + d) * 64 + t % 64] == block[t, d]
        at = first * tokens
        assert v16[at + ((t // 2) * width + d - first) * 2 + t % 2] == block[t, d]
        assert v32[at + t * width + d - first] == block[t, d]


def test_geometry_of_two_known_models() -> None:
    smol = ref.Geometry(30, 3, 64, 64)
    assert (smol.slice_bytes, smol.resolved_extent) == (64 + 49152, 4)
    assert smol.frame_bytes == -(-30 * 4 * 49216 // 4096) * 4096
    large = ref.Geometry(32, 8, 128, 128)
    assert (large.slice_bytes, large.resolved_extent) == (64 + 8 * 32768, 1)
    assert smol.slice_offset(5, 2) == smol.frame_bytes + 2 * 4 * 49216 + 49216


@pytest.mark.parametrize(
    ("tokens", "page", "want"),
    [(-1, 64, 0), (0, 64, 0), (1, 64, 0), (64, 64, 0), (65, 64, 64), (128, 64, 64), (129, 16, 128)],
)
def test_usable_prefix(tokens: int, page: int, want: int) -> None:
    assert ref.usable_prefix(tokens, page) == want


def test_attention_matches_torch() -> None:
    torch = pytest.importorskip("torch")
    q, k, v = RNG.normal(size=(5, 6, 16)), RNG.normal(size=(9, 2, 16)), RNG.normal(size=(9, 2, 24))
    got = ref.attention(q, k, v, np.arange(4, 9), 0.3)
    mask = torch.ones(5, 9, dtype=torch.bool).tril(diagonal=4)
    tq, tk, tv = (torch.from_numpy(x.transpose(1, 0, 2).copy()) for x in (q, k, v))
    want = torch.nn.functional.scaled_dot_product_attention(
        tq, tk.repeat_interleave(3, 0), tv.repeat_interleave(3, 0), attn_mask=mask, scale=0.3
    )
    np.testing.assert_allclose(got.out.transpose(1, 0, 2), want.numpy(), rtol=1e-12, atol=1e-14)
    scores = 0.3 * tq @ tk.repeat_interleave(3, 0).transpose(1, 2)
    lse = torch.logsumexp(scores.masked_fill(~mask, -torch.inf), -1)
    np.testing.assert_allclose(got.lse.T, lse.numpy(), rtol=1e-12)


def test_rows_that_see_nothing() -> None:
    got = ref.attention(RNG.normal(size=(2, 2, 16)), RNG.normal(size=(3, 1, 16)),
                        RNG.normal(size=(3, 1, 16)), np.array([-1, 0]), 1.0)  # fmt: skip
    assert (got.out[0] == 0).all() and np.isneginf(got.lse[0]).all()
    assert (got.out[1] != 0).all() and np.isfinite(got.lse[1]).all()


def test_merge_is_attention_over_the_union() -> None:
    q, k, v = (
        RNG.normal(size=(3, 4, 16)),
        RNG.normal(size=(40, 2, 16)),
        RNG.normal(size=(40, 2, 16)),
    )
    whole = ref.attention(q, k, v, np.full(3, 39), 0.25)
    out, lse = np.zeros_like(whole.out), np.full_like(whole.lse, -np.inf)
    for part in (slice(0, 11), slice(11, 11), slice(11, 40)):
        piece = ref.attention(q, k[part], v[part], np.full(3, 39), 0.25)
        out, lse = ref.merge_states(out, lse, piece.out, piece.lse)
    np.testing.assert_allclose(out, whole.out, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(lse, whole.lse, rtol=1e-12)


@pytest.mark.parametrize("layout", ["packed", "canonical"])
@pytest.mark.parametrize("fmt", ref.FORMATS)
def test_appended_tokens_are_gathered_again(fmt: str, layout: str) -> None:
    geo = ref.Geometry(2, 3, 32, 16, page_size=16, extent_pages=2, fmt=fmt, layout=layout)
    arena = np.zeros(3 * geo.frame_bytes, np.uint8)
    table = np.array([[4, 1, 3], [0, 5, 2]], np.int32)
    cu, context = np.array([0, 37, 55], np.int32), np.array([37, 18], np.int32)
    k = ref.encode(RNG.normal(size=(55, 3, 32)), fmt)
    v = ref.encode(RNG.normal(size=(55, 3, 16)), fmt)
    ref.append_by_slots(arena, geo, 1, k, v, ref.slots_of(geo, cu, context, table))
    for seq, (first, last) in enumerate([(0, 37), (37, 55)]):
        got_k, got_v = ref.gather(arena, geo, 1, table[seq], last - first)
        assert np.array_equal(got_k, ref.decode(k[first:last], fmt))
        assert np.array_equal(got_v, ref.decode(v[first:last], fmt))
    untouched = np.concatenate(
        [arena[geo.slice_offset(p, 0) :][: geo.slice_bytes] for p in range(6)]
    )
    assert not untouched.any()


def test_tokens_in_front_of_position_zero_are_not_stored() -> None:
    geo = ref.Geometry(1, 1, 16, 16, page_size=16)
    slots = ref.slots_of(geo, np.array([0, 4]), np.array([2]), np.array([[3]]))
    assert slots.tolist() == [-1, -1, 48, 49]


@pytest.mark.parametrize("head_major", [False, True])
def test_other_engines_tensor(head_major: bool) -> None:
    canonical = RNG.normal(size=(4, 2, 8, 3, 16)).astype(np.float32)
    cache = canonical.transpose(0, 1, 3, 2, 4) if head_major else canonical
    k, v = ref.gather_from_blocks(cache, "f32", np.array([2, 0]), 11, head_major=head_major)
    assert k.shape == v.shape == (11, 3, 16)
    assert np.array_equal(k[9], canonical[0, 0, 1]) and np.array_equal(v[3], canonical[2, 1, 3])


def test_keys_are_the_written_chain() -> None:
    secret, space, tokens = b"s" * 32, bytes(range(32)), list(range(130))
    keys = ref.page_keys(secret, space, tokens, 64)
    assert len(keys) == 2 and ref.page_keys(secret, space, tokens[:63]) == []
    body = np.arange(64, 128, dtype="<i4").tobytes()
    assert keys[1] == hashlib.blake2b(space + keys[0] + body, key=secret, digest_size=32).digest()
    assert ref.page_keys(b"t" * 32, space, tokens)[0] != keys[0]
