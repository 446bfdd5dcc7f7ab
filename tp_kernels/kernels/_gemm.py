"""What the fused matrix products have in common: a tile of x W^T, the order of tiles, and tile sizes.

Loads are plain pointers with masks, so any strides and sizes work; they are fast where 16 divides K, N and
the strides that are not 1. From compute capability 9.0 they are those of the tensor memory accelerator where
addresses and strides allow it: the same numbers, mostly with fewer registers. Left for later: warp
specialisation, splitting K for few rows, and measured entries in the table below.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from torch.nn.functional import linear

from tp_kernels.comm.errors import ShapeError, UnsupportedError

from ._device import device_function, multiply, order_before_tma
from .workspace import Workspace, check_operand


@dataclass(frozen=True)
class Tiling:
    """How a matrix product is cut; equal on all ranks, since channels exchange tiles.

    Args:
        block_m, block_n, block_k: of a tile of the result, and of a step along K; powers of two, 16 or more.
        warps, stages: of a program, and of its loads along K.
        programs: at most so many; one for each multiprocessor of the largest device of its kind.
        group: row blocks that are walked together, so that they share what they read of W in the L2 cache.
        senders: of the programs, so many gather rows while the others multiply (all_gather_linear).
        tma: load with the tensor memory accelerator where operands allow it.
    """

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    programs: int
    group: int = 8
    senders: int = 16
    tma: bool = False

    def chunk(self, dtype: torch.dtype) -> int:
        """Bytes of a tile on its way to a peer."""
        return self.block_m * self.block_n * dtype.itemsize

    def constants(self, itemsize: int) -> dict[str, int]:
        """What a kernel with elements of `itemsize` bytes knows of this when it is compiled.

        BLOCK: elements that it sums at a time, 16 bytes per thread, the widest access.
        """
        return {
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "BLOCK_K": self.block_k,
            "GROUP": self.group,
            "BLOCK": min(32 * self.warps * 16 // itemsize, self.block_m * self.block_n),
        }


# Of a thread: all there are, for accumulators.
REGISTERS = 255
TMA_BYTES = 16  # that divide addresses and strides

# Rows of a rank's part up to which the tiles of "few" rows are taken.
FEW_ROWS = 64
# And columns: they are rounded up to tiles and counted in int32.
MOST_ROWS = 2**31 - 2**16 - 1

# By architecture, bytes of an element, and shape: few rows, many rows, or the gradient of a weight. 80 serves
# all that are not in the table: it stays within the 99 KiB of shared memory of 8.6, 8.9 and 12.0. Sizes are
# those that fill the matrix units without spilling (tests/kernels/resources.json); none is measured yet.
TILINGS = {
    (80, 2, "few"): Tiling(64, 128, 64, 4, 3, 108),
    (80, 2, "many"): Tiling(128, 128, 32, 8, 4, 108),
    (80, 2, "gradient"): Tiling(128, 128, 32, 8, 4, 108),
    (80, 4, "few"): Tiling(32, 64, 16, 8, 3, 108),
    (80, 4, "many"): Tiling(64, 64, 16, 8, 3, 108),
    (80, 4, "gradient"): Tiling(64, 64, 16, 8, 3, 108),
    (90, 2, "few"): Tiling(64, 128, 64, 4, 4, 132, tma=True),
    (90, 2, "many"): Tiling(128, 256, 64, 8, 3, 132, tma=True),
    (90, 2, "gradient"): Tiling(64, 256, 64, 8, 3, 132, tma=True),
    (90, 4, "few"): Tiling(32, 64, 16, 8, 3, 132),
    (90, 4, "many"): Tiling(64, 64, 16, 8, 3, 132),
    (90, 4, "gradient"): Tiling(64, 64, 16, 8, 3, 132),
    (100, 2, "few"): Tiling(64, 128, 64, 4, 4, 148, tma=True),
    (100, 2, "many"): Tiling(128, 256, 64, 8, 3, 148, tma=True),
    (100, 2, "gradient"): Tiling(128, 128, 64, 8, 4, 148, tma=True),
    (100, 4, "few"): Tiling(32, 64, 16, 8, 3, 148),
    (100, 4, "many"): Tiling(64, 64, 16, 8, 3, 148),
    (100, 4, "gradient"): Tiling(64, 64, 16, 8, 3, 148),
}
INTERPRETER = Tiling(16, 16, 16, 1, 1, 65535, 2, 2)


def choose(x: Tensor, rows: int) -> Tiling:
    """The tiling for products with `rows` rows for each rank; looks at nothing that differs between ranks.

    All ranks must have devices of one architecture.
    """
    return _tiling(x, "few" if rows <= FEW_ROWS else "many")


def choose_for_gradient(x: Tensor) -> Tiling:
    """The tiling for gradients of weights."""
    return _tiling(x, "gradient")


def _tiling(x: Tensor, shape: str) -> Tiling:
    if x.is_cpu:
        return INTERPRETER
    architecture = 10 * torch.cuda.get_device_capability(x.device)[0]
    known = architecture if (architecture, 2, "few") in TILINGS else 80
    return TILINGS[known, x.element_size(), shape]


Pairs = tuple[list[Tensor], list[Tensor]]


def check_pairs(
    operation: str,
    workspace: Workspace,
    x: Tensor | Sequence[Tensor],
    w: Tensor | Sequence[Tensor],
    bias: Tensor | None,
) -> Pairs:
    """Refuse what is not x_i [R, K_i], w_i [N, K_i], bias [N] of one dtype on the workspace's device."""
    for one in as_list(x):
        check_operand(operation, workspace, one)
    return pairs_of(f"{operation} on rank {workspace.rank} of {workspace.world}", x, w, bias)


