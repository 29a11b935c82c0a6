"""O30 (lmdeploy#4849): lanes behind a head_dim that is no power of two took part in the range."""

from __future__ import annotations

import numpy as np
import pytest
from kvcore import kernels
from kvcore.errors import InvalidArgument
from support.blocks import CODECS


def error(fmt: str, part: str, dim: int) -> float:
    rows = np.random.default_rng(dim).uniform(5, 6, (64, dim)).astype(np.float32)
    block = kernels.encode_block(fmt, part, rows)
    back = kernels.decode_block(fmt, part, block, 64, dim)
    return float(np.abs(back - rows).max())


@pytest.mark.parametrize(("fmt", "part"), CODECS)
@pytest.mark.parametrize("dim", [80, 96, 112, 120, 192])
def test_numbers_from_5_to_6_are_as_close_as_at_128(
    fmt: str, part: str, dim: int, isa: str
) -> None:
    # Rotated rows are vectors of one length: what an error may be grows with the root of the dims.
    allowed = 1.15 if fmt not in ("v3", "v4") else 2.0
    assert error(fmt, part, dim) <= allowed * error(fmt, part, 128)


@pytest.mark.parametrize(("fmt", "part"), CODECS)
def test_576_is_refused(fmt: str, part: str) -> None:
    with pytest.raises(InvalidArgument, match="576"):
        kernels.block_bytes(fmt, part, 64, 576)
