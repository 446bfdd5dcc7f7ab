"""Fused element-wise work of inference on the CPU: RMS norm, SwiGLU and rotary embedding.

One decoding step of a small model spends as long in a dozen tiny tensor operations per norm as in the
arithmetic of a projection. Where gradients, tracing or another device are involved these functions are the
plain torch formula.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn.functional import silu

from tp_kernels.comm import short_way


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """weight * (x / sqrt(mean(x^2) + epsilon)) over the last dimension (Zhang and Sennrich, 2019).

    x: [..., H], weight: [H], one dtype. In fp32 inside; the unit vector is rounded to the dtype before it is
    scaled, as transformers does.
    """
    if not is_compiling():
        y = short_way.rms_norm(x, weight, epsilon)
        if y is not None:
            return y
    wide = x.float()
    unit = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return weight * unit.to(x.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up (Shazeer, 2020), both [...] of one dtype; silu is rounded to it before the product."""
    if not is_compiling():
        y = short_way.swiglu(gate, up)
        if y is not None:
            return y
    return silu(gate) * up


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding in its half-split form (Su et al., 2021), heads moved in front of tokens.

    x: [b, s, n, D]; cos, sin: [1 or b, s, D] -> [b, n, s, D]: the pairs (i, i + D/2) turned.
    """
    if not is_compiling():
        y = short_way.rotary(x, cos, sin)
        if y is not None:
            return y
    x = x.transpose(1, 2)
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return x * cos.unsqueeze(1) + turned * sin.unsqueeze(1)
