"""Activations in the epilogue of a product: what torch makes of a rounded result, without storing it before.

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
def activate(value, TYPE: tl.constexpr, ACTIVATION: tl.constexpr):
    """ACTIVATION of a float32 `value` rounded to TYPE, rounded again."""
    rounded = narrow(value, TYPE)
    if ACTIVATION is None:
        return rounded
    x = widen(rounded)
    if ACTIVATION == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        # 0.5 (1 + tanh(u)) is the logistic function of 2 u.
        y = x * logistic(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif ACTIVATION == "silu":
        y = x * logistic(x)
    else:
        y = tl.where(x > 0, x, tl.where(x != x, x, 0.0))  # NaN stays
    return narrow(y, TYPE)


@device_function
def logistic(x):
    return 1.0 / (1.0 + tl.exp(-x))
