"""Encoders and decoders at every instruction set level: the bytes and numbers of the reference."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kvcore import kernels
from kvcore import reference as ref
from kvcore.errors import Corrupt, InvalidArgument
from support.blocks import CODECS, DIMS, KINDS, PAGES, page

NAMES = [f"{fmt}-{part}" for fmt, part in CODECS]
codec = pytest.mark.parametrize(("fmt", "part"), CODECS, ids=NAMES)
DTYPES = ["bf16", "f16", "f32"]


def stored(rows: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Rows as a tensor of the dtype, and the float32 numbers that it holds (within +-65504)."""
    tensor = ref.formats.encode(np.clip(rows, -65280, 65280), dtype)
    return tensor, ref.formats.decode(tensor, dtype).astype(np.float32)


def same(got: np.ndarray, want: np.ndarray) -> bool:
    return np.array_equal(got.view(np.uint8), want.view(np.uint8))


@codec
@settings(
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    kind=st.sampled_from(KINDS),
    tokens=st.sampled_from(PAGES),
    dims=st.one_of(st.sampled_from(DIMS), st.integers(1, 32).map(lambda n: 8 * n)),
    dtype=st.sampled_from(DTYPES),
    out=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**20),
)
def test_blocks_and_rows_equal_the_reference(
    fmt: str,
    part: str,
    kind: str,
    tokens: int,
    dims: int,
    dtype: str,
    out: str,
    seed: int,
    isa: str,
) -> None:
    tensor, rows = stored(page(kind, tokens, dims, seed), dtype)
    want = ref.encode_block(fmt, part, rows)
    got = kernels.encode_block(fmt, part, tensor)
    assert same(got, want), np.flatnonzero(got != want)[:8]
    kernels.check_block(fmt, part, got, tokens, dims)
    decoded = ref.formats.encode(ref.decode_block(fmt, part, want, tokens, dims), out)
    result = np.empty_like(decoded)
    kernels.decode_block(fmt, part, got, tokens, dims, result)
    assert same(result, decoded), np.argwhere(result != decoded)[:4]


@codec
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(seed=st.integers(0, 2**20), tokens=st.sampled_from(PAGES), dims=st.sampled_from(DIMS))
def test_any_codes_decode_as_in_the_reference(
    fmt: str, part: str, seed: int, tokens: int, dims: int, isa: str
) -> None:
    """Also codes that the encoder never chose together."""
    rng = np.random.default_rng(seed)
    block = ref.encode_block(fmt, part, page("normal", tokens, dims, seed))
    codes = ref.split_block(fmt, part, block, tokens, dims)["codes"]
    codes[:] = rng.integers(0, 256, codes.size, np.uint8)
    if fmt == "fp8":
        codes[codes & 0x7F == 0x7F] = 0x7E
    want = ref.decode_block(fmt, part, block, tokens, dims)
    assert same(kernels.decode_block(fmt, part, block, tokens, dims), want)


@codec
def test_neighbours_are_neither_written_nor_read(fmt: str, part: str, isa: str) -> None:
    """Rows and block stand inside poison: strided rows, odd addresses."""
    for tokens, dims in [(16, 8), (32, 120), (64, 64)]:
        tensor, rows = stored(page("normal", tokens, dims), "bf16")
        wide = np.full((tokens, dims + 24), 0x7FC0, np.uint16)
        wide[:, 8 : dims + 8] = tensor
        size = kernels.block_bytes(fmt, part, tokens, dims)
        memory = np.full(size + 66, 0xA5, np.uint8)
        kernels.encode_block(fmt, part, wide[:, 8 : dims + 8], memory[33 : 33 + size])
        assert same(memory[33 : 33 + size], ref.encode_block(fmt, part, rows))
        assert (memory[:33] == 0xA5).all() and (memory[33 + size :] == 0xA5).all()
        out = np.full((tokens, dims + 24), 0x7FC0, np.uint16)
        target = out[:, 8 : dims + 8]
        kernels.decode_block(fmt, part, memory[33 : 33 + size], tokens, dims, target)
        assert (out[:, :8] == 0x7FC0).all() and (out[:, dims + 8 :] == 0x7FC0).all()


