"""rms_norm and layer_norm, with a residual added before, and their gradients.

    s = round(x + residual)                                    x without a residual
    y = round(u * weight + bias)                               u = (s - mean) * rstd, in RMS norm s * rstd
    rstd = 1 / sqrt(mean((s - mean)^2) + epsilon)

    dx = round(rstd * (g - mean(g) - u * mean(g * u)) + ds)    g = dy * weight; without mean(g) in RMS norm
    d_weight = round(sum over rows of dy * u),  d_bias = round(sum over rows of dy)

(Zhang and Sennrich, 2019; Ba, Kiros and Hinton, 2016.) In float32, each result rounded once; transformers
rounds u of RMS norm as well, and so does all_reduce_rms_norm.py. dx is the gradient of x and of the residual;
ds is that of s, which goes on as the next residual.

Sums over rows are made in parts whose number depends on the shape alone, and the parts are added in order: no
atomics, the same bits in every run. Nothing is communicated: where rows are split over ranks, as under
sequence parallelism, d_weight and d_bias are partial sums, for the caller to reduce.

Limits: weight and bias have one dtype. Graphs: see _launch.py.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tp_kernels.comm.errors import ShapeError

from ._device import device_function, narrow, widen
from ._launch import TILE, check_alike, launch, rows_of, tiling

# Of a sum over rows: enough for every multiprocessor, few enough to add in no time.
MOST_PARTS = 64
# Columns that a program sums: a line of memory in 16-bit types.
SUMMED = 64


def reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    epsilon: float = 1e-6,
    *,
    centered: bool = False,
) -> tuple[Tensor, Tensor]:
    """(y, s), differentiable; layer norm if `centered`."""
    s = x if residual is None else (x.float() + residual.float()).to(x.dtype)
    unit = s.float()
    if centered:
        unit = unit - unit.mean(-1, keepdim=True)
    unit = unit * (unit.pow(2).mean(-1, keepdim=True) + epsilon).rsqrt()
    y = unit * weight.float() if bias is None else unit * weight.float() + bias.float()
    return y.to(x.dtype), s


@device_function
def _columns(start, row, rows, width, COLUMNS: tl.constexpr):
    column = start + tl.arange(0, COLUMNS)[None, :]
    return column, (row < rows) & (column < width)


@triton.jit
def forward(
    x, residual, weight, bias, y, s, mean, rstd, rows, width, x_row, residual_row, epsilon,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """x, residual [rows, width], rows x_row and residual_row apart; y, s [rows, width]; mean, rstd [rows].

    s is x without a residual; without a mean it is RMS norm.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    total = tl.full([ROWS, COLUMNS], 0.0, tl.float32)
    for start in range(0, width, COLUMNS):
        column, mask = _columns(start, row, rows, width, COLUMNS)
        value = tl.load(x + row * x_row + column, mask=mask, other=0.0)
        if residual is not None:
            more = tl.load(residual + row * residual_row + column, mask=mask, other=0.0)
            value = narrow(widen(value) + widen(more), x.dtype.element_ty)
            tl.store(s + row * width + column, value, mask=mask)
        if mean is not None:
            total += widen(value)
        else:
            total += widen(value) * widen(value)
    s_row = x_row
    if residual is not None:
        s_row = width
        tl.debug_barrier()  # other threads may have stored what this one reads again
    average = tl.sum(total, axis=1)[:, None] / width
    center = 0.0
    if mean is not None:
        center = average
        tl.store(mean + row, center, mask=row < rows)
        squares = tl.full([ROWS, COLUMNS], 0.0, tl.float32)
        for start in range(0, width, COLUMNS):  # of what is left: s^2 would cancel
            column = start + tl.arange(0, COLUMNS)[None, :]
            mask = (row < rows) & (column < width)
            value = widen(tl.load(s + row * s_row + column, mask=mask, other=0.0)) - center
            squares += tl.where(mask, value * value, 0.0)
        average = tl.sum(squares, axis=1)[:, None] / width
    scale = tl.div_rn(1.0, tl.sqrt_rn(average + epsilon))
    tl.store(rstd + row, scale, mask=row < rows)
    for start in range(0, width, COLUMNS):
        column, mask = _columns(start, row, rows, width, COLUMNS)
        value = widen(tl.load(s + row * s_row + column, mask=mask, other=0.0))
        value = (value - center) * scale * widen(tl.load(weight + column, mask=column < width))
        if bias is not None:
            value += widen(tl.load(bias + column, mask=column < width))
        tl.store(y + row * width + column, narrow(value, y.dtype.element_ty), mask=mask)


