"""linear_all_reduce: y = all_reduce(x W^T) + bias, on every rank.

    y = round(p_0 + p_1 + ... + bias)                             in float32, in rank order
    p_i = x_i W_i^T, accumulated in float32 and rounded to the dtype of x, as in ops/gemm_all_reduce.py

One launch multiplies, sends and sums; sums are one tile late, so that the next product hides the transfer.

One shot, for few rows: every rank sends its products to every peer and sums all of them: one transfer of
latency, W - 1 times the traffic of a result.

    turn t:  p of tile t -> peers and own buffer   READY   sum of tile t - 1 -> y   CREDIT

Two shots, for many: products go to the owner of their rows, as in linear_reduce_scatter, and its sums to
every peer: two transfers, 2 (W - 1) / W times the traffic.

    turn t:  p of tile t -> owners   READY   sum of tile t - 1 -> y and peers   READY, CREDIT
             sums of tile t - 2 -> y   CREDIT

All ranks have the same bits, both ways the same.

By the switch, where ranks share a multicast address: as in two shots, but the switch between the GPUs adds,
in an order of its own and rounded before the bias, and stores to all ranks: every rank sends a result once
and gets it once. Taken only if asked for, since it has other bits.

Backward: dx = dy W on every rank, nothing is communicated.

Graphs: a launch depends on nothing of the host that changes from call to call, see _signals.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from tp_kernels.comm.errors import UnsupportedError

from ._device import narrow
from ._gemm import (
    FEW_ROWS,
    REGISTERS,
    Tiling,
    check_chunk,
    check_pairs,
    choose,
    dense,
    operands,
    place,
    product,
    tma,
)
from ._multicast import LINE, sum_and_multicast
from ._rounds import send
from ._signals import CREDIT, READY, buffer, enter, leave, observe, publish
from ._tiles import copy_tile, rows_at, send_products, sum_tile
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
    operands, bias, out, rows, width, table, record, rank, timeout,
    OPERATION: tl.constexpr, WORLD: tl.constexpr, STRIDE: tl.constexpr, DEPTH: tl.constexpr,
    CHUNK: tl.constexpr, LANES: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """x_i [rows, K_i] and w_i [width, K_i] in `operands`; bias [width], out [rows, width].

    BLOCK: elements summed at a time.
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
                operands, down, rows - down, right, width - right, BLOCK_M, BLOCK_N, BLOCK_K, TMA
            )
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
            down = row_block * BLOCK_M
            # Also what this rank has stored to itself is seen by the whole block only after this.
            alive = observe(
                table, record, rank, channel, READY, epoch, alive, timeout,
                OPERATION, WORLD, STRIDE, LANES,
            )  # fmt: skip
            sum_tile(
                bias, out, down, rows - down, column_block * BLOCK_N, width, table, rank, channel,
                epoch, alive, 0, False, WORLD, STRIDE, DEPTH, CHUNK, BLOCK_M, BLOCK_N, BLOCK,
            )  # fmt: skip
            publish(table, rank, channel, CREDIT, epoch, alive, WORLD, STRIDE, LANES)
        turn += 1
    leave(table, rank, channel, begin + turns, alive, STRIDE)


