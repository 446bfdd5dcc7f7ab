"""all_gather_weight_gradient: dW = dy^T all_gather(x), summed up while the rows of x are on their way.

The gradient of a column-parallel weight whose input was not kept, or, with x and dy exchanged, that of a
row-parallel one, whose dy has to be gathered:

    dW [N, K] = dy [R, N]^T all_gather(x [R_r, K])          dW [N, K] = all_gather(dy [R_r, N])^T x [R, K]

One launch gathers and multiplies, as in all_gather_linear. Programs that multiply take the rows in the order
of arrival: this rank's own ones first, so float32 sums have another order on every rank. They are of
another part of dW on every rank, and the same in every run.

    dW = round(dW_before + sum)     or round(sum), in float32; into a float32 main_grad without a rounding

Graphs: a launch depends on nothing of the host that changes from call to call, see _signals.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from tp_kernels.comm.errors import ShapeError, UnsupportedError

from ._device import narrow, widen
from ._gather import await_rows, finish, gather_rows, plan_gather, row_block_at, row_blocks_of
from ._gemm import REGISTERS, Tiling, accumulate, check_alike, choose_for_gradient, place, tma
from ._rounds import start_of
from ._signals import enter
from .workspace import Workspace, check_operand, result_like

# Rows whose arrival is waited for at a time: enough for the loop over them to fill its pipeline.
SEGMENT = 256


def reference(parts: list[Tensor], other: Tensor, of_gathered: bool) -> Tensor:
    """The result of a rank with `other` for the rows of all ranks."""
    gathered = torch.cat(parts).float()
    product = other.float().t() @ gathered
    return product.t() if of_gathered else product


@triton.jit(do_not_specialize=["small", "larger", "unit", "rank", "senders", "timeout"])
def gather_and_accumulate(
    x, gathered, other, out, columns, out_row, out_column, small, larger, unit, inner, part,
    channels, senders, table, record, rank, timeout,
    OPERATION: tl.constexpr, WORLD: tl.constexpr, STRIDE: tl.constexpr, DEPTH: tl.constexpr,
    CHUNK: tl.constexpr, LANES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, TMA: tl.constexpr,
    ROWS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """x [own rows, inner], gathered [rows, inner], other [rows, columns]; out [columns, inner], any strides.

    small, larger, unit: see start_of; senders: as in all_gather_linear. ROWS: of a segment. ADD: to out.
    """
    if tl.program_id(0) < senders:
        gather_rows(
            x, gathered, small, larger, unit, inner, part, channels, table, record, rank, timeout,
            True, OPERATION, WORLD, STRIDE, DEPTH, CHUNK, LANES, BLOCK,
        )  # fmt: skip
    else:
        _, alive = enter(table, record, rank, 0, STRIDE, LANES)
        rows = start_of(WORLD, small, larger, unit)
        mine, mine_end = (
            start_of(rank, small, larger, unit),
            start_of(rank + 1, small, larger, unit),
        )
        _, own_segments = row_blocks_of(rank, small, larger, unit, ROWS)
        most_segments = tl.cdiv(small + tl.minimum(larger, 1) * unit, ROWS)
        segments = own_segments + (WORLD - 1) * most_segments
        row_blocks, column_blocks = tl.cdiv(columns, BLOCK_M), tl.cdiv(inner, BLOCK_N)
        programs = tl.num_programs(0) - senders
        tile = tl.program_id(0) - senders
        while (tile < row_blocks * column_blocks) & alive:
            row_block, column_block = place(tile, row_blocks, column_blocks, GROUP)
            down, right = row_block * BLOCK_M, column_block * BLOCK_N
            total = tl.full([BLOCK_M, BLOCK_N], 0.0, tl.float32)
            for turn in tl.range(0, segments, disable_licm=True):
                segment, exists = row_block_at(turn, rank, small, larger, unit, WORLD, ROWS)
                first = segment * ROWS
                length = tl.where(exists, tl.minimum(rows - first, ROWS), 0)
                local = (first >= mine) & (first + length <= mine_end)
                if exists & (local == 0):
                    alive = await_rows(
                        first, first + ROWS, small, larger, unit, inner, part, channels,
                        table, record, rank, alive, timeout, OPERATION, WORLD, STRIDE, LANES,
                    )  # fmt: skip
                source = tl.where(local, x - mine.to(tl.int64) * inner, gathered)
                begin = first.to(tl.int64)
                total = accumulate(
                    total, other + begin * columns, source + begin * inner, down, columns - down,
                    right, inner - right, tl.where(alive, length, 0), 1, columns, 1, inner,
                    BLOCK_M, BLOCK_N, BLOCK_K, TMA, True,
                )  # fmt: skip
            row, column = down + tl.arange(0, BLOCK_M), right + tl.arange(0, BLOCK_N)
            place_of = (
                row[:, None].to(tl.int64) * out_row + column[None, :].to(tl.int64) * out_column
            )
            inside = ((row < columns)[:, None] & (column < inner)[None, :]) & alive
            if ADD:
                total += widen(tl.load(out + place_of, mask=inside, other=0.0))
            tl.store(out + place_of, narrow(total, out.dtype.element_ty), mask=inside)
            tile += programs
        finish(
            small, larger, unit, inner, part, channels, programs, table, record, rank, alive, timeout,
            OPERATION, WORLD, STRIDE, LANES,
        )  # fmt: skip


def all_gather_weight_gradient(
    x: Tensor,
    other: Tensor,
    workspace: Workspace,
    *,
    counts: Sequence[int] | None = None,
    of_gathered: bool = False,
    out: Tensor | None = None,
    accumulate_into: Tensor | None = None,
    gathered: Tensor | None = None,
    tiling: Tiling | None = None,
) -> tuple[Tensor, Tensor]:
    """Product of the rows of all ranks with rows that this rank has. Collective.

    Args:
        x: [R_r, K], float32, bfloat16 or float16. K and dtype are equal on all ranks.
        other: [R, N] of the dtype of x, the gradient that belongs to the rows. Ranks may differ in N.
        counts: R_r of each rank: multiples of one number, divided as by split_sizes; default: all
            ranks have as many as this one.
        of_gathered: the gathered rows are the gradient, and `other` is the input.
        out: takes the result: contiguous, apart from the operands in memory.
        accumulate_into: float32 or of the dtype of x, any strides: gets the result added (main_grad).
        gathered: takes the gathered rows: contiguous, apart from the operands in memory.
        tiling: instead of what the shape suggests; equal on all ranks.

    Returns:
        (other^T x [N, K], with of_gathered x^T other [K, N]; the gathered x [R, K]).

    Raises:
        ShapeError, UnsupportedError: before anything is sent.
        CollectiveTimeoutError: interpreted, as `Workspace.launch`.
    """
    operation = "all_gather_weight_gradient"
    check_operand(operation, workspace, x)
    where = f"{operation} on rank {workspace.rank} of {workspace.world}"
    if x.dim() != 2 or other.dim() != 2:
        raise ShapeError(
            f"{where}: x is {tuple(x.shape)}, other {tuple(other.shape)}; expected [R_r, K] and [R, N]"
        )
    division = workspace.rows_of_ranks(operation, counts or [x.shape[0]] * workspace.world)
    rows, inner, columns = division.total(workspace.world), x.shape[1], other.shape[1]
    if division.rows(workspace.rank) != x.shape[0] or other.shape[0] != rows:
        raise ShapeError(
            f"{where}: x has {x.shape[0]} rows and other {other.shape[0]}, counts={counts}"
        )
    check_alike(where, x, other=[other])
    shape = (inner, columns) if of_gathered else (columns, inner)
    if accumulate_into is None:
        result = result_like(operation, workspace, x, shape, out)
    else:
        result = accumulate_into
        if out is not None:
            raise UnsupportedError(f"{where}: out and accumulate_into; give one of them")
        if result.shape != shape or result.device != x.device:
            raise ShapeError(
                f"{where}: accumulate_into is {tuple(result.shape)}, the result {shape}"
            )
        if result.dtype not in (torch.float32, x.dtype):
            raise UnsupportedError(f"{where}: accumulate_into is {result.dtype}")
    gathered = result_like(operation, workspace, x, (rows, inner), gathered)
    view = result.t() if of_gathered else result  # [N, K]
    if workspace.world == 1 or rows * inner == 0:
        if workspace.world == 1:
            gathered.copy_(x)
        if accumulate_into is None:
            view.copy_(other.t() @ gathered)
        else:
            view.add_(other.float().t() @ gathered.float())
        return result, gathered
    tiling = tiling or choose_for_gradient(x)
    x, other = x.contiguous(), other.contiguous()
    tiles = -(-columns // tiling.block_m) * -(-inner // tiling.block_n)
    plan = plan_gather(workspace, division, inner, x.element_size(), tiling, tiles)
    workspace.launch(
        gather_and_accumulate,
        operation,
        plan.programs,
        x,
        gathered,
        other,
        view,
        columns,
        *view.stride(),
        *division.scaled(1),
        inner,
        plan.part,
        plan.channels,
        plan.senders,
        warps=tiling.warps,
        registers=REGISTERS,
        num_stages=tiling.stages,
        TMA=tma(tiling, [other.t()], [x.t(), gathered.t()]),
        ROWS=max(tiling.block_k, SEGMENT) if not x.is_cpu else tiling.block_k,
        ADD=accumulate_into is not None,
        **tiling.constants(x.element_size()),
    )
    return result, gathered
