"""O26 (aprender#559): with 28 query and 4 KV heads the output was unrelated to the right one."""

import pytest
from support.batches import Batch, Sequence, Shape
from support.bounds import excess

HEADS = [(28, 4), (40, 8), (12, 2), (71, 1), (32, 32), (48, 8), (24, 3)]


@pytest.mark.parametrize("fmt", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("heads", HEADS, ids=lambda h: f"{h[0]}-{h[1]}")
def test_every_group_size(heads: tuple[int, int], fmt: str, isa: str) -> None:
    shape = Shape(*heads, 128 if heads[1] < 32 else 64, 64, 64, fmt, num_layers=1)
    batch = Batch(shape, [Sequence(1, 130, 1), Sequence(2, 67, 4)])
    out, lse = batch.attend()
    used = excess(out, lse, batch.expected(), fmt=fmt, dtype="bf16",
                  head_dim=shape.head_dim_k, tokens=130)  # fmt: skip
    assert max(used.values()) <= 1, used
