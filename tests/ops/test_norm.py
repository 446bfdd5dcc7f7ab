"""rms_norm and layer_norm as ops: values and every gradient against float64, interpreted kernels, refusals.

The bounds are those of tests/kernels/norm_body.py; the error of a sum of n numbers is n w times the sum of
their magnitudes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.elementwise_body import close, leaves, w
from tests.oracle import digest, lay_out
from tp_kernels import ShapeError, UnsupportedError
from tp_kernels.ops import _local, layer_norm, rms_norm


@pytest.fixture(autouse=True)
def _several_blocks(monkeypatch):
    """Few elements to a block, so that small tensors take several."""
    monkeypatch.setattr(_local, "BLOCK", 40)


DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPSILON = 1e-5
OPERATIONS = {"rms_norm": rms_norm, "layer_norm": layer_norm}


def dense(
    x: Tensor, weight: Tensor, bias: Tensor | None, centered: bool, zero_centered: bool
) -> Tensor:
    """The unsplit layer in the dtype of x."""
    if centered:
        x = x - x.mean(-1, keepdim=True)
    y = x / (x.square().mean(-1, keepdim=True) + EPSILON).sqrt()
    y = y * (1 + weight if zero_centered else weight)
    return y if bias is None else y + bias


def check(
    operation: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    with_residual: bool,
    with_bias: bool,
    zero_centered: bool,
    layout: str = "plain",
    vectors: torch.dtype | None = None,
    implementation: str = "auto",
    offset: float = 0.0,
) -> str:
    """One case; digest of its results. `vectors`: dtype of weight and bias."""
    torch.manual_seed(0)
    centered, n = operation == "layer_norm", shape[-1]
    x, residual, dy, ds = (lay_out(torch.randn(shape).to(dtype), layout) for _ in range(4))
    x = x + offset
    weight, bias = torch.randn(2, n).to(vectors or dtype)
    args: list[Any] = [x, weight, bias] if with_bias else [x, weight]
    more: dict[str, Any] = {"residual": residual} if with_residual else {}
    given = [*args, *more.values()]
    for t in given:
        t.requires_grad_()
    options = {"epsilon": EPSILON, "zero_centered": zero_centered, "implementation": implementation}
    result = OPERATIONS[operation](*args, **more, **options)
    y, s = result if with_residual else (result, x)
    where = (operation, shape, dtype, with_residual, with_bias, zero_centered, layout)
    assert y.dtype == dtype and y.is_contiguous(), where
    assert torch.equal(s, x + residual if with_residual else x), where
    torch.autograd.backward([y, s], [dy, ds]) if with_residual else y.backward(dy)

    wide, scales, shift = leaves(s, weight, bias)
    exact = dense(wide, scales, shift if with_bias else None, centered, zero_centered)
    exact.backward(dy.double())
    with torch.no_grad():
        mean = wide.mean(-1, keepdim=True) * centered
        rstd = ((wide - mean).square().mean(-1, keepdim=True) + EPSILON).rsqrt()
        u, scale = (wide - mean) * rstd, scales + zero_centered
        center = n * w * wide.abs().mean(-1, keepdim=True) * centered
        # of rstd, relatively; three roundings more than the kernel has, of the norm and its square
        spread = (n + 4) * w / 2 + 5 * w + (center * rstd).square() / 2
        unit = rstd * (center + w * (wide - mean).abs()) + u.abs() * (spread + w)
        inner = unit * scale.abs() + 3 * w * (u * scale).abs() + 2 * w * shift.abs()
        close(y, exact, inner, *where)
        size = (dy.double() * scale).abs()
        along = (size * u.abs()).mean(-1, keepdim=True)
        slope = (size * unit).mean(-1, keepdim=True) + (n + 3) * w * along
        level = size.mean(-1, keepdim=True) * centered
        terms = size + level + u.abs() * along
        inner = 2 * w * size + (n + 1) * w * level + u.abs() * slope + unit * along + 4 * w * terms
        inner = rstd * (inner + terms * (spread + w))
        gradient = wide.grad
        if with_residual:
            gradient, inner = gradient + ds.double(), inner + w * ds.double().abs()
            assert digest(residual.grad) == digest(x.grad), where
        close(x.grad, gradient, inner, *where, "dx")
        rows, flat = max(1, s[..., 0].numel()), dy.double().abs().reshape(-1, n)
        parts, units = unit.reshape(-1, n), u.abs().reshape(-1, n)
        inner = (flat * parts).sum(0) + (rows + 1) * w * (flat * units).sum(0)
        close(weight.grad, scales.grad, inner, *where, "d_weight")
        if with_bias:
            close(bias.grad, shift.grad, rows * w * flat.sum(0), *where, "d_bias")
    return digest(y, *(t.grad for t in given))


CASES = [
    (operation, residual, bias, zero_centered)
    for operation in OPERATIONS
    for residual in (False, True)
    for bias in ((False, True) if operation == "layer_norm" else (False,))
    for zero_centered in (False, True)
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_against_float64(case, dtype):
    operation, *options = case
    for shape in ((2, 5, 37), (1, 1), (3, 1, 64), (257, 3)):
        check(operation, shape, dtype, *options)


@pytest.mark.parametrize("case", CASES[:2] + CASES[-2:], ids=str)
def test_any_strides_are_the_same_bits(case):
    operation, *options = case
    layouts = ("plain", "transposed", "offset", "strided")
    call = lambda layout: check(operation, (3, 5, 7), torch.float32, *options, layout)
    assert len(set(map(call, layouts))) == 1


@pytest.mark.parametrize("operation", OPERATIONS)
def test_far_from_zero_and_of_nothing(operation):
    check(operation, (3, 37), torch.float32, False, False, False, offset=1000.0)
    for shape in ((0, 5), (2, 0, 5)):
        check(operation, shape, torch.float32, True, False, False)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("zero_centered", [False, True])
def test_weights_of_another_dtype(operation, zero_centered):
    check(operation, (5, 7), torch.bfloat16, True, False, zero_centered, vectors=torch.float32)


def test_interpreted(interpreted):
    interpreted(1).run(interpreted_norms)


def interpreted_norms() -> None:
    for index, (operation, *options) in enumerate(CASES):
        dtype = DTYPES[index % 3]
        check(operation, (13, 3), dtype, *options, implementation="triton")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_float64_stays(case):
    operation, residual, bias, zero_centered = case
    x, r = (torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weight, b = (torch.randn(5, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def call(x: Tensor, r: Tensor, weight: Tensor, b: Tensor) -> Any:
        args = (x, weight, b) if bias else (x, weight)
        more = {"residual": r} if residual else {}
        return OPERATIONS[operation](*args, zero_centered=zero_centered, **more)

    assert torch.autograd.gradcheck(call, (x, r, weight, b))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_one_of_two_results_used(operation):
    """y or s alone, and nothing for parameters that need nothing."""
    function = OPERATIONS[operation]
    for used in (0, 1):
        torch.manual_seed(0)
        x, residual = (torch.randn(4, 6, requires_grad=True) for _ in range(2))
        weight = torch.randn(6)
        result = function(x, weight, residual=residual)
        result[used].sin().sum().backward()
        (wide,) = leaves((x + residual).detach())
        exact = dense(wide, weight.double(), None, operation == "layer_norm", False)
        (exact if used == 0 else wide).sin().sum().backward()
        torch.testing.assert_close(x.grad, wide.grad.float(), rtol=1e-4, atol=1e-5)
        assert torch.equal(x.grad, residual.grad) and weight.grad is None


def test_residual_of_a_wider_dtype():
    """As autocast leaves them: the sum of both keeps the wider one."""
    torch.manual_seed(0)
    x = torch.randn(4, 6, dtype=torch.bfloat16, requires_grad=True)
    residual, weight = torch.randn(4, 6), torch.randn(6)
    y, s = rms_norm(x, weight, residual=residual)
    assert y.dtype == s.dtype == torch.float32 and torch.equal(s, x + residual)
    y.sum().backward()
    assert x.grad.dtype == torch.bfloat16


def test_what_is_kept():
    """The sum, the weight and two numbers per row: not x, not the residual, no unit vectors."""
    x, residual = (torch.randn(4, 6, requires_grad=True) for _ in range(2))
    weight = torch.randn(6, requires_grad=True)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        s = layer_norm(x, weight, residual=residual)[1]
    assert [tuple(t.shape) for t in kept] == [(4, 6), (6,), (4,), (4,)]
    assert kept[0].data_ptr() == s.data_ptr()


def test_short_way_of_inference():
    """Without gradients in bfloat16 as transformers computes it: the unit vector is rounded."""
    torch.manual_seed(0)
    x, residual = torch.randn(2, 40, 64).to(torch.bfloat16)
    weight = torch.randn(64).to(torch.bfloat16)
    with torch.no_grad():
        y, s = rms_norm(x, weight, residual=residual)
        alone = rms_norm(s, weight)
    wide = s.double()
    unit = (wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt()).to(torch.bfloat16)
    assert digest(y) == digest(alone) and torch.equal(s, x + residual)
    assert (y != weight * unit).double().mean() < 0.005


def test_compiled_is_eager_to_the_bit():
    def step(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        y, s = layer_norm(x, weight, bias, residual=residual)
        return rms_norm(y, weight, zero_centered=True) + s.sin()

    torch._dynamo.reset()
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    for rows in (3, 5):
        results = []
        for function in (step, compiled):
            torch.manual_seed(rows)
            args = [torch.randn(rows, 6, requires_grad=True) for _ in range(2)]
            args += [torch.randn(6, requires_grad=True) for _ in range(2)]
            y = function(*args)
            y.sum().backward()
            results.append(digest(y, *(t.grad for t in args)))
        assert results[0] == results[1]


def test_refused():
    x, weight = torch.ones(2, 6), torch.ones(6)
    for function in OPERATIONS.values():
        with pytest.raises(ShapeError, match="weight is"):
            function(x, weight[:5])
        with pytest.raises(ShapeError, match="scalar"):
            function(weight[0], weight)
        with pytest.raises(ShapeError, match="residual is"):
            function(x, weight, residual=x[:1])
        with pytest.raises(UnsupportedError, match="int64"):
            function(x.long(), weight)
        with pytest.raises(UnsupportedError, match="meta"):
            function(x, weight.to("meta"))
        with pytest.raises(UnsupportedError, match="TRITON_INTERPRET"):
            function(x, weight, implementation="triton")
    with pytest.raises(UnsupportedError, match="one floating dtype"):
        layer_norm(x, weight, weight.double())
