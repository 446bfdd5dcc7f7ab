"""rotary: rotary position embedding (Su et al., 2021, https://arxiv.org/abs/2104.09864).

    y[a] = round(x[a] cos - x[b] sin)        for R / 2 pairs (a, b) of every head, in float32
    y[b] = round(x[b] cos + x[a] sin)

    half-split:   a = i, b = i + R / 2       as in GPT-NeoX and transformers
    interleaved:  a = 2 i, b = 2 i + 1       as in the paper and GPT-J

What lies beyond the rotary dimension R of a head is copied. Backward turns the gradient by the negative
angle: the same kernel with -sin; cos and sin get no gradient. Nothing is communicated: ranks have whole
heads.

Graphs: see _launch.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tp_kernels.comm.errors import ShapeError

from ._device import narrow, widen
from ._launch import TILE, check_alike, launch


def reference(
    x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, inverse: bool = False
) -> Tensor:
    """y, differentiable in x."""
    half = cos.shape[-1]
    turned, rest = x[..., : 2 * half].float(), x[..., 2 * half :]
    cos, sin = cos.float().unsqueeze(-2), sin.float().unsqueeze(-2)
    sin = -sin if inverse else sin
    if interleaved:
        first, second = turned[..., ::2], turned[..., 1::2]
    else:
        first, second = turned.chunk(2, dim=-1)
    pair = (first * cos - second * sin, second * cos + first * sin)
    y = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat((y.to(x.dtype), rest), dim=-1)


@triton.jit
def turn(
    x, cos, sin, y, tokens, heads, half, rest,
    x_batch, x_token, x_head, y_batch, y_token, y_head, cos_batch, cos_token,
    INVERSE: tl.constexpr, INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A program takes a token of x, y [batch, tokens, heads, 2 half + rest]; cos, sin [.., tokens, half]."""
    TYPE: tl.constexpr = y.dtype.element_ty
    batch = (tl.program_id(0) // tokens).to(tl.int64)
    token = (tl.program_id(0) % tokens).to(tl.int64)
    x += batch * x_batch + token * x_token
    y += batch * y_batch + token * y_token
    at = batch * cos_batch + token * cos_token
    for start in range(0, half, COLUMNS):
        column = start + tl.arange(0, COLUMNS)[None, :]
        c = widen(tl.load(cos + at + column, mask=column < half, other=0.0))
        s = widen(tl.load(sin + at + column, mask=column < half, other=0.0))
        if INVERSE:
            s = -s
        for first in range(0, heads, ROWS):
            head = (first + tl.arange(0, ROWS)[:, None]).to(tl.int64)
            if INTERLEAVED:
                both = 2 * start + tl.arange(0, 2 * COLUMNS)[None, :]
                mask = (head < heads) & (both < 2 * half)
                pairs = widen(tl.load(x + head * x_head + both, mask=mask, other=0.0))
                a, b = tl.split(tl.reshape(pairs, [ROWS, COLUMNS, 2]))
                turned = tl.reshape(tl.join(a * c - b * s, b * c + a * s), [ROWS, 2 * COLUMNS])
                tl.store(y + head * y_head + both, narrow(turned, TYPE), mask=mask)
            else:
                mask = (head < heads) & (column < half)
                a = widen(tl.load(x + head * x_head + column, mask=mask, other=0.0))
                b = widen(tl.load(x + head * x_head + column + half, mask=mask, other=0.0))
                there = y + head * y_head + column
                tl.store(there, narrow(a * c - b * s, TYPE), mask=mask)
                tl.store(there + half, narrow(b * c + a * s, TYPE), mask=mask)
    for start in range(0, rest, COLUMNS):
        column = start + tl.arange(0, COLUMNS)[None, :]
        for first in range(0, heads, ROWS):
            head = (first + tl.arange(0, ROWS)[:, None]).to(tl.int64)
            mask = (head < heads) & (column < rest)
            same = tl.load(x + head * x_head + 2 * half + column, mask=mask)
            tl.store(y + head * y_head + 2 * half + column, same, mask=mask)


def tiling(heads: int, half: int) -> dict[str, int]:
    """Constants ROWS (heads) and COLUMNS (pairs) of a tile."""
    columns = min(TILE // 2, triton.next_power_of_2(max(half, 1)))
    rows = min(TILE // 2 // columns, triton.next_power_of_2(max(heads, 1)))
    return {"ROWS": rows, "COLUMNS": columns}


def rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    inverse: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Turn pairs of elements of every head of x by the angles of its token.

    Args:
        x: [tokens, heads, D] or [batch, tokens, heads, D]; float32, bfloat16 or float16; any strides, so that
            heads in front of tokens are `x.transpose(-3, -2)`.
        cos, sin: [tokens, R / 2] or [batch, tokens, R / 2] with R <= D; any of these dtypes.
        interleaved: pairs are neighbours, not half of R apart.
        inverse: turn by the negative angle, which is the backward.
        out: takes the result; may be x.

    Returns:
        y like x, contiguous, or `out`.

    Raises:
        ShapeError: of shapes that do not fit.
        UnsupportedError: of dtypes and devices; CPU tensors without the interpreter.
    """
    if x.dim() not in (3, 4) or cos.dim() not in (2, 3) or 2 * cos.shape[-1] > x.shape[-1]:
        raise ShapeError(
            f"rotary: x is {tuple(x.shape)}, cos {tuple(cos.shape)}; expected [tokens, heads, D] and "
            "[tokens, R / 2], or with a batch before, with R <= D"
        )
    tokens, heads, dim = x.shape[-3:]
    half = cos.shape[-1]
    angles = (*x.shape[: cos.dim() - 1], half) if cos.dim() == x.dim() - 1 else (tokens, half)
    check_alike("rotary", x, cos=(cos, angles), sin=(sin, angles), out=(out, x.shape))
    y = x.new_empty(x.shape) if out is None else out
    overlapping = any(n > 1 and step == 0 for n, step in zip(y.shape, y.stride(), strict=True))
    if y.dtype != x.dtype or overlapping or (y.numel() and dim > 1 and y.stride(-1) != 1):
        raise ShapeError(
            f"rotary: out is {y.dtype} with strides {y.stride()}; expected {x.dtype} and adjacent "
            "elements in a head, none twice"
        )
    batches, to = (x, y) if x.dim() == 4 else (x[None], y[None])
    if dim > 1 and batches.stride(-1) != 1:
        batches = batches.contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    launch(
        turn, "rotary", len(batches) * tokens if heads * dim else 0,
        batches, cos, sin, to, tokens, heads, half, dim - 2 * half,
        *batches.stride()[:3], *to.stride()[:3],
        tokens * half if cos.dim() == 3 else 0, half,
        INVERSE=inverse, INTERLEAVED=interleaved, **tiling(heads, half),
    )  # fmt: skip
    return y


def rotary_backward(
    dy: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """dx for the gradient dy of y; arguments and errors of `rotary`; `out` may be dy."""
    return rotary(dy, cos, sin, interleaved=interleaved, inverse=True, out=out)
