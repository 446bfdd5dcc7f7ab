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
its dx is this op with W transposed. Left: several pairs of x and W, and what `_gemm` names.

Graphs: a launch depends on nothing of the host that changes from call to call, see _signals.py.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import linear

from tp_kernels.comm.layout import split_range, split_sizes

from ._device import narrow, widen
from ._gemm import REGISTERS, Tiling, check_chunk, check_product, choose, place, product
from ._rounds import receive, send, start_of, sum_of_ranks
from ._signals import CREDIT, READY, enter, leave, observe, publish
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


@triton.jit(do_not_specialize=["small", "larger", "rank", "timeout"])
def scatter(
    x, w, bias, out, small, larger, width, inner, x_row, x_inner, w_row, w_inner,
    table, record, rank, timeout,
    OPERATION: tl.constexpr, WORLD: tl.constexpr, STRIDE: tl.constexpr, DEPTH: tl.constexpr,
    CHUNK: tl.constexpr, LANES: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """x [rows of all ranks, inner], w [width, inner], bias [width], out [rows of this rank, width].

    small, larger: see start_of. Strides x_row, ... are in elements. BLOCK: elements summed at a time.
    """
    TYPE: tl.constexpr = out.dtype.element_ty
    channel = tl.program_id(0).to(tl.int64)
    begin, alive = enter(table, record, rank, channel, STRIDE, LANES)
    column_blocks = tl.cdiv(width, BLOCK_N)
    row_blocks = tl.cdiv(small + tl.minimum(larger, 1), BLOCK_M)
    programs = tl.num_programs(0)
    turns = tl.cdiv(row_blocks * column_blocks - tl.program_id(0), programs)
    m, n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    turn = 0
    while (turn <= turns) & alive:
        tile = tl.program_id(0) + turn * programs
        if turn < turns:
            epoch = begin + turn + 1
            row_block, column_block = place(tile, row_blocks, column_blocks, GROUP)
            down, right = row_block * BLOCK_M, column_block * BLOCK_N
            # Not all to the same rank at once, to itself last. What could be computed ahead of the loop
            # would take registers from the product, and be spilled.
            for step in tl.range(1, WORLD + 1, disable_licm=True):
                owner = (rank + step) % WORLD
                theirs = start_of(owner, small, larger, 1)
                rows = start_of(owner + 1, small, larger, 1) - theirs - down
                partial = product(
                    x, w, theirs + down, rows, right, width - right, inner,
                    x_row, x_inner, w_row, w_inner, BLOCK_M, BLOCK_N, BLOCK_K,
                )  # fmt: skip
                value = narrow(partial, TYPE)
                if step == 1:  # not earlier: the first product hides the wait
                    alive = observe(
                        table, record, rank, channel, CREDIT, epoch - DEPTH, alive, timeout,
                        OPERATION, WORLD, STRIDE, LANES,
                    )  # fmt: skip
                send(
                    value, table, owner, rank, channel, epoch,
                    m[:, None] * BLOCK_N + n[None, :], (m < rows)[:, None] & alive,
                    WORLD, STRIDE, DEPTH, CHUNK,
                )  # fmt: skip
                if step == WORLD - 1:
                    publish(table, rank, channel, READY, epoch, alive, WORLD, STRIDE, LANES)
        if turn > 0:
            epoch = begin + turn
            row_block, column_block = place(tile - programs, row_blocks, column_blocks, GROUP)
            down, right = row_block * BLOCK_M, column_block * BLOCK_N
            mine = start_of(rank, small, larger, 1)
            rows = start_of(rank + 1, small, larger, 1) - mine - down
            # Also what this rank has stored to itself is seen by the whole block only after this.
            alive = observe(
                table, record, rank, channel, READY, epoch, alive, timeout,
                OPERATION, WORLD, STRIDE, LANES,
            )  # fmt: skip
            for start in range(0, tl.minimum(rows, BLOCK_M) * BLOCK_N, BLOCK):
                offsets = start + tl.arange(0, BLOCK)
                row, column = offsets // BLOCK_N, right + offsets % BLOCK_N
                inside = (row < rows) & alive
                own = receive(
                    TYPE, table, rank, rank, channel, epoch, offsets, inside,
                    WORLD, STRIDE, DEPTH, CHUNK,
                )  # fmt: skip
                total = sum_of_ranks(
                    own, table, rank, channel, epoch, offsets, inside, WORLD, STRIDE, DEPTH, CHUNK
                )
                if bias is not None:
                    total += widen(tl.load(bias + column, mask=column < width, other=0.0))
                tl.store(
                    out + (down + row).to(tl.int64) * width + column, narrow(total, TYPE),
                    mask=inside & (column < width),
                )  # fmt: skip
            publish(table, rank, channel, CREDIT, epoch, alive, WORLD, STRIDE, LANES)
        turn += 1
    leave(table, rank, channel, begin + turns, alive, STRIDE)


def linear_reduce_scatter(
    x: Tensor,
    w: Tensor,
    workspace: Workspace,
    *,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    tiling: Tiling | None = None,
) -> Tensor:
    """This rank's rows of the sum over ranks of x w^T, plus bias. Collective.

    Args:
        x: [R, K], float32, bfloat16 or float16, any strides. R, N and dtype are equal on all ranks.
        w: [N, K] of the dtype of x, any strides.
        workspace: of depth 2 or more, with chunks that hold a tile.
        bias: [N] of the dtype of x; added once, so the same on all ranks or none.
        out: takes the result: contiguous, apart from the operands in memory.
        tiling: instead of what the shape suggests; equal on all ranks.

    Returns:
        [split_sizes(R, W)[rank], N] of the dtype of x.

    Raises:
        ShapeError, UnsupportedError: before anything is sent.
        CollectiveTimeoutError: interpreted, as `Workspace.launch`.
    """
    check_product("linear_reduce_scatter", workspace, x, w, bias)
    rows, width = x.shape[0], w.shape[0]
    counts = split_sizes(rows, workspace.world)
    out = result_like("linear_reduce_scatter", workspace, x, (counts[workspace.rank], width), out)
    if workspace.world == 1:
        return out.copy_(linear(x, w, bias))
    if rows * width == 0:
        return out
    tiling = tiling or choose(x, counts[0])
    check_chunk("linear_reduce_scatter", workspace, tiling, x.dtype)
    tiles = -(-counts[0] // tiling.block_m) * -(-width // tiling.block_n)
    workspace.launch(
        scatter,
        "linear_reduce_scatter",
        min(tiles, tiling.programs, workspace.shape.channels),
        x,
        w,
        None if bias is None else bias.contiguous(),
        out,
        counts[-1],
        rows % workspace.world,
        width,
        x.shape[1],
        *x.stride(),
        *w.stride(),
        warps=tiling.warps,
        registers=REGISTERS,
        num_stages=tiling.stages,
        **tiling.constants(x.element_size()),
    )
    return out