def pairs_of(
    where: str, x: Tensor | Sequence[Tensor], w: Tensor | Sequence[Tensor], bias: Tensor | None
) -> Pairs:
    """As check_pairs, of any dtype and on any device."""
    xs, ws = as_list(x), as_list(w)
    if len(xs) != len(ws) or not xs:
        raise ShapeError(f"{where}: {len(xs)} times x and {len(ws)} times w; expected pairs")
    for one, other in zip(xs, ws, strict=True):
        if one.dim() != 2 or other.dim() != 2 or one.shape[1] != other.shape[1]:
            raise ShapeError(
                f"{where}: x is {tuple(one.shape)}, w {tuple(other.shape)}; expected [R, K] and [N, K]"
            )
        if one.shape[0] != xs[0].shape[0] or other.shape[0] != ws[0].shape[0]:
            raise ShapeError(
                f"{where}: pairs are {_shapes(xs)} and {_shapes(ws)}; expected [R, K_i] and [N, K_i]"
            )
    check_width(where, ws[0], bias)
    check_alike(where, xs[0], x=xs, w=ws, bias=[bias])
    return xs, ws


def check_width(where: str, w: Tensor, bias: Tensor | None) -> None:
    if bias is not None and bias.shape != w.shape[:1]:
        raise ShapeError(f"{where}: bias is {tuple(bias.shape)}; expected [{w.shape[0]}]")


def check_alike(where: str, x: Tensor, /, **others: Sequence[Tensor | None]) -> None:
    """Refuse what has another dtype or device than x, and sizes that kernels cannot count in int32."""
    for name, tensors in {"x": [x], **others}.items():
        for t in tensors:
            if t is None:
                continue
            if (t.dtype, t.device) != (x.dtype, x.device):
                raise UnsupportedError(
                    f"{where}: {name} is {t.dtype} on {t.device}, x is {x.dtype} on {x.device}"
                )
            if max(t.shape, default=0) > MOST_ROWS:
                raise UnsupportedError(f"{where}: {name} is {tuple(t.shape)}: 2^31 or more")


def check_rows(where: str, rows: int) -> None:
    """As check_alike, of the rows of all ranks together, of which this one may have few."""
    if rows > MOST_ROWS:
        raise UnsupportedError(f"{where}: {rows} rows of all ranks: 2^31 or more")


def as_list(x: Tensor | Sequence[Tensor]) -> list[Tensor]:
    return [x] if isinstance(x, Tensor) else list(x)


def _shapes(tensors: Sequence[Tensor]) -> str:
    return " and ".join(str(tuple(t.shape)) for t in tensors)


def dense(xs: Sequence[Tensor], ws: Sequence[Tensor], bias: Tensor | None) -> Tensor:
    """The product of one rank; of a single pair as torch's layer has it."""
    if len(xs) == 1:
        return linear(xs[0], ws[0], bias)
    total = torch.cat([x.float() for x in xs], 1) @ torch.cat([w.float() for w in ws], 1).t()
    return (total if bias is None else total + bias.float()).to(xs[0].dtype)


def operands(xs: Sequence[Tensor], ws: Sequence[Tensor]) -> tuple[tuple[Any, ...], ...]:
    """What `product` reads: pointers, inner sizes and strides of all pairs, each a tuple."""
    return (
        tuple(xs),
        tuple(ws),
        tuple(x.shape[1] for x in xs),
        *(tuple(t.stride(dim) for t in ts) for ts in (xs, ws) for dim in (0, 1)),
    )


def check_chunk(operation: str, workspace: Workspace, tiling: Tiling, dtype: torch.dtype) -> None:
    """Refuse a workspace that cannot hold a tile, or no second one while the first is on its way."""
    shape, chunk = workspace.shape, tiling.chunk(dtype)
    if shape.chunk < chunk or shape.depth < 2:
        raise UnsupportedError(
            f"{operation}: tiles of {tiling.block_m} x {tiling.block_n} {dtype} need a workspace with "
            f"chunk={chunk} and depth=2 or more, not {shape}"
        )


