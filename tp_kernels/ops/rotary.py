"""apply_rotary: rotary position embedding (Su et al., 2021, https://arxiv.org/abs/2104.09864).

    y[a] = round(x[a] cos - x[b] sin)        for R / 2 pairs (a, b) of every head
    y[b] = round(x[b] cos + x[a] sin)

    half-split:   a = i, b = i + R / 2       as in GPT-NeoX and transformers
    interleaved:  a = 2 i, b = 2 i + 1       as in the paper and GPT-J

In float32 (float64 for float64), rounded once. What lies beyond the rotary dimension R of a head passes.
Backward turns the gradient by the negative angle and keeps the table only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tp_kernels.comm.errors import ShapeError, UnsupportedError

from ._local import blocks, check_rows, choose_local, widen
from ._op import FLOATING, register


def apply_rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    implementation: str = "auto",
) -> Tensor:
    """Turn pairs of elements of every head of x by the angles of its token.

    Args:
        x: [b, s, n, D], floating, any strides, so that heads in front of tokens are `x.transpose(1, 2)`.
        cos, sin: [1 or b, s, R / 2] or [s, R / 2] with R <= D, float32 (any floating dtype). Constants: they
            get no gradient.
        interleaved: pairs are neighbours, not half of R apart.
        implementation: "auto", "reference" or "triton", see _local.py.

    Returns:
        y [b, s, n, D], contiguous.

    Raises:
        ShapeError: of shapes that do not fit.
        UnsupportedError: of dtypes and devices, and of a table that asks for a gradient.
    """
    check_rows("apply_rotary", x)
    if cos.dim() == 2:
        cos, sin = cos.unsqueeze(0), sin.unsqueeze(0)
    fits = x.dim() == 4 and cos.dim() == 3 and cos.shape == sin.shape
    if (
        not fits
        or cos.shape[0] not in (1, x.shape[0])
        or cos.shape[1] != x.shape[1]
        or 2 * cos.shape[2] > x.shape[3]
    ):
        raise ShapeError(
            f"apply_rotary: x is {tuple(x.shape)}, cos {tuple(cos.shape)}, sin {tuple(sin.shape)}; "
            "expected [b, s, n, D] and twice [1 or b, s, R / 2] with R <= D"
        )
    for table in (cos, sin):
        if table.dtype not in FLOATING or table.device != x.device:
            raise UnsupportedError(
                f"apply_rotary: the table is {table.dtype} on {table.device}, x is on {x.device}"
            )
        if table.requires_grad and torch.is_grad_enabled():
            raise UnsupportedError(
                "apply_rotary: cos and sin get no gradient; pass them detached, or turn x by torch "
                "operations to learn the angles"
            )
    return _op(x, cos, sin, interleaved, False, implementation)


def _kernel(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool, implementation: str
) -> Tensor:
    if choose_local("rotary", x, implementation) == "triton":
        from tp_kernels.kernels.rotary import rotary

        many = x.shape[0] != 1 and cos.shape[0] == 1
        table = (cos[0], sin[0]) if many else (cos, sin)
        return rotary(x, *table, interleaved=interleaved, inverse=inverse)
    y = x.new_empty(x.shape)
    wide = torch.promote_types(x.dtype, torch.float32)
    cos, sin = cos.to(wide).unsqueeze(2), sin.to(wide).unsqueeze(2)
    sin = -sin if inverse else sin
    half = cos.shape[-1]
    (a, b), (to_a, to_b) = (_pairs(t, half, interleaved) for t in (x, y))
    for part in blocks(x.shape[1], x.shape[0] * x.shape[2] * half):
        c, s = cos[:, part], sin[:, part]
        first, second = widen(a[:, part]), widen(b[:, part])
        to_a[:, part] = (first * c).sub_(second * s)
        to_b[:, part] = (second * c).add_(first * s)
    y[..., 2 * half :] = x[..., 2 * half :]
    return y


def _pairs(x: Tensor, half: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    turned = x[..., : 2 * half]
    if interleaved:
        return turned[..., ::2], turned[..., 1::2]
    return turned[..., :half], turned[..., half:]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, cos, sin, ctx.interleaved, ctx.inverse, ctx.how = inputs
    ctx.save_for_backward(cos, sin)


def _backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    cos, sin = ctx.saved_tensors
    dx = _op(dy, cos, sin, ctx.interleaved, not ctx.inverse, ctx.how)
    return dx, None, None, None, None, None


_op = register(
    "apply_rotary",
    "(Tensor x, Tensor cos, Tensor sin, bool interleaved, bool inverse, str implementation) -> Tensor",
    _kernel,
    lambda x, cos, sin, interleaved, inverse, implementation: x.new_empty(x.shape),
    _setup,
    _backward,
)