@device_function
def _units(s, mean, rstd, row, column, rows, s_row, mask):
    """u of a tile; 0 where not `mask`."""
    value = widen(tl.load(s + row * s_row + column, mask=mask, other=0.0))
    if mean is not None:
        value -= tl.load(mean + row, mask=row < rows, other=0.0)
    return tl.where(mask, value * tl.load(rstd + row, mask=row < rows, other=0.0), 0.0)


@triton.jit
def backward(
    dy, s, weight, ds, mean, rstd, dx, rows, width, dy_row, s_row, ds_row,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """dy, s, ds [rows, width] with rows dy_row, s_row and ds_row apart; dx [rows, width]."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    along = tl.full([ROWS, COLUMNS], 0.0, tl.float32)
    total = tl.full([ROWS, COLUMNS], 0.0, tl.float32)
    for start in range(0, width, COLUMNS):
        column, mask = _columns(start, row, rows, width, COLUMNS)
        g = widen(tl.load(dy + row * dy_row + column, mask=mask, other=0.0))
        g *= widen(tl.load(weight + column, mask=column < width, other=0.0))
        along += g * _units(s, mean, rstd, row, column, rows, s_row, mask)
        total += g
    slope = tl.sum(along, axis=1)[:, None] / width
    shift = 0.0
    if mean is not None:
        shift = tl.sum(total, axis=1)[:, None] / width
    scale = tl.load(rstd + row, mask=row < rows, other=0.0)
    for start in range(0, width, COLUMNS):
        column, mask = _columns(start, row, rows, width, COLUMNS)
        g = widen(tl.load(dy + row * dy_row + column, mask=mask, other=0.0))
        g *= widen(tl.load(weight + column, mask=column < width, other=0.0))
        unit = _units(s, mean, rstd, row, column, rows, s_row, mask)
        value = scale * (g - shift - unit * slope)
        if ds is not None:
            value += widen(tl.load(ds + row * ds_row + column, mask=mask, other=0.0))
        tl.store(dx + row * width + column, narrow(value, dx.dtype.element_ty), mask=mask)


@triton.jit
def sum_rows(
    dy, s, mean, rstd, parts, rows, width, span, dy_row, s_row, part_row,
    BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Part p of the sums: rows [p span, (p + 1) span) of dy * u, and of dy if BIAS, to row p of parts."""
    across = (width + COLUMNS - 1) // COLUMNS
    part = (tl.program_id(0) // across).to(tl.int64)
    start = (tl.program_id(0) % across) * COLUMNS
    column = start + tl.arange(0, COLUMNS)[None, :]
    d_weight = tl.full([ROWS, COLUMNS], 0.0, tl.float32)
    d_bias = tl.full([ROWS, COLUMNS], 0.0, tl.float32)
    for first in range(part * span, tl.minimum((part + 1) * span, rows), ROWS):
        row = first + tl.arange(0, ROWS)[:, None]
        _, mask = _columns(start, row, rows, width, COLUMNS)
        g = widen(tl.load(dy + row * dy_row + column, mask=mask, other=0.0))
        d_weight += g * _units(s, mean, rstd, row, column, rows, s_row, mask)
        d_bias += g
    there = parts + part * part_row + column
    tl.store(there, tl.sum(d_weight, axis=0)[None, :], mask=column < width)
    if BIAS:
        tl.store(there + width, tl.sum(d_bias, axis=0)[None, :], mask=column < width)


@triton.jit
def sum_parts(parts, out, count, width, COLUMNS: tl.constexpr):
    """out [width]: the rows of parts [count, width], in order."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.full([COLUMNS], 0.0, tl.float32)
    for part in range(0, count):
        total += tl.load(parts + part * width + column, mask=column < width, other=0.0)
    tl.store(out + column, narrow(total, out.dtype.element_ty), mask=column < width)


def rms_norm(
    x: Tensor, weight: Tensor, *, residual: Tensor | None = None, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    """RMS norm of x + residual over the last dimension.

    Args:
        x: [..., H]; float32, bfloat16 or float16, any strides.
        weight: [H], of any of these dtypes.
        residual: like x.

    Returns:
        y, s: [..., H] of the dtype of x; s is x without a residual.
        rstd: [...] float32, for the backward.

    Raises:
        ShapeError: of shapes that do not fit.
        UnsupportedError: of dtypes and devices; CPU tensors without the interpreter.
    """
    y, s, _, rstd = _forward("rms_norm", x, weight, None, residual, epsilon, centered=False)
    return y, s, rstd


def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    epsilon: float = 1e-5,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(y, s, mean, rstd) of layer norm, otherwise as `rms_norm`; bias: [H] like weight."""
    return _forward("layer_norm", x, weight, bias, residual, epsilon, centered=True)


def rms_norm_backward(
    dy: Tensor, s: Tensor, weight: Tensor, rstd: Tensor, *, ds: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(dx [..., H], d_weight [H]) for the gradients dy of y and ds of s [..., H]."""
    dx, d_weight, _ = _backward("rms_norm_backward", dy, s, weight, None, rstd, ds, bias=False)
    return dx, d_weight


def layer_norm_backward(
    dy: Tensor, s: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, *, ds: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx [..., H], d_weight [H], d_bias [H]) for the gradients dy of y and ds of s [..., H]."""
    return _backward("layer_norm_backward", dy, s, weight, mean, rstd, ds, bias=True)


def _forward(
    operation: str, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None,
    epsilon: float, *, centered: bool,
) -> tuple[Tensor, Tensor, Any, Tensor]:  # fmt: skip
    shape = x.shape[-1:]
    if x.dim() == 0:
        raise ShapeError(f"{operation}: x is a scalar, expected [..., H]")
    check_alike(
        operation, x, weight=(weight, shape), bias=(bias, shape), residual=(residual, x.shape)
    )
    y, s = x.new_empty(x.shape), x if residual is None else x.new_empty(x.shape)
    rstd = x.new_empty(x.shape[:-1], dtype=torch.float32)
    mean = torch.empty_like(rstd) if centered else None
    xs, tile = rows_of(x), tiling(x.shape[-1])
    residuals = None if residual is None else rows_of(residual)
    launch(
        forward, operation, triton.cdiv(len(xs), tile["ROWS"]),
        xs, residuals, weight.contiguous(), None if bias is None else bias.contiguous(), y,
        xs if residuals is None else s, mean, rstd, *xs.shape, xs.stride(0),
        0 if residuals is None else residuals.stride(0), epsilon, **tile,
    )  # fmt: skip
    return y, s, mean, rstd


def _backward(
    operation: str, dy: Tensor, s: Tensor, weight: Tensor, mean: Tensor | None, rstd: Tensor,
    ds: Tensor | None, *, bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    if s.dim() == 0:
        raise ShapeError(f"{operation}: s is a scalar, expected [..., H]")
    check_alike(
        operation, s, dy=(dy, s.shape), ds=(ds, s.shape), weight=(weight, s.shape[-1:]),
        mean=(mean, s.shape[:-1]), rstd=(rstd, s.shape[:-1]),
    )  # fmt: skip
    rows, width = rows_of(s).shape
    dys, ss, dx = rows_of(dy), rows_of(s), s.new_empty(s.shape)
    dss = None if ds is None else rows_of(ds)
    tile = tiling(width)
    launch(
        backward, operation, triton.cdiv(rows, tile["ROWS"]),
        dys, ss, weight.contiguous(), dss, mean, rstd, dx, rows, width,
        dys.stride(0), ss.stride(0), 0 if dss is None else dss.stride(0), **tile,
    )  # fmt: skip
    tall = TILE // SUMMED
    span = triton.cdiv(triton.cdiv(rows, MOST_PARTS), tall) * tall
    count = triton.cdiv(rows, span) if span else 0
    results = 1 + bias
    parts = s.new_empty((count, results, width), dtype=torch.float32)
    out = weight.new_empty((results, width))
    launch(
        sum_rows, operation, count * triton.cdiv(width, SUMMED),
        dys, ss, mean, rstd, parts, rows, width, span, dys.stride(0), ss.stride(0),
        results * width, BIAS=bias, ROWS=tall, COLUMNS=SUMMED,
    )  # fmt: skip
    launch(
        sum_parts, operation, triton.cdiv(results * width, SUMMED),
        parts, out, count, results * width, COLUMNS=SUMMED,
    )  # fmt: skip
    return dx, out[0], out[-1]
