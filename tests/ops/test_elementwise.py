"""Fused norm and rotary embedding against plain torch."""

from __future__ import annotations

import pytest
import torch

from tp_kernels.comm import short_way
from tp_kernels.ops.elementwise import rms_norm, rotary, swiglu

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 576), (3, 5, 7), (2, 33), (0, 4), (1, 16)])
def test_rms_norm(dtype, shape):
    torch.manual_seed(0)
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    with torch.no_grad():
        y = rms_norm(x, weight, 1e-5)
    wide = x.double()
    oracle = weight.double() * wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    # two roundings to the dtype, and in fp32 the mean (K / 16 additions in sequence), root and product
    eps, eps32 = torch.finfo(dtype).eps, torch.finfo(torch.float32).eps
    bound = (eps + (shape[-1] / 32 + 4) * eps32) * oracle.abs() + torch.finfo(dtype).tiny
    assert y.dtype == dtype and y.shape == x.shape
    assert ((y.double() - oracle).abs() <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("batch", "table"), [(1, 1), (3, 3), (3, 1), (0, 1)])
def test_rotary_has_the_bits_of_torch(dtype, batch, table):
    torch.manual_seed(1)
    x = torch.randn(batch, 5, 3, 8).to(dtype)
    angle = torch.randn(table, 5, 8)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    with torch.no_grad():
        fused = rotary(x, cos, sin)
    plain = rotary(x.clone().requires_grad_(), cos, sin)  # gradients: the torch formula
    assert plain.requires_grad and fused.is_contiguous()
    assert torch.equal(fused, plain)


@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu(dtype):
    torch.manual_seed(3)
    special = [0.0, -0.0, 88.5, -88.5, 90.0, -90.0, 103.0, -103.0, 1e4, -1e4, -150.0, 1e-7, -1e-7]
    gate = torch.cat([torch.randn(4000) * 20, torch.tensor(special)]).to(dtype)
    up = torch.randn(gate.shape).to(dtype)
    with torch.no_grad():
        y = swiglu(gate, up)
    wide = gate.double()
    silu = wide / (1 + torch.exp(-wide))
    # e^-x to 3 units in the last place of fp32, sum, quotient and two products; silu and y rounded to the
    # dtype, below `tiny` to its smallest step. Where e^-x is infinite in fp32, silu is 0.
    eps, eps32 = torch.finfo(dtype).eps, torch.finfo(torch.float32).eps
    step = torch.finfo(dtype).tiny * eps + torch.where(wide < -88.7, silu.abs(), 0.0)
    bound = (eps + 4 * eps32) * (silu * up.double()).abs() + step * (1 + up.double().abs())
    assert y.dtype == dtype and ((y.double() - silu * up.double()).abs() <= bound).all()
    special = torch.tensor([float("nan"), float("inf"), -float("inf")]).to(dtype)
    with torch.no_grad():
        found, plain = swiglu(special, torch.ones(3).to(dtype)), torch.nn.functional.silu(special)
    assert torch.equal(found.isnan(), plain.isnan()) and found[1] == float("inf")


def test_strided_input_takes_the_formula():
    x = torch.randn(4, 6, 8)
    with torch.no_grad():
        strided = rms_norm(x.transpose(0, 1), torch.ones(8), 1e-6)
        fused = rms_norm(x.transpose(0, 1).contiguous(), torch.ones(8), 1e-6)
    torch.testing.assert_close(strided, fused, rtol=1e-6, atol=0)


def test_gradients_are_those_of_torch():
    torch.manual_seed(2)
    grads = []
    for function in (
        lambda x, w: rms_norm(x, w, 1e-6),
        lambda x, w: torch.nn.functional.rms_norm(x, (6,), w, 1e-6),
    ):
        torch.manual_seed(2)
        x, weight = torch.randn(3, 6, requires_grad=True), torch.randn(6, requires_grad=True)
        function(x, weight).pow(2).sum().backward()
        grads.append((x.grad, weight.grad))
    for mine, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_when_the_short_way_is_gone():
    x, weight, table = torch.randn(2, 5, 3, 8), torch.randn(8), torch.randn(2, 5, 8)
    norm = lambda x=x, weight=weight, epsilon=1e-6: (
        short_way.rms_norm(x, weight, epsilon) is not None
    )
    turn = lambda x=x, cos=table, sin=table: short_way.rotary(x, cos, sin) is not None
    assert norm() and norm(x[0]) and norm(x[:0]) and norm(x.half(), weight.half())
    assert turn() and turn(x, table[:1], table[:1]) and turn(x[:0], table[:1], table[:1])
    parameter = torch.nn.Parameter(weight)
    with torch.no_grad():
        assert norm(x, parameter)
    assert not norm(x, parameter) and not norm(x, weight.half()) and not norm(x, weight[1:])
    assert not norm(x.transpose(0, 1)) and not norm(x, weight, 1) and not norm(x[..., 0], weight)
    assert not norm(x.double(), weight.double()) and not norm(torch.tensor(1.0), weight)
    assert not turn(x[0]) and not turn(x.transpose(0, 1)) and not turn(x.half())
    assert not turn(x, table[:1], table) and not turn(x, table[:, 1:], table[:, 1:])
    assert not turn(x[..., 1:].contiguous(), *[table[..., 1:].contiguous()] * 2)  # odd
    assert not turn(x, table.clone().requires_grad_())
    gated = lambda gate=x, up=x: short_way.swiglu(gate, up) is not None
    assert not gated(*[torch.ones(1 << 16)] * 2)
    assert gated() and gated(weight, weight) and gated(x[:0], x[:0])
    assert (
        not gated(x, weight)
        and not gated(x.half())
        and not gated(x[1:])
        and not gated(x, parameter)
    )
    assert not gated(x.transpose(0, 1), x.transpose(0, 1)) and not gated(parameter, weight)
    with pytest.raises(TypeError, match="arguments"):
        short_way.rms_norm(x, weight)
