"""dropout: zeros where a word of Philox is small; ops/dropout.py has the formula and the reference.

    y = round(x * scale + residual)     where word(key, index) >= least,    else residual or 0

A counter gives four words. Where neighbours in memory are neighbours in the unsplit tensor, and lines begin
at multiples of four, a thread uses all of them; elsewhere every element draws its own counter. In float32;
the compiler may round the sum once, where the CPU rounds the product as well. Indexes have 64 bits.

Graphs: see _launch.py; the key is read from memory, so a replay has the mask of the key that is there then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ._device import device_function, narrow, widen
from ._launch import check_alike, launch, tile_at, tiles, tiling


@device_function
def philox(seed, group):
    """The four words, uint32, of the counter (group, 0) of 64 bits each, as `tl.randint4x(seed, group)`."""
    c0, c1 = (group & 0xFFFFFFFF).to(tl.uint32), (group >> 32).to(tl.uint32)
    c2, c3 = c0 ^ c0, c0 ^ c0
    k0, k1 = (seed & 0xFFFFFFFF).to(tl.uint32), (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(10):
        first, second = c0.to(tl.uint64) * 0xD2511F53, c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (second >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (first >> 32).to(tl.uint32) ^ c3 ^ k1
        c1, c3 = second.to(tl.uint32), first.to(tl.uint32)
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def drop(
    x, residual, y, key, rows, width, span, step_outer, step_row, step, first, least, scale,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUPED: tl.constexpr,
):  # fmt: skip
    """x, residual, y [rows, width], dense.

    The index of an element of row r and column c is first + r / span step_outer + r % span step_row + c step.
    GROUPED: step is 1, and all other steps, first and width are multiples of 4.
    """
    row, column, mask = tile_at(rows, width, ROWS, COLUMNS)
    start = first + (row // span) * step_outer + (row % span) * step_row
    seed = tl.load(key)
    if GROUPED:
        across = (width + COLUMNS - 1) // COLUMNS
        corner = (tl.program_id(0) % across) * (COLUMNS // 4)
        group = (start >> 2) + (corner + tl.arange(0, COLUMNS // 4)[None, :])
        a, b, c, d = philox(seed, group)
        word = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [ROWS, COLUMNS])
    else:
        index = start + column.to(tl.int64) * step
        a, b, c, d = philox(seed, index >> 2)
        which = index & 3
        word = tl.where(which < 2, tl.where(which == 0, a, b), tl.where(which == 2, c, d))
    at = row * width + column
    value = widen(tl.load(x + at, mask=mask, other=0.0)) * scale
    value = tl.where(word.to(tl.int64) >= least, value, 0.0)
    if residual is not None:
        value += widen(tl.load(residual + at, mask=mask, other=0.0))
    tl.store(y + at, narrow(value, y.dtype.element_ty), mask=mask)


def dropout(
    x: Tensor,
    residual: Tensor | None,
    y: Tensor,
    sizes: Sequence[int],
    steps: Sequence[int],
    first: int,
    key: Tensor,
    least: int,
    scale: float,
) -> None:
    """Fill y.

    Args:
        x, residual (or None), y: dense, of one shape; float32, bfloat16 or float16.
        sizes: the dimensions of their memory; their product is the number of elements.
        steps: by dimension, how far indexes of neighbours are apart; first: the index of the first element.
        key: int64 [].
        least: the smallest word that keeps an element, below 2^32.

    Raises:
        UnsupportedError: of dtypes and devices; CPU tensors without the interpreter.
    """
    check_alike("dropout", x, residual=(residual, x.shape), y=(y, x.shape))
    if len(sizes) > 3:  # one launch for each of the outermost
        xs, ys = x.view(sizes[0], -1), y.view(sizes[0], -1)
        residuals: Any = [None] * len(xs) if residual is None else residual.view(sizes[0], -1)
        for i, (one, more, to) in enumerate(zip(xs, residuals, ys, strict=True)):
            at = first + i * steps[0]
            dropout(one, more, to, sizes[1:], steps[1:], at, key, least, scale)
        return
    outer, span, width = [1] * (3 - len(sizes)) + list(sizes)
    step_outer, step_row, step = [0] * (3 - len(sizes)) + list(steps)
    grouped = step == 1 and not any(n % 4 for n in (first, step_outer, step_row, width))
    tile = tiling(width)
    grouped = grouped and tile["COLUMNS"] >= 4
    launch(
        drop, "dropout", tiles(outer * span, width, **tile),
        x, residual, y, key, outer * span, width, span, step_outer, step_row, step, first, least, scale,
        GROUPED=grouped, **tile,
    )  # fmt: skip