@triton.jit(do_not_specialize=["small", "larger", "unit", "rank", "timeout"])
def two_shots(
    operands, bias, out, small, larger, unit, width, table, record, rank, timeout,
    OPERATION: tl.constexpr, WORLD: tl.constexpr, STRIDE: tl.constexpr, DEPTH: tl.constexpr,
    CHUNK: tl.constexpr, LANES: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """As one_shot, of rows divided over the ranks: small, larger, unit: see start_of."""
    TYPE: tl.constexpr = out.dtype.element_ty
    channel = tl.program_id(0).to(tl.int64)
    begin, alive = enter(table, record, rank, channel, STRIDE, LANES)
    column_blocks = tl.cdiv(width, BLOCK_N)
    row_blocks = tl.cdiv(small + tl.minimum(larger, 1) * unit, BLOCK_M)
    programs = tl.num_programs(0)
    turns = tl.cdiv(row_blocks * column_blocks - tl.program_id(0), programs)
    turn = 0
    while (turn <= turns + 1) & alive:
        tile = tl.program_id(0) + turn * programs
        # Two rounds a turn: one for products, one for sums, which are those of the turn before.
        sent, summed = begin + 2 * turn + 1, begin + 2 * turn + 2
        if turn < turns:
            row_block, column_block = place(tile, row_blocks, column_blocks, GROUP)
            alive = send_products(
                operands, row_block * BLOCK_M, column_block * BLOCK_N, width, small, larger, unit,
                TYPE, table, record, rank, channel, sent, alive, timeout,
                OPERATION, WORLD, STRIDE, DEPTH, CHUNK, LANES, BLOCK_M, BLOCK_N, BLOCK_K, TMA,
            )  # fmt: skip
        if (turn > 0) & (turn <= turns):
            row_block, column_block = place(tile - programs, row_blocks, column_blocks, GROUP)
            first, rows = rows_at(rank, row_block * BLOCK_M, small, larger, unit)
            alive = observe(
                table, record, rank, channel, READY, sent - 2, alive, timeout,
                OPERATION, WORLD, STRIDE, LANES,
            )  # fmt: skip
            alive = observe(
                table, record, rank, channel, CREDIT, summed - DEPTH, alive, timeout,
                OPERATION, WORLD, STRIDE, LANES,
            )  # fmt: skip
            sum_tile(
                bias, out, first, rows, column_block * BLOCK_N, width, table, rank, channel,
                sent - 2, alive, summed, True, WORLD, STRIDE, DEPTH, CHUNK, BLOCK_M, BLOCK_N, BLOCK,
            )  # fmt: skip
            publish(table, rank, channel, READY, summed, alive, WORLD, STRIDE, LANES)
            publish(table, rank, channel, CREDIT, sent - 2, alive, WORLD, STRIDE, LANES)
        if turn > 1:
            row_block, column_block = place(tile - 2 * programs, row_blocks, column_blocks, GROUP)
            alive = observe(
                table, record, rank, channel, READY, summed - 2, alive, timeout,
                OPERATION, WORLD, STRIDE, LANES,
            )  # fmt: skip
            for step in range(1, WORLD):
                peer = (rank + step) % WORLD
                first, rows = rows_at(peer, row_block * BLOCK_M, small, larger, unit)
                copy_tile(
                    None, out, peer, first, rows, column_block * BLOCK_N, width, table, rank, channel,
                    summed - 2, alive, WORLD, STRIDE, DEPTH, CHUNK, BLOCK_M, BLOCK_N, BLOCK,
                )  # fmt: skip
        if turn > 0:  # in the first of these turns nothing has been sent
            publish(table, rank, channel, CREDIT, summed - 2, alive, WORLD, STRIDE, LANES)
        turn += 1
    leave(table, rank, channel, begin + 2 * turns + 2, alive, STRIDE)


@triton.jit(do_not_specialize=["rows", "multicast", "rank", "timeout"])
def by_switch(
    operands, bias, out, rows, width, multicast, table, record, rank, timeout,
    OPERATION: tl.constexpr, WORLD: tl.constexpr, STRIDE: tl.constexpr, DEPTH: tl.constexpr,
    CHUNK: tl.constexpr, LANES: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """As two_shots; rank r lets the switch sum the r-th slice of every tile, and multicasts it.

    Products and sums of all ranks are at the place of what rank 0 sends.
    """
    TYPE: tl.constexpr = out.dtype.element_ty
    TILE: tl.constexpr = BLOCK_M * BLOCK_N * TYPE.primitive_bitwidth // 8  # bytes
    SLICE: tl.constexpr = (TILE // LINE + WORLD - 1) // WORLD * LINE
    channel = tl.program_id(0).to(tl.int64)
    begin, alive = enter(table, record, rank, channel, STRIDE, LANES)
    row_blocks, column_blocks = tl.cdiv(rows, BLOCK_M), tl.cdiv(width, BLOCK_N)
    programs = tl.num_programs(0)
    turns = tl.cdiv(row_blocks * column_blocks - tl.program_id(0), programs)
    m, n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    here = tl.load(table + rank)
    turn = 0
    while (turn <= turns + 1) & alive:
        tile = tl.program_id(0) + turn * programs
        sent, summed = begin + 2 * turn + 1, begin + 2 * turn + 2
        if turn < turns:
            row_block, column_block = place(tile, row_blocks, column_blocks, GROUP)
            down, right = row_block * BLOCK_M, column_block * BLOCK_N
            partial = product(
                operands, down, rows - down, right, width - right, BLOCK_M, BLOCK_N, BLOCK_K, TMA
            )
            alive = observe(
                table, record, rank, channel, CREDIT, sent - DEPTH, alive, timeout,
                OPERATION, WORLD, STRIDE, LANES,
            )  # fmt: skip
            own = buffer(TYPE, table, rank, channel, sent, 0, WORLD, STRIDE, DEPTH, CHUNK)
            # All of it, as the switch sums all of it; what is beyond the rows goes no further.
            tl.store(own + m[:, None] * BLOCK_N + n[None, :], narrow(partial, TYPE), mask=alive)
            publish(table, rank, channel, READY, sent, alive, WORLD, STRIDE, LANES)
        if (turn > 0) & (turn <= turns):
            alive = observe(
                table, record, rank, channel, READY, sent - 2, alive, timeout,
                OPERATION, WORLD, STRIDE, LANES,
            )  # fmt: skip
            alive = observe(
                table, record, rank, channel, CREDIT, summed - DEPTH, alive, timeout,
                OPERATION, WORLD, STRIDE, LANES,
            )  # fmt: skip
            from_all = buffer(TYPE, table, rank, channel, sent - 2, 0, WORLD, STRIDE, DEPTH, CHUNK)
            to_all = buffer(TYPE, table, rank, channel, summed, 0, WORLD, STRIDE, DEPTH, CHUNK)
            for start in range(0, SLICE, LANES * LINE):
                line = start + tl.arange(0, LANES).to(tl.int64) * LINE
                place_in_tile = rank * SLICE + line
                sum_and_multicast(
                    table, multicast, from_all.to(tl.int64) - here + place_in_tile,
                    to_all.to(tl.int64) - here + place_in_tile,
                    (line < SLICE) & (place_in_tile < TILE) & alive, TYPE, WORLD,
                )  # fmt: skip
            publish(table, rank, channel, READY, summed, alive, WORLD, STRIDE, LANES)
            publish(table, rank, channel, CREDIT, sent - 2, alive, WORLD, STRIDE, LANES)
        if turn > 1:
            row_block, column_block = place(tile - 2 * programs, row_blocks, column_blocks, GROUP)
            alive = observe(
                table, record, rank, channel, READY, summed - 2, alive, timeout,
                OPERATION, WORLD, STRIDE, LANES,
            )  # fmt: skip
            down = row_block * BLOCK_M
            copy_tile(
                bias, out, 0, down, rows - down, column_block * BLOCK_N, width, table, rank, channel,
                summed - 2, alive, WORLD, STRIDE, DEPTH, CHUNK, BLOCK_M, BLOCK_N, BLOCK,
            )  # fmt: skip
        if turn > 0:  # in the first of these turns nothing has been sent
            publish(table, rank, channel, CREDIT, summed - 2, alive, WORLD, STRIDE, LANES)
        turn += 1
    leave(table, rank, channel, begin + 2 * turns + 2, alive, STRIDE)


def linear_all_reduce(
    x: Tensor | Sequence[Tensor],
    w: Tensor | Sequence[Tensor],
    workspace: Workspace,
    *,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    shots: int | str | None = None,
    tiling: Tiling | None = None,
) -> Tensor:
    """Sum over ranks of x w^T, plus bias, the same bits on all ranks. Collective.

    Args:
        x: [R, K], float32, bfloat16 or float16, any strides. R, N and dtype are equal on all ranks.
        w: [N, K] of the dtype of x, any strides. Or several x_i [R, K_i] and w_i [N, K_i], whose products
            are summed before they are rounded.
        workspace: with chunks that hold a tile, of depth 2 or more; for two shots 4 or more.
        bias: [N] of the dtype of x; added once, so the same on all ranks or none.
        out: takes the result: contiguous, apart from the operands in memory.
        shots: 1 or 2 instead of what the size suggests, or "switch"; equal on all ranks. The switch has
            bits of its own, and needs a workspace with a multicast address.
        tiling: instead of what the shape suggests; equal on all ranks.

    Returns:
        [R, N] of the dtype of x. One and two shots give the same bits.

    Raises:
        ShapeError, UnsupportedError: before anything is sent.
        CollectiveTimeoutError: interpreted, as `Workspace.launch`.
    """
    xs, ws = check_pairs("linear_all_reduce", workspace, x, w, bias)
    rows, width, depth = xs[0].shape[0], ws[0].shape[0], workspace.shape.depth
    if shots not in (None, 1, 2, "switch"):
        raise UnsupportedError(f"linear_all_reduce: shots={shots!r}; use 1, 2, 'switch' or None")
    if shots in (2, "switch") and depth < 4:
        raise UnsupportedError(
            f"linear_all_reduce: shots={shots!r} needs a workspace of depth 4 or more"
        )
    if shots == "switch" and not workspace.multicast:
        raise UnsupportedError(
            "linear_all_reduce: shots='switch' needs a workspace with a multicast address"
        )
    out = result_like("linear_all_reduce", workspace, xs[0], (rows, width), out)
    if workspace.world == 1:
        return out.copy_(dense(xs, ws, bias))
    if rows * width == 0:
        return out
    if shots is None:  # with two ranks both send the same, and one shot waits once
        shots = 1 if rows <= FEW_ROWS or workspace.world == 2 or depth < 4 else 2
    division = workspace.rows_of_ranks("linear_all_reduce", None, rows)
    height = division.most if shots == 2 else rows
    tiling = tiling or choose(xs[0], height)
    check_chunk("linear_all_reduce", workspace, tiling, out.dtype)
    tiles = -(-height // tiling.block_m) * -(-width // tiling.block_n)
    workspace.launch(
        {1: one_shot, 2: two_shots, "switch": by_switch}[shots],
        "linear_all_reduce",
        min(tiles, tiling.programs, workspace.shape.channels),
        operands(xs, ws),
        None if bias is None else bias.contiguous(),
        out,
        *(division.scaled(1) if shots == 2 else (rows,)),
        width,
        *((workspace.multicast,) if shots == "switch" else ()),
        warps=tiling.warps,
        registers=REGISTERS,
        num_stages=tiling.stages,
        TMA=tma(tiling, xs, ws),
        **tiling.constants(out.element_size()),
    )
    return out
