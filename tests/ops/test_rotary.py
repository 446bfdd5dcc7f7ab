"""apply_rotary: values and gradients against products of 2 x 2 matrices in float64, refusals."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.elementwise_body import close, leaves, turned, w
from tests.oracle import LAYOUTS, digest, lay_out
from tp_kernels import ShapeError, UnsupportedError
from tp_kernels.ops import _local, apply_rotary


@pytest.fixture(autouse=True)
def _several_blocks(monkeypatch):
    """Few elements to a block, so that small tensors take several."""
    monkeypatch.setattr(_local, "BLOCK", 40)


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def table(batch: int, tokens: int, half: int) -> tuple[Tensor, Tensor]:
    angle = torch.randn(batch, tokens, half) * 3
    return angle.cos(), angle.sin()


def check(
    dtype: torch.dtype, interleaved: bool, half: int, batch: int, layout: str, implementation: str
) -> str:
    torch.manual_seed(0)
    x, dy = (lay_out(torch.randn(3, 5, 2, 9).to(dtype), layout) for _ in range(2))
    cos, sin = table(batch, 5, half)
    (wide,) = leaves(x)
    exact, sizes = turned(wide, cos.double(), sin.double(), interleaved)
    exact.backward(dy.double())
    y = apply_rotary(
        x.requires_grad_(), cos, sin, interleaved=interleaved, implementation=implementation
    )
    y.backward(dy)
    close(y.detach(), exact.detach(), 2 * w * sizes, dtype, interleaved, half)
    _, sizes = turned(dy.double(), cos.double(), sin.double(), interleaved)
    close(x.grad, wide.grad, 2 * w * sizes, dtype, interleaved, half, "dx")
    assert y.dtype == x.grad.dtype == dtype and y.is_contiguous()
    assert digest(y[..., 2 * half :]) == digest(x[..., 2 * half :])
    return digest(y, x.grad)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("half", "batch"), [(4, 1), (3, 3), (0, 1)])
def test_against_float64(interleaved, half, batch, dtype):
    layouts = [layout for layout in LAYOUTS if layout != "expanded"]
    same = {check(dtype, interleaved, half, batch, layout, "auto") for layout in layouts}
    assert len(same) == 1


def test_interpreted(interpreted):
    interpreted(1).run(interpreted_rotary)


def interpreted_rotary() -> None:
    for dtype, interleaved, half, batch in (
        (torch.float32, False, 4, 1),
        (torch.bfloat16, True, 3, 3),
        (torch.float16, True, 4, 1),
    ):
        check(dtype, interleaved, half, batch, "plain", "triton")


@pytest.mark.parametrize("interleaved", [False, True])
def test_float64_stays(interleaved):
    x = torch.randn(2, 3, 2, 6, dtype=torch.float64, requires_grad=True)
    cos, sin = (t.double() for t in table(1, 3, 2))
    call = lambda x: apply_rotary(x, cos, sin, interleaved=interleaved)
    assert torch.autograd.gradcheck(call, (x,))
    assert digest(apply_rotary(x, cos[0], sin[0], interleaved=interleaved)) == digest(call(x))


def test_heads_in_front_of_tokens_and_only_the_table_kept():
    torch.manual_seed(0)
    x, (cos, sin) = torch.randn(2, 5, 3, 8), table(1, 5, 4)
    heads_first = x.transpose(1, 2).contiguous().requires_grad_()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = apply_rotary(heads_first.transpose(1, 2), cos, sin)
    assert digest(y) == digest(apply_rotary(x, cos, sin))
    assert [t.data_ptr() for t in kept] == [cos.data_ptr(), sin.data_ptr()]


def test_compiled_is_eager_to_the_bit():
    torch._dynamo.reset()
    functions = [lambda x, *t: apply_rotary(x, *t, interleaved=True).sin()]
    functions.append(torch.compile(functions[0], backend="aot_eager", fullgraph=True))
    for tokens in (3, 5):
        results = []
        for function in functions:
            torch.manual_seed(tokens)
            x = torch.randn(2, tokens, 3, 8, requires_grad=True)
            y = function(x, *table(1, tokens, 3))
            y.sum().backward()
            results.append(digest(y, x.grad))
        assert results[0] == results[1]


def test_refused():
    x, (cos, sin) = torch.ones(2, 5, 3, 8), table(2, 5, 4)
    for wrong in (
        (x[0], cos, sin),
        (x, cos[:, :4], sin[:, :4]),
        (x, cos, sin[:1]),
        (x[..., :7], cos, sin),
        (torch.ones(3, 5, 3, 8), cos, sin),
    ):
        with pytest.raises(ShapeError, match="expected"):
            apply_rotary(*wrong)
    with pytest.raises(UnsupportedError, match="no gradient"):
        apply_rotary(x, cos.requires_grad_(), sin)
    with pytest.raises(UnsupportedError, match="int64"):
        apply_rotary(x, cos.long(), sin.long())
    with pytest.raises(UnsupportedError, match="TRITON_INTERPRET"):
        apply_rotary(x, cos.detach(), sin, implementation="triton")
