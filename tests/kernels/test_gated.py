"""swiglu and geglu, interpreted: against float64 and its gradients, far from zero, refusals."""

from __future__ import annotations

import pytest
import torch

from tests.kernels import elementwise_body as body
from tests.kernels.body import REAL
from tests.oracle import LAYOUTS
from tp_kernels import ShapeError, UnsupportedError
from tp_kernels.kernels import geglu, swiglu, swiglu_backward

# Several rows to a tile, several tiles to a row, nothing.
SHAPES = [(2, 5, 3), (3, 37), (0, 5), (3, 0)]
CASES = [(activation, layout) for activation in body.ACTIVATIONS for layout in LAYOUTS]


@pytest.mark.parametrize(("activation", "layout"), CASES[::3])
def test_against_float64(interpreted, activation, layout):
    interpreted(1).run(body.gated, REAL, activation, SHAPES, layout)


def test_same_bits_in_every_run(interpreted):
    first, second = (
        interpreted(1).run(body.gated, REAL, "gelu", SHAPES[1:2], "plain") for _ in range(2)
    )
    assert first == second


def test_far_from_zero(interpreted):
    interpreted(1).run(body.far, REAL)


def test_refused():
    x = torch.ones(2, 6)
    with pytest.raises(UnsupportedError, match=r"swiglu: .*TRITON_INTERPRET=1"):
        swiglu(x)  # not in this process
    with pytest.raises(UnsupportedError, match=r"swiglu: .*TRITON_INTERPRET=1"):
        swiglu_backward(x[:, :3], x)
    with pytest.raises(UnsupportedError, match="approximate='fast'"):
        geglu(x, approximate="fast")
    with pytest.raises(UnsupportedError, match="float64"):
        geglu(x.double())
    with pytest.raises(UnsupportedError, match="up is"):
        geglu(x, x.to("meta"))
    for wrong in ((x[:, :5],), (torch.tensor(1.0),), (x, x[:, :5]), (x, x.bfloat16())):
        with pytest.raises(ShapeError):
            swiglu(*wrong)
    with pytest.raises(ShapeError, match="dy is"):
        swiglu_backward(x, x)
