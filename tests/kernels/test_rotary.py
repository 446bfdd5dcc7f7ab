"""rotary, interpreted: against float64 and its gradients, layouts, in place, refusals."""

from __future__ import annotations

import pytest
import torch

from tests.kernels import elementwise_body as body
from tests.kernels.body import REAL
from tests.oracle import LAYOUTS
from tp_kernels import ShapeError, UnsupportedError
from tp_kernels.kernels import rotary, rotary_backward

# Shape and R / 2: pairs only, odd and partial, several tiles of pairs and heads, no pairs, nothing.
CASES = [
    ((3, 2, 4), 2),
    ((2, 3, 3, 13), 5),
    ((2, 1, 3, 44), 19),
    ((2, 3, 1, 3), 0),
    ((2, 0, 1, 4), 2),
]


@pytest.mark.parametrize(("case", "layout"), list(zip(CASES, LAYOUTS, strict=True)), ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
def test_against_float64(interpreted, case, layout, interleaved):
    interpreted(1).run(body.rotary, REAL, *case, interleaved, layout)


def test_refused():
    x, angles = torch.ones(5, 2, 6), torch.ones(5, 3)
    for function in (rotary, rotary_backward):
        with pytest.raises(UnsupportedError, match="TRITON_INTERPRET=1"):  # not in this process
            function(x, angles, angles)
        for wrong in (x[0], x[:, :, :5], x[:4], x.expand(2, 2, 5, 2, 6)):
            with pytest.raises(ShapeError):
                function(wrong, angles, angles)
        with pytest.raises(ShapeError, match="sin is"):
            function(x, angles, angles[:, :2])
        with pytest.raises(ShapeError, match="out is"):
            function(x, angles, angles, out=x[:, :1])
        with pytest.raises(ShapeError, match="adjacent"):
            function(x, angles, angles, out=torch.ones(5, 6, 2).transpose(1, 2))
    with pytest.raises(UnsupportedError, match="float64"):
        rotary(x.double(), angles, angles)
