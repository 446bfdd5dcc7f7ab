"""Fused element-wise work of inference on the CPU: RMS norm and rotary embedding.

One decoding step of a small model spends as long in a dozen tiny tensor operations per norm as in the
arithmetic of a projection. Where gradients, tracing or another device are involved these functions are the
plain torch formula.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tp_kernels.comm.host_slot import REDUCIBLE
from tp_kernels.comm.symmetric_memory import _host

from ._op import direct


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """weight * (x / sqrt(mean(x^2) + epsilon)) over the last dimension (Zhang and Sennrich, 2019).

    x: [..., H], weight: [H], one dtype. In fp32 inside; the unit vector is rounded to the dtype before it is
    scaled, as transformers does.
    """
    if _fused(x, weight) and weight.dtype == x.dtype:
        out = torch.empty_like(x)
        columns = x.shape[-1]
        _host.rms_norm(
            x.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            x.numel() // columns,
            columns,
            epsilon,
            REDUCIBLE[x.dtype],
        )
        return out
    wide = x.float()
    unit = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return weight * unit.to(x.dtype)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding in its half-split form (Su et al., 2021), heads moved in front of tokens.

    x: [b, s, n, D]; cos, sin: [1 or b, s, D] -> [b, n, s, D]: the pairs (i, i + D/2) turned.
    """
    batch, length, heads, dim = x.shape
    if _fused(x, cos, sin) and cos.dtype == x.dtype and cos.shape[-1] == dim:
        out = x.new_empty(batch, heads, length, dim)
        _host.rotary(
            x.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            out.data_ptr(),
            batch,
            length,
            heads,
            dim,
            cos.shape[0],
            REDUCIBLE[x.dtype],
        )
        return out
    x = x.transpose(1, 2)
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return x * cos.unsqueeze(1) + turned * sin.unsqueeze(1)


def _fused(*tensors: Tensor) -> bool:
    return (
        _host is not None
        and direct(*tensors)
        and all(t.is_cpu and t.dtype in REDUCIBLE and t.is_contiguous() for t in tensors)
    )
