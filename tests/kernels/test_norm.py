"""rms_norm and layer_norm, interpreted: float64 and its gradients, same bits in every run, refusals."""

from __future__ import annotations

import pytest
import torch

from tests.kernels import norm_body as body
from tests.kernels.body import REAL
from tests.oracle import LAYOUTS
from tp_kernels import ShapeError, UnsupportedError
from tp_kernels.kernels import layer_norm, layer_norm_backward, rms_norm, rms_norm_backward

OPERATIONS = ["rms_norm", "layer_norm"]
# Several rows to a tile and parts of the sums over rows; several tiles to a row.
SHAPES = [(13, 3), (2, 2, 37)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_against_float64(interpreted, operation, layout):
    turn = LAYOUTS.index(layout)
    dtypes = body.DTYPES if turn == 0 else body.DTYPES[turn % 3 :][:1]
    interpreted(1).run(body.norm, REAL, operation, SHAPES, layout, dtypes)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_far_from_zero(interpreted, operation):
    """A mean 1000 times the deviation: squares of float32 would cancel."""
    shapes, dtypes = [(3, 37)], (torch.float32,)
    interpreted(1).run(body.norm, REAL, operation, shapes, "plain", dtypes, 1000.0)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_of_nothing(interpreted, operation):
    """No rows: no gradient, which is zero and not what was in memory."""
    interpreted(1).run(body.norm, REAL, operation, [(0, 5), (2, 0, 5)], "plain", (torch.float32,))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_same_bits_in_every_run(interpreted, operation):
    first, second = (
        interpreted(1).run(body.norm, REAL, operation, SHAPES[:1], "plain", (torch.float32,))
        for _ in range(2)
    )
    assert first == second


def test_weights_of_another_dtype(interpreted):
    interpreted(1).run(body.mixed_dtypes, REAL)


def test_refused():
    x, weight, rstd = torch.ones(2, 6), torch.ones(6), torch.ones(2)
    calls = [
        lambda **more: rms_norm(x, weight, **more),
        lambda **more: layer_norm(x, weight, **more),
        lambda **more: rms_norm_backward(x, x, weight, rstd, **more),
        lambda **more: layer_norm_backward(x, x, weight, rstd, rstd, **more),
    ]
    for index, call in enumerate(calls):
        with pytest.raises(UnsupportedError, match=r"norm.*: .*TRITON_INTERPRET=1"):
            call()  # not in this process
        with pytest.raises(ShapeError, match="expected \\(2, 6\\)"):
            call(**{"residual" if index < 2 else "ds": x[:1]})
    for function in (rms_norm, layer_norm):
        with pytest.raises(ShapeError, match="weight is"):
            function(x, weight[:5])
        with pytest.raises(ShapeError, match="scalar"):
            function(weight[0], weight)
        with pytest.raises(UnsupportedError, match="float64"):
            function(x.double(), weight)
    with pytest.raises(ShapeError, match="rstd is"):
        rms_norm_backward(x, x, weight, rstd[:1])
