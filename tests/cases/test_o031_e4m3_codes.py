"""O31 (tt-metal PR#49811): of E4M3FN's codes only two are NaN; the largest number is 448."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from kvcore import kernels
from kvcore import reference as ref
from kvcore.errors import Corrupt, InvalidArgument

ALL = np.arange(256, dtype=np.uint8)
VALUES = ALL.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
FINITE = np.isfinite(VALUES)


def block_of(codes: np.ndarray) -> np.ndarray:
    """A V block of 16 tokens x 16 dims with scale 1 and these codes, token by token."""
    block = np.zeros(kernels.block_bytes("fp8", "v", 16, 16), np.uint8)
    block[:2] = np.array([1], np.float16).view(np.uint8)
    pairs = codes.reshape(8, 2, 16).transpose(0, 2, 1)  # [P/2][DB][2]
    block[64 : 64 + 256] = pairs.reshape(-1)
    return block


def test_all_finite_codes_decode_as_ml_dtypes_does(isa: str) -> None:
    codes = np.where(FINITE, ALL, 0).astype(np.uint8)
    want = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32).reshape(16, 16)
    got = kernels.decode_block("fp8", "v", block_of(codes), 16, 16)
    assert np.array_equal(got, want) and np.array_equal(np.signbit(got), np.signbit(want))
    assert np.array_equal(ref.decode_block("fp8", "v", block_of(codes), 16, 16), want)
    assert VALUES[FINITE].max() == 448 and int((~FINITE).sum()) == 2


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_the_two_nans_are_refused(code: int) -> None:
    codes = np.zeros(256, np.uint8)
    codes[37] = code
    with pytest.raises(Corrupt):
        kernels.check_block("fp8", "v", block_of(codes), 16, 16)


def test_every_finite_number_is_encoded_as_itself(isa: str) -> None:
    """With 448 among the numbers the scale is 1."""
    codes = np.where(FINITE, ALL, 0).astype(np.uint8)
    rows = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32).reshape(16, 16)
    block = kernels.encode_block("fp8", "v", rows)
    assert np.array_equal(block, block_of(codes))


@pytest.mark.parametrize("value", [1e9, np.inf, -np.inf, np.nan])
def test_numbers_out_of_range_are_refused(value: float, isa: str) -> None:
    rows = np.zeros((16, 16), np.float32)
    rows[3, 5] = value
    with pytest.raises(InvalidArgument, match=r"token 3\]\[dim 5\]"):
        kernels.encode_block("fp8", "v", rows)


@pytest.mark.parametrize("value", [447.0, 448.0, 449.0, 464.0])
def test_the_largest_numbers_stay_finite(value: float, isa: str) -> None:
    rows = np.ones((16, 16), np.float32)
    rows[3, 5], rows[4, 6] = value, -value
    back = kernels.decode_block("fp8", "v", kernels.encode_block("fp8", "v", rows), 16, 16)
    assert abs(back[3, 5] - value) <= value / 16 and back[4, 6] == -back[3, 5]
