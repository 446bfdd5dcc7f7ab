"""Activations, with their slopes; and in the epilogue of a product, without storing its result before:

    y = round(act(round(x W^T + b)))      act in float32, as torch computes it for 16-bit tensors

So a product with an activation has, up to the error of the function itself, the bits of one without it and
torch's function behind it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton.language as tl
from torch import Tensor

from ._device import device_function, narrow, widen

# Names as in tp_kernels.ops, of which kernels get one as a constant, and the same in torch.
TORCH: dict[str | None, Callable[[Tensor], Tensor]] = {
    None: lambda x: x,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "silu": torch.nn.functional.silu,
    "relu": torch.nn.functional.relu,
}


@device_function
def sigmoids(x):
    """(s(x), s(-x)), neither of which overflows or cancels."""
    small = tl.exp(-tl.abs(x))
    above, below = 1.0 / (1.0 + small), small / (1.0 + small)
    return tl.where(x >= 0, above, below), tl.where(x >= 0, below, above)


@device_function
def value_and_slope(x, ACTIVATION: tl.constexpr):
    """(act(x), act'(x)) of float32, for the formulas in gated.py."""
    if ACTIVATION == "silu":
        s, rest = sigmoids(x)
        value = x * s
        slope = s * (1.0 + x * rest)
    elif ACTIVATION == "gelu_tanh":
        square = x * x
        s, rest = sigmoids(1.5957691216057308 * x * (1.0 + 0.044715 * square))
        value = x * s
        bend = s * rest * 1.5957691216057308 * x * (1.0 + 0.134145 * square)
        slope = s + tl.where(s * rest == 0, 0.0, bend)  # the square may be infinite
    elif ACTIVATION == "relu":
        value = tl.where(x > 0, x, tl.where(x != x, x, 0.0))  # NaN stays
        slope = tl.where(x > 0, 1.0, 0.0)
    elif ACTIVATION == "relu2":
        above = tl.where(x > 0, x, tl.where(x != x, x, 0.0))
        value = above * above
        slope = 2.0 * above
    else:
        s = 0.5 * (1.0 + tl.erf(0.7071067811865476 * x))
        value = x * s
        slope = s + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    return value, slope


@device_function
def activate(value, TYPE: tl.constexpr, ACTIVATION: tl.constexpr):
    """ACTIVATION of a float32 `value` rounded to TYPE, rounded again."""
    rounded = narrow(value, TYPE)
    if ACTIVATION is None:
        return rounded
    x = widen(rounded)
    y, _ = value_and_slope(x, ACTIVATION)
    return narrow(y, TYPE)
