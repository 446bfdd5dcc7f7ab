"""linear_all_reduce: y = all_reduce(x W^T) + bias, for few rows: every rank sums all of it.

    y = round(p_0 + p_1 + ... + bias)                             in float32, in rank order
    p_i = x_i W_i^T, accumulated in float32 and rounded to the dtype of x, as in ops/gemm_all_reduce.py

One shot, in one launch: a program multiplies a tile, stores it to every peer, and sums what the peers have
sent of the tile before: one transfer of latency, W - 1 times the traffic. All ranks sum the same numbers in
the same order, so they have the same bits.

    turn t:  p of tile t -> peers and own buffer   READY   sum of tile t - 1 -> y   CREDIT

Backward: dx = dy W on every rank, nothing is communicated. Left: two shots for many rows, where
linear_reduce_scatter and then all_gather move less; multicast; and what `_gemm` names.

Graphs: a launch depends on nothing of the host that changes from call to call, see _signals.py.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import linear

from ._device import narrow, widen
from ._gemm import REGISTERS, Tiling, check_chunk, check_product, choose, place, product
from ._rounds import receive, send, sum_of_ranks
from ._signals import CREDIT, READY, enter, leave, observe, publish
from .workspace import Workspace, result_like


def reference(xs: list[Tensor], ws: list[Tensor], bias: Tensor | None) -> Tensor:
    """The result for the `x` and `w` of all ranks."""
    parts = [(x.float() @ w.float().t()).to(x.dtype) for x, w in zip(xs, ws, strict=True)]
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return (total if bias is None else total + bias.float()).to(xs[0].dtype)


@triton.jit(do_not_specialize=["rows", "rank", "timeout"])
def one_shot(
    x, w, bias, out, rows, width, inner, x_row, x_inner, w_row, w_inner,
    table, record, rank, timeout,
    OPERATION: tl.constexpr, WORLD: tl.constexpr, STRIDE: tl.constexpr, DEPTH: tl.constexpr,
    CHUNK: tl.constexpr, LANES: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """x [rows, inner], w [width, inner], bias [width], out [rows, width].

    Strides x_row, ... are in elements. BLOCK: elements summed at a time.
    """
    TYPE: tl.constexpr = out.dtype.element_ty
    channel = tl.program_id(0).to(tl.int64)
    begin, alive = enter(table, record, rank, channel, STRIDE, LANES)
    row_blocks, column_blocks = tl.cdiv(rows, BLOCK_M), tl.cdiv(width, BLOCK_N)
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
            partial = product(
                x, w, down, rows - down, right, width - right, inner,
                x_row, x_inner, w_row, w_inner, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
            value = narrow(partial, TYPE)
            # Not earlier: the product hides the wait.
            alive = observe(
                table, record, rank, channel, CREDIT, epoch - DEPTH, alive, timeout,
                OPERATION, WORLD, STRIDE, LANES,
            )  # fmt: skip
            for step in range(1, WORLD + 1):  # not all to the same rank at once; to itself last
                send(
                    value, table, (rank + step) % WORLD, rank, channel, epoch,
                    m[:, None] * BLOCK_N + n[None, :], (down + m < rows)[:, None] & alive,
                    WORLD, STRIDE, DEPTH, CHUNK,
                )  # fmt: skip
            publish(table, rank, channel, READY, epoch, alive, WORLD, STRIDE, LANES)
        if turn > 0:
            epoch = begin + turn
            row_block, column_block = place(tile - programs, row_blocks, column_blocks, GROUP)
            down, right = row_block * BLOCK_M, column_block * BLOCK_N
            # Also what this rank has stored to itself is seen by the whole block only after this.
            alive = observe(
                table, record, rank, channel, READY, epoch, alive, timeout,
                OPERATION, WORLD, STRIDE, LANES,
            )  # fmt: skip
            for start in range(0, tl.minimum(rows - down, BLOCK_M) * BLOCK_N, BLOCK):
                offsets = start + tl.arange(0, BLOCK)
                row, column = down + offsets // BLOCK_N, right + offsets % BLOCK_N
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
                    out + row.to(tl.int64) * width + column, narrow(total, TYPE),
                    mask=inside & (column < width),
                )  # fmt: skip
            publish(table, rank, channel, CREDIT, epoch, alive, WORLD, STRIDE, LANES)
        turn += 1
    leave(table, rank, channel, begin + turns, alive, STRIDE)


def linear_all_reduce(
    x: Tensor,
    w: Tensor,
    workspace: Workspace,
    *,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    tiling: Tiling | None = None,
) -> Tensor:
    """Sum over ranks of x w^T, plus bias, the same bits on all ranks. Collective.

    Args:
        x: [R, K], float32, bfloat16 or float16, any strides. R, N and dtype are equal on all ranks.
        w: [N, K] of the dtype of x, any strides.
        workspace: of depth 2 or more, with chunks that hold a tile.
        bias: [N] of the dtype of x; added once, so the same on all ranks or none.
        out: takes the result: contiguous, apart from the operands in memory.
        tiling: instead of what the shape suggests; equal on all ranks.

    Returns:
        [R, N] of the dtype of x.

    Raises:
        ShapeError, UnsupportedError: before anything is sent.
        CollectiveTimeoutError: interpreted, as `Workspace.launch`.
    """
    check_product("linear_all_reduce", workspace, x, w, bias)
    rows, width = x.shape[0], w.shape[0]
    out = result_like("linear_all_reduce", workspace, x, (rows, width), out)
    if workspace.world == 1:
        return out.copy_(linear(x, w, bias))
    if rows * width == 0:
        return out
    tiling = tiling or choose(x, rows)
    check_chunk("linear_all_reduce", workspace, tiling, x.dtype)
    tiles = -(-rows // tiling.block_m) * -(-width // tiling.block_n)
    workspace.launch(
        one_shot,
        "linear_all_reduce",
        min(tiles, tiling.programs, workspace.shape.channels),
        x,
        w,
        None if bias is None else bias.contiguous(),
        out,
        rows,
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
