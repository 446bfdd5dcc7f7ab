"""linear_reduce_scatter: y = reduce_scatter(x W^T) + bias, with the transfers hidden under the product.

    y_r = round(p_0[rows of r] + p_1[rows of r] + ... + bias)     in float32, in rank order
    p_i = x_i W_i^T, accumulated in float32 and rounded to the dtype of x, as in ops/gemm_reduce_scatter.py

One launch multiplies, sends and sums. A tile is a block of columns and, of every rank's part of the rows,
the block of rows at the same place. A program computes the products of its tile for the ranks rank + 1,
rank + 2, ... and at last its own, and stores each where its owner sums. Sums are one tile late: while the
products of a tile are on their way, those of the next are computed, so a wait only lasts if the links are
slower than the matrix units.

    turn t:  p of tile t -> peers   READY   p of tile t -> own buffer   sum of tile t - 1 -> y   CREDIT

Rows are divided as by `tp_kernels.split_sizes`; a rank with none still signals. Backward: all_gather_linear;
its dx is this op with W transposed.

Graphs: a launch depends on nothing of the host that changes from call to call, see _signals.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from tp_kernels.comm.layout import split_range

from ._gemm import REGISTERS, Tiling, check_chunk, check_pairs, choose, dense, operands, place
from ._signals import CREDIT, READY, enter, leave, observe, publish
from ._tiles import rows_at, send_products, sum_tile
from .workspace import Workspace, result_like


def reference(xs: list[Tensor], ws: list[Tensor], bias: Tensor | None, rank: int) -> Tensor:
    """The result of `rank` for the `x` and `w` of all ranks."""
    start, stop = split_range(xs[0].shape[0], len(xs), rank)
    parts = [
        (x[start:stop].float() @ w.float().t()).to(x.dtype) for x, w in zip(xs, ws, strict=True)
    ]
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return (total if bias is None else total + bias.float()).to(xs[0].dtype)


@triton.jit(do_not_specialize=["small", "larger", "unit", "rank", "timeout"])
def scatter(
    operands, bias, out, small, larger, unit, width, table, record, rank, timeout,
    OPERATION: tl.constexpr, WORLD: tl.constexpr, STRIDE: tl.constexpr, DEPTH: tl.constexpr,
    CHUNK: tl.constexpr, LANES: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """x_i [rows of all ranks, K_i] and w_i [width, K_i] in `operands`; bias [width], out [own rows, width].

    small, larger, unit: see start_of. BLOCK: elements summed at a time.
    """
    TYPE: tl.constexpr = out.dtype.element_ty
    channel = tl.program_id(0).to(tl.int64)
    begin, alive = enter(table, record, rank, channel, STRIDE, LANES)
    column_blocks = tl.cdiv(width, BLOCK_N)
    row_blocks = tl.cdiv(small + tl.minimum(larger, 1) * unit, BLOCK_M)
    programs = tl.num_programs(0)
    turns = tl.cdiv(row_blocks * column_blocks - tl.program_id(0), programs)
    turn = 0
    while (turn <= turns) & alive:
        tile = tl.program_id(0) + turn * programs
        if turn < turns:
            row_block, column_block = place(tile, row_blocks, column_blocks, GROUP)
            alive = send_products(
                operands, row_block * BLOCK_M, column_block * BLOCK_N, width, small, larger, unit,
                TYPE, table, record, rank, channel, begin + turn + 1, alive, timeout,
                OPERATION, WORLD, STRIDE, DEPTH, CHUNK, LANES, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
        if turn > 0:
            epoch = begin + turn
            row_block, column_block = place(tile - programs, row_blocks, column_blocks, GROUP)
            down = row_block * BLOCK_M
            _, rows = rows_at(rank, down, small, larger, unit)
            # Also what this rank has stored to itself is seen by the whole block only after this.
            alive = observe(
                table, record, rank, channel, READY, epoch, alive, timeout,
                OPERATION, WORLD, STRIDE, LANES,
            )  # fmt: skip
            sum_tile(
                bias, out, down, rows, column_block * BLOCK_N, width, table, rank, channel, epoch,
                alive, 0, False, WORLD, STRIDE, DEPTH, CHUNK, BLOCK_M, BLOCK_N, BLOCK,
            )  # fmt: skip
            publish(table, rank, channel, CREDIT, epoch, alive, WORLD, STRIDE, LANES)
        turn += 1
    leave(table, rank, channel, begin + turns, alive, STRIDE)


def linear_reduce_scatter(
    x: Tensor | Sequence[Tensor],
    w: Tensor | Sequence[Tensor],
    workspace: Workspace,
    *,
    counts: Sequence[int] | None = None,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    tiling: Tiling | None = None,
) -> Tensor:
    """This rank's rows of the sum over ranks of x w^T, plus bias. Collective.

    Args:
        x: [R, K], float32, bfloat16 or float16, any strides. R, N and dtype are equal on all ranks.
        w: [N, K] of the dtype of x, any strides. Or several x_i [R, K_i] and w_i [N, K_i], whose products
            are summed before they are rounded.
        workspace: of depth 2 or more, with chunks that hold a tile.
        counts: rows of each rank: multiples of one number, divided as by split_sizes; default:
            split_sizes(R, W).
        bias: [N] of the dtype of x; added once, so the same on all ranks or none.
        out: takes the result: contiguous, apart from the operands in memory.
        tiling: instead of what the shape suggests; equal on all ranks.

    Returns:
        [counts[rank], N] of the dtype of x.

    Raises:
        ShapeError, UnsupportedError: before anything is sent.
        CollectiveTimeoutError: interpreted, as `Workspace.launch`.
    """
    xs, ws = check_pairs("linear_reduce_scatter", workspace, x, w, bias)
    rows, width = xs[0].shape[0], ws[0].shape[0]
    division = workspace.rows_of_ranks("linear_reduce_scatter", counts, rows)
    mine = division.rows(workspace.rank)
    out = result_like("linear_reduce_scatter", workspace, xs[0], (mine, width), out)
    if workspace.world == 1:
        return out.copy_(dense(xs, ws, bias))
    if rows * width == 0:
        return out
    tiling = tiling or choose(xs[0], division.most)
    check_chunk("linear_reduce_scatter", workspace, tiling, out.dtype)
    tiles = -(-division.most // tiling.block_m) * -(-width // tiling.block_n)
    workspace.launch(
        scatter,
        "linear_reduce_scatter",
        min(tiles, tiling.programs, workspace.shape.channels),
        operands(xs, ws),
        None if bias is None else bias.contiguous(),
        out,
        *division.scaled(1),
        width,
        warps=tiling.warps,
        registers=REGISTERS,
        num_stages=tiling.stages,
        **tiling.constants(out.element_size()),
    )
    return out