def test_heads_of_a_page_in_one_call(isa: str) -> None:
    tokens, heads, dims = 32, 3, 80
    k = torch.randn(tokens, heads, dims, generator=torch.Generator().manual_seed(1))
    k = k.to(torch.bfloat16)
    size = kernels.block_bytes("k4", "k", tokens, dims)
    blocks = np.zeros((heads, size + 64), np.uint8)
    code = kernels.DTYPE_CODES["bfloat16"]
    address = blocks.__array_interface__["data"][0]
    kernels.encode_block_ptr(
        "k4", "k", tokens, dims, k.data_ptr(), heads * dims, code, address, size, heads, dims,
        size + 64,
    )  # fmt: skip
    out = torch.empty_like(k)
    kernels.decode_block_ptr(
        "k4", "k", tokens, dims, address, size, out.data_ptr(), heads * dims, code, heads, dims,
        size + 64,
    )  # fmt: skip
    for head in range(heads):
        assert same(blocks[head, :size], kernels.encode_block("k4", "k", k[:, head]))
        want = torch.from_numpy(kernels.decode_block("k4", "k", blocks[head, :size], tokens, dims))
        assert torch.equal(out[:, head], want.to(torch.bfloat16))
    assert (blocks[:, size:] == 0).all()


@codec
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 65536.0])
def test_numbers_out_of_range_are_refused_by_place(
    fmt: str, part: str, dtype: str, value: float, isa: str
) -> None:
    for token, dim in [(0, 0), (15, 79), (7, 33), (12, 64)]:
        rows = page("normal", 16, 80)
        rows[token, dim] = value
        with pytest.raises(InvalidArgument, match=rf"{part}\[token {token}\]\[dim {dim}\]"):
            kernels.encode_block(fmt, part, ref.formats.encode(rows, dtype))


@codec
def test_damage_is_refused_as_in_the_reference(fmt: str, part: str) -> None:
    tokens, dims = 32, 64
    good = ref.encode_block(fmt, part, page("normal", tokens, dims))
    rng = np.random.default_rng(5)
    refused = 0
    for _ in range(400):
        block = good.copy()
        block[rng.integers(0, min(len(block), 512))] = rng.choice([0, 0x7C, 0x7F, 0x80, 0xFF])
        try:
            ref.check_block(fmt, part, block, tokens, dims)
        except ValueError:
            refused += 1
            with pytest.raises(Corrupt, match="is not allowed: expected"):
                kernels.check_block(fmt, part, block, tokens, dims)
        else:
            kernels.check_block(fmt, part, block, tokens, dims)
    assert refused > 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("k4", "v", 64, 64), "k4 is for keys only: part=v"),
        (("v3", "k", 64, 64), "v3 is for values only: part=k"),
        (("bf16", "k", 64, 64), "format='bf16'.*allowed int8, fp8, k4, v4, v3"),
        (("int8", "q", 64, 64), "part='q'.*allowed k, v"),
        (("int8", "k", 48, 64), "tokens=48.*16, 32, 64 or 128"),
        (("int8", "k", 64, 60), "dim=60.*multiples of 8 from 8 to 256"),
        (("int8", "k", 64, 0), "dim=0"),
        (("v4", "v", 64, 264), "dim=264"),
    ],
)
def test_shapes_that_do_not_exist_are_refused(arguments: tuple, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        kernels.block_bytes(*arguments)


def test_arrays_of_the_wrong_kind_are_refused() -> None:
    rows = page("normal", 16, 64)
    block = kernels.encode_block("int8", "k", rows)
    cases = [
        (lambda: kernels.encode_block("int8", "k", rows[None]), "rows has shape"),
        (lambda: kernels.encode_block("int8", "k", rows.astype(np.int32)), "rows has dtype int32"),
        (lambda: kernels.encode_block("int8", "k", rows.T.copy().T), "dims contiguous"),
        (lambda: kernels.encode_block("int8", "k", rows, block[:-1]), "block has .* bytes"),
        (lambda: kernels.encode_block("int8", "k", rows, block[::2]), "contiguous uint8"),
        (lambda: kernels.decode_block("int8", "k", block, 32, 64), "block has .* bytes"),
        (lambda: kernels.decode_block("int8", "k", block, 16, 64, rows[:8]), "expected .16, 64."),
        (lambda: kernels.check_block("int8", "k", block[:64], 16, 64), "block has 64 bytes"),
    ]
    for call, message in cases:
        with pytest.raises(InvalidArgument, match=message):
            call()
    with pytest.raises(InvalidArgument, match="block is a null pointer"):
        kernels.decode_block_ptr("int8", "k", 16, 64, 0, len(block), 1, 64, 0)
    with pytest.raises(InvalidArgument, match="count=-1"):
        kernels.decode_block_ptr("int8", "k", 16, 64, 1, len(block), 1, 64, 0, -1)


def test_sizes_equal_the_reference() -> None:
    for fmt, part in CODECS:
        for tokens in PAGES:
            for dims in range(8, 257, 8):
                want = ref.block_bytes(fmt, part, tokens, dims)
                assert kernels.block_bytes(fmt, part, tokens, dims) == want
