"""gated, swiglu, geglu as ops: values and gradients against float64, the interpreted kernel, refusals.

The bounds are those of tests/kernels/elementwise_body.py.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.elementwise_body import TINY, activation_errors, close, gelu_tanh, leaves, w
from tests.oracle import LAYOUTS, digest, lay_out
from tp_kernels import ShapeError, UnsupportedError
from tp_kernels.ops import _local, gated, geglu, swiglu
from tp_kernels.ops.gated import GATES


@pytest.fixture(autouse=True)
def _several_blocks(monkeypatch):
    """Few elements to a block, so that small tensors take several."""
    monkeypatch.setattr(_local, "BLOCK", 40)


DTYPES = [torch.float32, torch.bfloat16, torch.float16]
DENSE = {
    "silu": lambda x: x * x.sigmoid(),
    "gelu": lambda x: x * torch.erfc(-x / 2**0.5) / 2,
    "gelu_tanh": gelu_tanh,
    "relu": lambda x: x.clamp(min=0),
    "relu2": lambda x: x.clamp(min=0) ** 2,
}


def draw(shape: tuple[int, ...], dtype: torch.dtype, layout: str = "plain") -> list[Tensor]:
    gate, up, dy = torch.randn(3, *shape, dtype=torch.float64).to(dtype)
    return [lay_out(t, layout) for t in (gate * 4, up, dy)]


def errors(activation: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """Of act(x) and act'(x) in float32: those of the kernels, and of the functions in torch's vectors.

    Its exp, erf and tanh have errors of up to 4 w and a cancelling sum each, where 1 + erf and 1 + tanh have
    absolute ones: 8 w times the magnitudes of the terms.
    """
    if activation in ("relu", "relu2"):
        return 2 * w * DENSE[activation](x) + TINY, 2 * w * 2 * x.abs() + TINY
    value, slope = activation_errors(activation, x)
    return value + 8 * w * x.abs(), slope + 16 * w * (1 + x.abs())


def check(activation: str, dtype: torch.dtype, layout: str, implementation: str) -> None:
    torch.manual_seed(0)
    gate, up, dy = draw((3, 5, 7), dtype, layout)
    x, factor = leaves(gate, up)
    exact = DENSE[activation](x) * factor
    exact.backward(dy.double())
    gate.requires_grad_(), up.requires_grad_()
    y = gated(gate, up, activation, implementation=implementation)
    y.backward(dy)
    assert y.dtype == gate.grad.dtype == up.grad.dtype == dtype and y.is_contiguous()
    value, slope = errors(activation, x.detach())
    outer = (dy.double() * factor).abs().detach()
    close(y.detach(), exact.detach(), factor.abs().detach() * value, activation, dtype)
    close(gate.grad, x.grad, outer * slope, activation, dtype, "d_gate")
    close(up.grad, factor.grad, dy.double().abs() * value, activation, dtype, "d_up")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", GATES)
def test_against_float64(activation, dtype):
    for layout in LAYOUTS:
        check(activation, dtype, layout, "auto")


@pytest.mark.parametrize("activation", GATES)
def test_float64_stays(activation):
    gate, up = (torch.randn(2, 3, dtype=torch.float64).requires_grad_() for _ in range(2))
    assert torch.autograd.gradcheck(lambda *args: gated(*args, activation), (gate, up))


def test_interpreted(interpreted):
    interpreted(1).run(interpreted_gates)


def interpreted_gates() -> None:
    for index, activation in enumerate(GATES):
        check(activation, DTYPES[index % 3], "plain", "triton")


def test_names():
    torch.manual_seed(0)
    gate, up, _ = draw((4, 6), torch.bfloat16)
    gate.requires_grad_()
    for y, activation in (
        (swiglu(gate, up), "silu"),
        (geglu(gate, up), "gelu"),
        (geglu(gate, up, "tanh"), "gelu_tanh"),
    ):
        assert digest(y) == digest(gated(gate, up, activation))


def test_only_gate_and_up_are_kept():
    gate, up = (torch.randn(4, 6, requires_grad=True) for _ in range(2))
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        swiglu(gate, up)
    assert [t.data_ptr() for t in kept] == [gate.data_ptr(), up.data_ptr()]


def test_short_way_of_inference():
    """Its bits are those of the function that rounds the activation, as transformers does."""
    torch.manual_seed(0)
    gate, up, _ = draw((40, 60), torch.bfloat16)
    with torch.no_grad():
        y = swiglu(gate, up)
    wide = gate.double()
    silu = (wide / (1 + torch.exp(-wide))).to(torch.bfloat16)
    # exp may be off by units of fp32, which moves a rounding to bf16 once in thousands
    assert ((y != silu * up).double().mean()) < 0.005
    once = (silu.double() * 0 + wide / (1 + torch.exp(-wide)) * up.double()).to(torch.bfloat16)
    assert (y != once).double().mean() > 0.05


def test_compiled_is_eager_to_the_bit():
    torch._dynamo.reset()
    functions = [lambda *args: gated(*args, "gelu_tanh").sin()]
    functions.append(torch.compile(functions[0], backend="aot_eager", fullgraph=True))
    for rows in (3, 5, 0):
        results = []
        for function in functions:
            torch.manual_seed(rows)
            gate, up = (torch.randn(rows, 6, requires_grad=True) for _ in range(2))
            y = function(gate, up)
            y.sum().backward()
            results.append(digest(y, gate.grad, up.grad))
        assert results[0] == results[1]


def test_refused():
    x = torch.ones(2, 6)
    with pytest.raises(UnsupportedError, match="activation='tanh'"):
        gated(x, x, "tanh")
    with pytest.raises(UnsupportedError, match="approximate='fast'"):
        geglu(x, x, "fast")
    with pytest.raises(ShapeError, match="up is"):
        gated(x, x[:, :5])
    with pytest.raises(ShapeError, match="one dtype"):
        gated(x, x.bfloat16())
    with pytest.raises(UnsupportedError, match="int64"):
        gated(x.long(), x.long())
    with pytest.raises(UnsupportedError, match="meta"):
        gated(x, x.to("meta"))
    with pytest.raises(UnsupportedError, match="TRITON_INTERPRET"):
        swiglu(x, x, implementation="triton")
    x.requires_grad_()
    with pytest.raises(UnsupportedError, match="no second derivative"):
        torch.autograd.grad(swiglu(x, x).sum(), x, create_graph=True)
