"""What the fused matrix products have in common: a tile of x W^T, the order of tiles, and tile sizes.

Loads are plain pointers with masks, so any strides and sizes work. They are fast where 16 divides K, N and
the strides that are not 1. Left for later: TMA descriptors and warp specialisation on sm_90 and sm_100,
splitting K for few rows, and measured entries in the table below.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from tp_kernels.comm.errors import ShapeError, UnsupportedError

from ._device import device_function, multiply
from .workspace import Workspace, check_operand


@dataclass(frozen=True)
class Tiling:
    """How a matrix product is cut; equal on all ranks, since channels exchange tiles.

    Args:
        block_m, block_n, block_k: of a tile of the result, and of a step along K; powers of two, 16 or more.
        warps, stages: of a program, and of its loads along K.
        programs: at most so many; one for each multiprocessor of the largest device of its kind.
        group: row blocks that are walked together, so that they share what they read of W in the L2 cache.
    """

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    programs: int
    group: int = 8

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

# Rows of a rank's part up to which the tiles of "few" rows are taken.
FEW_ROWS = 64

# By architecture, bytes of an element, and rows. 80 serves all that are not in the table: it stays within
# the 99 KiB of shared memory of 8.6, 8.9 and 12.0. Sizes are those that fill the matrix units without
# spilling (tests/kernels/resources.json); none is measured yet.
TILINGS = {
    (80, 2, "few"): Tiling(64, 128, 64, 4, 3, 108),
    (80, 2, "many"): Tiling(128, 128, 32, 8, 4, 108),
    (80, 4, "few"): Tiling(32, 64, 16, 4, 3, 108),
    (80, 4, "many"): Tiling(64, 64, 16, 8, 3, 108),
    (90, 2, "few"): Tiling(64, 128, 64, 4, 4, 132),
    (90, 2, "many"): Tiling(128, 256, 64, 8, 3, 132),
    (90, 4, "few"): Tiling(32, 64, 16, 4, 3, 132),
    (90, 4, "many"): Tiling(64, 64, 16, 8, 3, 132),
    (100, 2, "few"): Tiling(64, 128, 64, 4, 4, 148),
    (100, 2, "many"): Tiling(128, 256, 64, 8, 3, 148),
    (100, 4, "few"): Tiling(32, 64, 16, 4, 3, 148),
    (100, 4, "many"): Tiling(64, 64, 16, 8, 3, 148),
}
INTERPRETER = Tiling(16, 16, 16, 1, 1, 65535, 2)


def choose(x: Tensor, rows: int) -> Tiling:
    """The tiling for products with `rows` rows for each rank; looks at nothing that differs between ranks.

    All ranks must have devices of one architecture.
    """
    if x.is_cpu:
        return INTERPRETER
    architecture = 10 * torch.cuda.get_device_capability(x.device)[0]
    known = architecture if (architecture, 2, "few") in TILINGS else 80
    return TILINGS[known, x.element_size(), "few" if rows <= FEW_ROWS else "many"]


def check_product(
    operation: str, workspace: Workspace, x: Tensor, w: Tensor, bias: Tensor | None
) -> None:
    """Refuse what is not x [R, K], w [N, K], bias [N] of one dtype on the device of the workspace."""
    check_operand(operation, workspace, x)
    where = f"{operation} on rank {workspace.rank} of {workspace.world}"
    if x.dim() != 2 or w.dim() != 2 or x.shape[1] != w.shape[1]:
        raise ShapeError(
            f"{where}: x is {tuple(x.shape)}, w {tuple(w.shape)}; expected [R, K] and [N, K]"
        )
    if (
        max(*x.shape, *w.shape) >= 2**31 - 2**16
    ):  # kernels count them, rounded up to tiles, in int32
        raise UnsupportedError(f"{where}: x is {tuple(x.shape)}, w {tuple(w.shape)}: 2^31 or more")
    if bias is not None and bias.shape != w.shape[:1]:
        raise ShapeError(f"{where}: bias is {tuple(bias.shape)}; expected [{w.shape[0]}]")
    for name, t in (("w", w), ("bias", bias)):
        if t is not None and (t.dtype, t.device) != (x.dtype, x.device):
            raise UnsupportedError(
                f"{where}: {name} is {t.dtype} on {t.device}, x is {x.dtype} on {x.device}"
            )


def check_chunk(operation: str, workspace: Workspace, tiling: Tiling, dtype: torch.dtype) -> None:
    """Refuse a workspace that cannot hold a tile, or no second one while the first is on its way."""
    shape, chunk = workspace.shape, tiling.chunk(dtype)
    if shape.chunk < chunk or shape.depth < 2:
        raise UnsupportedError(
            f"{operation}: tiles of {tiling.block_m} x {tiling.block_n} {dtype} need a workspace with "
            f"chunk={chunk} and depth=2 or more, not {shape}"
        )


@device_function
def place(tile, row_blocks, column_blocks, GROUP: tl.constexpr):
    """(row block, column block) of `tile`: down the rows of a group, then to the next column block."""
    group = tile // (GROUP * column_blocks)
    rest = tile % (GROUP * column_blocks)
    height = tl.minimum(row_blocks - group * GROUP, GROUP)
    return group * GROUP + rest % height, rest // height


@device_function
def product(
    x, w, first_row, rows, first_column, columns, inner, x_row, x_inner, w_row, w_inner,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """float32 [BLOCK_M, BLOCK_N]: `rows` rows of x times `columns` rows of w, transposed.

    Beyond the rows are copies of the last, which cost fewer registers than a mask; beyond the columns, 0.
    x [.., inner], w [.., inner] from `first_row` and `first_column` on; strides x_row, ... are in elements.
    """
    m, n, k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    across = k.to(tl.int64)
    within = tl.minimum(m, rows - 1)
    xs = x + (first_row + within).to(tl.int64)[:, None] * x_row + across[None, :] * x_inner
    ws = w + (first_column + n).to(tl.int64)[None, :] * w_row + across[:, None] * w_inner
    x_step = tl.cast(x_inner, tl.int64) * BLOCK_K
    w_step = tl.cast(w_inner, tl.int64) * BLOCK_K
    total = tl.full([BLOCK_M, BLOCK_N], 0.0, tl.float32)
    for start in range(0, tl.where(rows > 0, inner, 0), BLOCK_K):
        left = inner - start
        a = tl.load(xs, mask=(k < left)[None, :], other=0.0)
        b = tl.load(ws, mask=(n < columns)[None, :] & (k < left)[:, None], other=0.0)
        total = multiply(a, b, total)
        xs += x_step
        ws += w_step
    return total
