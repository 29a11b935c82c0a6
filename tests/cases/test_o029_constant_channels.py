"""O29 (openvino PR#37095): a constant channel got a scale that its number format could not hold."""

from __future__ import annotations

import numpy as np
import pytest
from kvcore import kernels
from kvcore import reference as ref
from support.blocks import CODECS

KINDS = {
    "zero": lambda x: np.zeros_like(x),
    "five": lambda x: np.full_like(x, 5),
    "range 1e-8": lambda x: 5 + x * np.float32(1e-8),
    "one outlier": lambda x: np.where(np.arange(x.size).reshape(x.shape) == 777, 6e4, x),
    "subnormal": lambda x: x * np.float32(1e-40),
    "constant channels": lambda x: np.broadcast_to(np.linspace(-300, 300, x.shape[1]), x.shape),
}


@pytest.mark.parametrize(("fmt", "part"), CODECS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("page", [16, 64])
def test_scales_are_finite_and_constants_come_back(
    fmt: str, part: str, kind: str, page: int, isa: str
) -> None:
    noise = np.random.default_rng(3).standard_normal((page, 128)).astype(np.float32)
    rows = np.ascontiguousarray(KINDS[kind](noise), np.float32)
    block = kernels.encode_block(fmt, part, rows)
    kernels.check_block(fmt, part, block, page, 128)  # every scale finite and above 0
    for name, scales in ref.split_block(fmt, part, block, page, 128).items():
        if name in ("scale", "grid"):
            assert (scales.astype(np.float32) > 0).all() and np.isfinite(scales).all(), name
    back = kernels.decode_block(fmt, part, block, page, 128)
    assert np.isfinite(back).all()
    if kind == "zero":
        assert np.abs(back).max() < 2e-5
    elif kind in ("five", "range 1e-8", "constant channels") and part == "k":
        step = {"int8": 2**-7, "fp8": 2**-7, "k4": 1 / 127}[fmt]  # of the mean, or the minimum
        assert np.abs(back - rows).max() <= step * np.abs(rows).max()
