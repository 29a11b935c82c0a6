"""Element formats: what the bits of one stored number mean.

bf16 is carried as ``uint16`` bit patterns (numpy has no bf16); f16 and f32 as numpy floats.
Source: IEEE 754-2019 (binary16, binary32, round to nearest even); bf16 = upper half of binary32.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Elements = NDArray[Any]  # stored elements, dtype by format

FORMATS = ("bf16", "f16", "f32")
STORAGE_DTYPE: dict[str, np.dtype[Any]] = {
    "bf16": np.dtype(np.uint16),
    "f16": np.dtype(np.float16),
    "f32": np.dtype(np.float32),
}
# Largest relative error of rounding a normal number to the format (half a unit in the last place).
UNIT_ROUNDOFF: dict[str, float] = {"bf16": 2.0**-8, "f16": 2.0**-11, "f32": 2.0**-24}


def to_bf16(values: NDArray[np.floating]) -> NDArray[np.uint16]:
    """Round numbers to bf16, to nearest even.

    Args:
        values: any shape, any float dtype; taken through float32 first, as hardware does.
    Returns:
        uint16 bit patterns of the same shape; NaN stays NaN (quiet), Inf stays Inf.
    """
    single = np.ascontiguousarray(values, dtype=np.float32)
    bits = single.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    quiet_nan = (bits >> np.uint32(16)) | np.uint32(0x40)
    return (
        np.where(np.isnan(single), quiet_nan, rounded).astype(np.uint16).reshape(np.shape(values))
    )


def from_bf16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Widen bf16 bit patterns (uint16, any shape) to float32; exact."""
    wide = np.ascontiguousarray(bits, dtype=np.uint16).astype(np.uint32) << np.uint32(16)
    return wide.view(np.float32).reshape(np.shape(bits))


def encode(values: NDArray[np.floating], fmt: str) -> Elements:
    """Round ``values`` (any shape) to a format: uint16 bits for "bf16", float16, float32."""
    if fmt == "bf16":
        return to_bf16(values)
    with np.errstate(over="ignore"):
        return np.asarray(values).astype(STORAGE_DTYPE[fmt])


def decode(stored: Elements, fmt: str) -> NDArray[np.float64]:
    """Numbers behind stored elements (dtype of :data:`STORAGE_DTYPE`), as float64; exact."""
    if fmt == "bf16":
        return from_bf16(stored).astype(np.float64)
    return np.asarray(stored, dtype=STORAGE_DTYPE[fmt]).astype(np.float64)