def tma(tiling: Tiling, xs: Sequence[Tensor], ws: Sequence[Tensor]) -> str:
    """How `accumulate` loads operands x [.., K] and w [.., K]: which dimension of each is contiguous, or "".

    Of no influence on what is sent, so ranks may differ.
    """
    if not tiling.tma:
        return ""
    for layout in ("inner inner", "inner rows", "rows rows"):
        by_x, by_w = layout.split()
        if _loadable(xs, by_x) and _loadable(ws, by_w):
            return layout
    return ""


def _loadable(tensors: Sequence[Tensor], contiguous: str) -> bool:
    unit, other = (1, 0) if contiguous == "inner" else (0, 1)
    return all(
        t.stride(unit) == 1
        and t.stride(other) >= t.shape[unit]  # rows that overlap are no tensor to it
        and t.stride(other) * t.element_size() % TMA_BYTES == 0
        and t.data_ptr() % TMA_BYTES == 0
        for t in tensors
    )


@device_function
def place(tile, row_blocks, column_blocks, GROUP: tl.constexpr):
    """(row block, column block) of `tile`: down the rows of a group, then to the next column block."""
    group = tile // (GROUP * column_blocks)
    rest = tile % (GROUP * column_blocks)
    height = tl.minimum(row_blocks - group * GROUP, GROUP)
    return group * GROUP + rest % height, rest // height


@device_function
def pick(values, index):
    """values[index] of a tuple, for an index that is known only on the device."""
    chosen = values[0]
    for other in tl.static_range(1, len(values)):
        chosen = tl.where(index == other, values[other], chosen)
    return chosen


@device_function
def product(
    operands, first_row, rows, first_column, columns,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """float32 [BLOCK_M, BLOCK_N]: sum over pairs of x w^T, of `rows` rows of x and `columns` rows of w."""
    xs, ws, inners, x_rows, x_inners, w_rows, w_inners = operands
    total = tl.full([BLOCK_M, BLOCK_N], 0.0, tl.float32)
    for pair in range(len(xs)):
        total = accumulate(
            total, pick(xs, pair), pick(ws, pair), first_row, rows, first_column, columns,
            pick(inners, pair), pick(x_rows, pair), pick(x_inners, pair), pick(w_rows, pair),
            pick(w_inners, pair), BLOCK_M, BLOCK_N, BLOCK_K, TMA,
        )  # fmt: skip
    return total


@device_function
def accumulate(
    total, x, w, first_row, rows, first_column, columns, inner, x_row, x_inner, w_row, w_inner,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr,
    MASK_ROWS: tl.constexpr = False,
):  # fmt: skip
    """total + `rows` rows of x times `columns` rows of w, transposed; float32 [BLOCK_M, BLOCK_N].

    x [.., inner], w [.., inner] from `first_row` and `first_column` on; strides x_row, ... are in elements.
    MASK_ROWS: beyond the rows are zeros, which allows wide loads where x_row is 1. Else there are copies of
    the last row, which cost fewer registers. Beyond the columns are zeros.
    """
    steps = tl.where(rows > 0, inner, 0)
    if TMA != "":
        order_before_tma()
        x += tl.cast(first_row, tl.int64) * x_row
        w += tl.cast(first_column, tl.int64) * w_row
        height, width = tl.maximum(rows, 1), tl.maximum(columns, 1)
        if TMA == "rows rows":
            xs = tl.make_tensor_descriptor(x, [inner, height], [x_inner, 1], [BLOCK_K, BLOCK_M])
        else:
            xs = tl.make_tensor_descriptor(x, [height, inner], [x_row, 1], [BLOCK_M, BLOCK_K])
        if TMA == "inner inner":
            ws = tl.make_tensor_descriptor(w, [width, inner], [w_row, 1], [BLOCK_N, BLOCK_K])
        else:
            ws = tl.make_tensor_descriptor(w, [inner, width], [w_inner, 1], [BLOCK_K, BLOCK_N])
        for start in range(0, steps, BLOCK_K):
            a = xs.load([start, 0]).T if TMA == "rows rows" else xs.load([0, start])
            b = ws.load([0, start]).T if TMA == "inner inner" else ws.load([start, 0])
            total = multiply(a, b, total)
        return total
    m, n, k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    across = k.to(tl.int64)
    within = m if MASK_ROWS else tl.minimum(m, rows - 1)
    xs = x + (first_row + within).to(tl.int64)[:, None] * x_row + across[None, :] * x_inner
    ws = w + (first_column + n).to(tl.int64)[None, :] * w_row + across[:, None] * w_inner
    x_step = tl.cast(x_inner, tl.int64) * BLOCK_K
    w_step = tl.cast(w_inner, tl.int64) * BLOCK_K
    for start in range(0, steps, BLOCK_K):
        inside = k < inner - start
        x_mask = inside[None, :]
        if MASK_ROWS:
            x_mask = x_mask & (m < rows)[:, None]
        a = tl.load(xs, mask=x_mask, other=0.0)
        b = tl.load(ws, mask=(n < columns)[None, :] & inside[:, None], other=0.0)
        total = multiply(a, b, total)
        xs += x_step
        ws += w_step
    return total
