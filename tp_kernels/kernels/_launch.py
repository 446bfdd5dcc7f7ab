"""Launches of kernels that stay on one rank, and what such kernels share: rows, tiles, checks.

They have no signals and no instructions of one vendor, so they are for every GPU that Triton compiles for.
A launch is the same for the same shapes, and nothing waits for the device: it can be captured in a graph.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tp_kernels.comm.errors import ShapeError, UnsupportedError
from tp_kernels.comm.workspace import DTYPES as DTYPES

from ._device import INTERPRETED, device_function

WARPS = 4
# Elements that a program has in registers: 16 per thread, two accesses of 16 bytes in 16-bit types.
TILE = 2048
# Of a thread. Without a limit ptxas spills out of 64 registers to make room for more programs. AMD's compiler
# has no such option.
REGISTERS = 128
LIMITS = {} if torch.version.hip else {"maxnreg": REGISTERS}


def launch(
    kernel: Any, operation: str, programs: int, x: Tensor, *arguments: Any, **constants: Any
) -> None:
    """Run `programs` programs of `kernel` on `x` and `arguments`, where x is.

    Raises:
        UnsupportedError: kernels are compiled for GPUs and x is in host memory.
    """
    check_device(operation, x.device)
    if programs:
        kernel[(programs,)](x, *arguments, **constants, num_warps=WARPS, **LIMITS)


def check_device(where: str, device: torch.device) -> None:
    if device.type == "cpu" and not INTERPRETED:
        raise UnsupportedError(
            f"{where}: CPU tensors need the Triton interpreter; set TRITON_INTERPRET=1 before "
            "tp_kernels.kernels is imported"
        )


def check_alike(operation: str, x: Tensor, **others: tuple[Tensor | None, Any]) -> None:
    """Refuse `x` of another dtype than DTYPES, and others that have not its device and the shape given.

    Each of `others` is None or a tensor, and its shape.
    """
    if x.dtype not in DTYPES:
        raise UnsupportedError(
            f"{operation}: {x.dtype}; supported are {', '.join(map(str, DTYPES))}"
        )
    for name, (value, shape) in others.items():
        if value is None:
            continue
        if value.shape != torch.Size(shape):
            raise ShapeError(
                f"{operation}: {name} is {tuple(value.shape)}, expected {tuple(shape)} with x of "
                f"{tuple(x.shape)}"
            )
        if value.device != x.device or value.dtype not in DTYPES:
            raise UnsupportedError(
                f"{operation}: {name} is {value.dtype} on {value.device}; supported are "
                f"{', '.join(map(str, DTYPES))} on {x.device}, where x is"
            )


def rows_of(x: Tensor) -> Tensor:
    """x [..., N] -> [R, N] with adjacent elements in a row; a copy where strides do not allow a view."""
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] <= 1 else rows.contiguous()


def tiling(width: int) -> dict[str, int]:
    """Constants ROWS and COLUMNS of a tile of rows of `width` elements: rows side by side if short."""
    columns = min(TILE, triton.next_power_of_2(max(width, 1)))
    return {"ROWS": TILE // columns, "COLUMNS": columns}


def tiles(rows: int, width: int, ROWS: int, COLUMNS: int) -> int:
    """Programs that `tile_at` divides a [rows, width] tensor between."""
    return triton.cdiv(rows, ROWS) * triton.cdiv(width, COLUMNS)


@device_function
def tile_at(rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """(rows [ROWS, 1], columns [1, COLUMNS], mask) of this program's tile of a [rows, width] tensor."""
    across = (width + COLUMNS - 1) // COLUMNS
    program = tl.program_id(0)
    row = (program // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = (program % across) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    return row, column, (row < rows) & (column < width)
