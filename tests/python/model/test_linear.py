"""Linear layers: right, and the same bits for a row however many are computed together."""

from __future__ import annotations

import pytest
import torch
from kvcore.model.weights import Linear

SHAPES = [(96, 64), (100, 64), (64, 100), (576, 576), (576, 1536), (128, 4096), (64, 9001)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_have_the_same_bits_however_many(shape, dtype):
    """Sums that cancel leave only rounding errors, so any other order of adding shows."""
    out_features, in_features = shape
    torch.manual_seed(5)
    half = in_features // 2
    weight, x = torch.randn(out_features, in_features), torch.randn(200, in_features)
    order = torch.randperm(half)
    weight[:, half : 2 * half], weight[:, 2 * half :] = weight[:, order], 0
    x[:, half : 2 * half], x[:, 2 * half :] = -x[:, order], 0
    x = x.to(getattr(torch, dtype))
    linear = Linear(weight.to(x.dtype))
    assert linear.row_invariant
    whole = linear(x)
    for rows in (1, 2, 3, 7, 8, 9, 16, 33, 64, 65, 128, 199):
        for start in (0, 1, 100, 200 - rows):
            got = linear(x[start : start + rows])
            assert torch.equal(got, whole[start : start + rows][: len(got)]), (rows, start)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("with_bias", [True, False])
def test_equals_the_product_in_float64(packed, with_bias, monkeypatch):
    if not packed:
        monkeypatch.setattr("kvcore.model.weights._can_pack", lambda dtype: False)
    torch.manual_seed(6)
    weight, x = torch.randn(48, 80), torch.randn(5, 80)
    bias = torch.randn(48) if with_bias else None
    linear = Linear(weight, bias)
    assert linear.packed == packed
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    torch.testing.assert_close(linear(x).double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(linear(x[:1]).double(), expected[:1], rtol=1e-5, atol=1e-5)


def test_a_kernel_that_depends_on_the_number_of_rows_is_noticed(monkeypatch):
    """Plain torch float32 has kernels of its own for a few rows."""
    monkeypatch.setattr("kvcore.model.weights._can_pack", lambda dtype: False)
    weight = torch.randn(72, 1032)
    x = torch.randn(64, 1032)
    plain = [torch.nn.functional.linear(x[:n], weight) for n in (1, 2, 3, 64)]
    same = all(torch.equal(part, plain[-1][: len(part)]) for part in plain)
    assert Linear(weight).row_invariant == same
