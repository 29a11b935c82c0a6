"""Norm, rope and SiLU gate against float64, at every instruction set level."""

from __future__ import annotations

import pytest
import torch
from kvcore import kernels
from kvcore.errors import InvalidArgument
from kvcore.model.elementwise import Elementwise
from kvcore.model.rope import RopeConfig, RopeTable

EPS = 1e-5
# Odd widths end in part of a vector; rounding to bf16 once leaves half a unit in the last place.
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2**-8}


@pytest.fixture(params=kernels.available_isas(), autouse=True)
def level(request):
    before = kernels.isa()
    kernels.set_isa(request.param)
    yield request.param
    kernels.set_isa(before)


@pytest.fixture(params=["float32", "bfloat16"])
def dtype(request):
    return getattr(torch, request.param)


def values(*shape, dtype, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).to(dtype)


def check(got, expected):
    assert got.dtype in TOLERANCE
    error = (got.double() - expected).abs() / expected.abs().clamp(min=1e-2)
    assert error.max() <= TOLERANCE[got.dtype]


@pytest.mark.parametrize("dim", [1, 7, 16, 100, 576])
@pytest.mark.parametrize("with_delta", [False, True])
def test_rms_norm(dim, with_delta, dtype):
    x, weight = values(5, dim, dtype=dtype, scale=3.0), values(dim, dtype=dtype, seed=1)
    delta = values(5, dim, dtype=dtype, seed=2) if with_delta else None
    total = x if delta is None else x + delta  # rounded to dtype, as a later layer reads it
    exact = total.double()
    scale = torch.rsqrt(exact.square().mean(-1, keepdim=True) + EPS)
    got = Elementwise(dtype, EPS).rms_norm(x, weight, delta)
    check(got, exact * scale * weight.double())
    assert torch.equal(x, total)


@pytest.mark.parametrize("dim", [2, 16, 32, 64, 80, 128])
@pytest.mark.parametrize("with_norm", [False, True])
def test_rope(dim, with_norm, dtype):
    heads = values(4, 7, dim, dtype=dtype)
    before = heads.clone()
    norms = [values(dim, dtype=dtype, seed=s) if with_norm else None for s in (1, 2)]
    rotation = RopeTable(RopeConfig(), dim, 4096).rows(torch.tensor([0, 1, 77, 4095]))
    Elementwise(dtype, EPS).rope(heads, rotation, 3, 2, *norms)
    exact = before.double()[:, :5].clone()
    if with_norm:
        weights = torch.stack([norms[0]] * 3 + [norms[1]] * 2).double()
        exact = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + EPS) * weights
    a, b = exact.chunk(2, -1)
    cos, sin = rotation.double()[:, None, 0], rotation.double()[:, None, 1]
    expected = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    error = (heads[:, :5].double() - expected).abs().max()
    assert error <= TOLERANCE[dtype] * expected.abs().max()
    assert torch.equal(heads[:, 5:], before[:, 5:])


@pytest.mark.parametrize("dim", [1, 15, 64, 100, 1536])
def test_silu_mul(dim, dtype):
    gate_up = values(3, 2 * dim, dtype=dtype, scale=4.0)
    got = Elementwise(dtype, EPS).silu_mul(gate_up)
    gate, up = gate_up.double().chunk(2, -1)
    check(got, torch.nn.functional.silu(gate) * up)


def test_silu_at_the_ends(dtype):
    ends = torch.tensor([[-1e30, -1000.0, -0.0, 0.0, 1000.0, 1e30]])
    gate_up = torch.cat((ends, torch.ones_like(ends)), 1).to(dtype)
    got = Elementwise(dtype, EPS).silu_mul(gate_up)
    ends = ends.to(dtype)
    torch.testing.assert_close(got[0, 4:], ends[0, 4:])
    assert got[0, :4].abs().max() <= 1e-6


def test_nan_stays_in_its_row(dtype):
    ops = Elementwise(dtype, EPS)
    x, weight = values(3, 100, dtype=dtype), values(100, dtype=dtype, seed=1)
    clean_norm, clean_gate = ops.rms_norm(x, weight), ops.silu_mul(x)
    x[1] = float("nan")
    for got, clean in ((ops.rms_norm(x, weight), clean_norm), (ops.silu_mul(x), clean_gate)):
        assert got[1].isnan().all()
        assert torch.equal(got[0], clean[0]) and torch.equal(got[2], clean[2])


def test_arguments_are_checked():
    x = values(2, 8, dtype=torch.float32)
    norm, rope = kernels.rms_norm_ptr, kernels.rope_ptr
    with pytest.raises(InvalidArgument, match="x is a null pointer"):
        norm(0, 8, 0, x.data_ptr(), x.data_ptr(), 1, 8, EPS, 0)
    with pytest.raises(InvalidArgument, match="x_stride=4"):
        norm(x.data_ptr(), 4, 0, x.data_ptr(), x.data_ptr(), 1, 8, EPS, 0)
    with pytest.raises(InvalidArgument, match="dim=3"):
        rope(x.data_ptr(), 8, x.data_ptr(), 0, 0, 1, 1, 1, 3, EPS, 0)
    with pytest.raises(InvalidArgument, match="dtype=9"):
        kernels.silu_mul_ptr(x.data_ptr(), x.data_ptr(), 1, 4, 9)
