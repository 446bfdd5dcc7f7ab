"""dropout: a mask that depends on a key and on where an element is in the unsplit tensor, not on the rank.

    y = round(x / (1 - p) + residual)     where word(key, index) >= p 2^32,  else residual
    dx = round(dy / (1 - p))              where the same,                    else 0

`index` counts the elements of the unsplit tensor in row-major order, and word(key, index) is word index % 4
of Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) of the counter
(index / 4, 0) in 64 bits each: what `tl.randint4x(key, index / 4)` gives. So ranks that hold parts of a
tensor have the parts of its mask, ranks that hold all of it have the same one, and all implementations agree
to the bit. Nothing of the mask is kept: backward draws it again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tp_kernels.comm.errors import ShapeError, UnsupportedError
from tp_kernels.comm.host_slot import REDUCIBLE
from tp_kernels.comm.symmetric_memory import _host

from ._local import alike, check_rows, choose_local, widen
from ._op import register

LOW = 0xFFFFFFFF


def dropout(
    x: Tensor,
    p: float,
    *,
    key: Tensor,
    dim: int = 0,
    start: int = 0,
    size: int | None = None,
    residual: Tensor | None = None,
    implementation: str = "auto",
) -> Tensor:
    """Zero a share p of the elements, scale the others by 1 / (1 - p), add the residual.

    Args:
        x: [...], floating, any strides; the part [start, start + x.shape[dim]) along `dim` of an unsplit
            tensor that has `size` there.
        p: probability of an element to be zeroed, in [0, 1].
        key: int64 [] on the device of x; equal on all ranks that hold parts of one tensor. Every key is
            another mask: never use one twice. See `tp_kernels.layers.draw_key`.
        size: default start + x.shape[dim].
        residual: like x. If its dtype is another one, y has the wider of both.
        implementation: "auto", "reference", "host" or "triton", see _local.py.

    Returns:
        y like x.

    Raises:
        ShapeError: of shapes that do not fit, and parts that are not inside.
        UnsupportedError: of dtypes, devices, keys and probabilities.
    """
    check_rows("dropout", x, residual=residual)
    if not 0 <= p <= 1:
        raise UnsupportedError(f"dropout: p={p}; expected a probability, 0 to 1")
    if key.dtype != torch.int64 or key.dim() != 0 or key.device != x.device:
        raise UnsupportedError(
            f"dropout: key is {key.dtype} {tuple(key.shape)} on {key.device}; expected int64 [] on "
            f"{x.device}, as tp_kernels.layers.draw_key(x.device) makes"
        )
    if not -x.dim() <= dim < x.dim():
        raise ShapeError(f"dropout: dim={dim}, x is {tuple(x.shape)}")
    dim %= x.dim()
    size = start + x.shape[dim] if size is None else size
    if start < 0 or start + x.shape[dim] > size:
        raise ShapeError(
            f"dropout: [{start}, {start + x.shape[dim]}) along dimension {dim} is not inside of 0..{size}"
        )
    x, residual = alike(x, residual)
    return _op(x, residual, key, float(p), dim, start, size, implementation)


def threshold(p: float) -> int:
    """Elements whose word is at least this are kept; 2^32 for none."""
    return math.ceil(p * 2**32)


def steps(shape: Sequence[int], dim: int, size: int) -> list[int]:
    """By dimension, how far apart neighbours are in the order of the unsplit tensor."""
    whole = [size if d == dim else n for d, n in enumerate(shape)]
    return [math.prod(whole[d + 1 :]) for d in range(len(whole))]


def words(key: Tensor, index: Tensor) -> Tensor:
    """word(key, index), int64 in [0, 2^32), of int64 indexes."""
    group = index >> 2
    c0, c1 = group & LOW, group >> 32
    c2, c3 = torch.zeros_like(c0), torch.zeros_like(c0)
    k0, k1 = key & LOW, (key >> 32) & LOW
    for _ in range(10):  # products of 64 bits wrap, and their halves are what is wanted
        first, second = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c2 = (second >> 32 & LOW) ^ c1 ^ k0, (first >> 32 & LOW) ^ c3 ^ k1
        c1, c3 = second & LOW, first & LOW
        k0, k1 = (k0 + 0x9E3779B9) & LOW, (k1 + 0xBB67AE85) & LOW
    which = index & 3
    return torch.where(which < 2, torch.where(which == 0, c0, c1), torch.where(which == 2, c2, c3))


def _kernel(
    x: Tensor,
    residual: Tensor | None,
    key: Tensor,
    p: float,
    dim: int,
    start: int,
    size: int,
    implementation: str,
) -> Tensor:
    apart = steps(x.shape, dim, size)
    first, least = start * apart[dim], threshold(p)
    y = torch.empty_like(x)  # dense, with the dimensions of x in their order
    if least > LOW:
        return y.zero_() if residual is None else y.copy_(residual)
    name = choose_local("dropout", x, implementation)
    if name != "reference" and y.numel():
        x, residual, dense, sizes, apart = _laid_out(x, residual, y, apart)
        if name == "host":
            _host_kernel(x, residual, dense, sizes, apart, first, key, least, p)
        else:
            from tp_kernels.kernels.dropout import dropout as kernel

            kernel(x, residual, dense, sizes, apart, first, key, least, 1 / (1 - p))
        return y
    index = torch.full((), first, dtype=torch.int64, device=x.device)
    for d, (n, step) in enumerate(zip(x.shape, apart, strict=True)):
        along = torch.arange(n, device=x.device) * step
        index = index + along.view(-1, *[1] * (x.dim() - 1 - d))
    kept = widen(x) * (1 / (1 - p))
    kept = torch.where(words(key, index) >= least, kept, 0)
    return y.copy_(kept if residual is None else kept + widen(residual))


def _laid_out(
    x: Tensor, residual: Tensor | None, y: Tensor, apart: list[int]
) -> tuple[Tensor, Tensor | None, Tensor, list[int], list[int]]:
    """All in the order of the memory of y, and its sizes and steps in as few dimensions as do."""
    shape, strides = y.shape, y.stride()
    order = sorted(range(y.dim()), key=lambda d: -strides[d])
    if not y.is_contiguous():
        x, y = x.permute(order), y.permute(order)
        residual = None if residual is None else residual.permute(order)
    x = x.contiguous()
    residual = None if residual is None else residual.contiguous()
    sizes: list[int] = []
    joined: list[int] = []
    for d in order:
        n, step = shape[d], apart[d]
        if n == 1:
            continue
        if joined and joined[-1] == n * step:
            sizes[-1] *= n
            joined[-1] = step
        else:
            sizes.append(n)
            joined.append(step)
    return x, residual, y, sizes or [1], joined or [1]


def _host_kernel(
    x: Tensor,
    residual: Tensor | None,
    y: Tensor,
    sizes: list[int],
    apart: list[int],
    first: int,
    key: Tensor,
    least: int,
    p: float,
) -> None:
    more = 0 if residual is None else residual.data_ptr()
    word, scale, dtype = int(key) & (1 << 64) - 1, 1 / (1 - p), REDUCIBLE[y.dtype]
    arrays = x.data_ptr(), more, y.data_ptr(), sizes, apart
    _host.dropout(*arrays, first, word, least, scale, dtype)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, residual, key, *ctx.how = inputs
    ctx.with_residual = residual is not None
    ctx.save_for_backward(key)


def _backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    (key,) = ctx.saved_tensors
    dx = _op(dy, None, key, *ctx.how)
    return dx, dy if ctx.with_residual else None, *[None] * 6


_op = register(
    "dropout",
    "(Tensor x, Tensor? residual, Tensor key, float p, int dim, SymInt start, SymInt size, "
    "str implementation) -> Tensor",
    _kernel,
    lambda x, residual, key, p, dim, start, size, implementation: torch.empty_like(x),
    _setup,
    _backward,
)
