"""all_gather_linear: y_i = act(all_gather(x) W_i^T + b_i), the products begin while rows are on their way.

One launch gathers and multiplies. The first programs gather the rows, as in all_gather; the others multiply
tiles of all products. Or all programs multiply, and the copy engine gathers (_copies.py). A tile of own rows
is read from x at once, any other when exactly its rows have arrived, also if they are of several ranks; see
_gather.py for the order and the flags.

    y = round(act(round(p + b)))    p accumulated in float32

Rows are divided as by `tp_kernels.split_sizes`. Backward: dx = linear_reduce_scatter(dy_i, W_i^T), and
dW_i = dy_i^T all_gather(x), from the rows that were kept or by all_gather_weight_gradient.

Graphs: a launch depends on nothing of the host that changes from call to call, see _signals.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import linear

from tp_kernels.comm.errors import ShapeError, UnsupportedError

from ._activation import TORCH, activate
from ._copies import COPY_BYTES, gathered_by_copies, plan_products
from ._device import widen
from ._gather import await_rows, finish, gather_rows, plan_gather, row_block_at, row_blocks_of
from ._gemm import (
    REGISTERS,
    Tiling,
    accumulate,
    as_list,
    check_alike,
    check_rows,
    check_width,
    choose,
    pick,
    place,
    tma,
)
from ._rounds import start_of
from ._signals import enter
from .workspace import Workspace, check_operand, result_like


def reference(xs: list[Tensor], ws: list[Tensor], biases: list[Tensor | None]) -> list[Tensor]:
    """The results of a rank with `ws` for the `x` of all ranks, without activation."""
    x = torch.cat(xs).float()
    products = [x @ w.float().t() for w in ws]
    return [
        (p if b is None else p + b.float()).to(xs[0].dtype)
        for p, b in zip(products, biases, strict=True)
    ]


@triton.jit(do_not_specialize=["small", "larger", "unit", "rank", "senders", "timeout"])
def gather_and_multiply(
    x, gathered, ws, biases, outs, widths, w_rows, w_inners, small, larger, unit, inner, part,
    channels, senders, table, record, rank, timeout,
    OPERATION: tl.constexpr, WORLD: tl.constexpr, STRIDE: tl.constexpr, DEPTH: tl.constexpr,
    CHUNK: tl.constexpr, LANES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, TMA: tl.constexpr,
    ACTIVATION: tl.constexpr,
):  # fmt: skip
    """x [own rows, inner], gathered [rows, inner]; of each product w [width, inner], bias, out [rows, width].

    small, larger, unit: see start_of. The first `senders` programs gather, in `channels` channels; with
    none, another does that and sets the flags.
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
        _, own_blocks = row_blocks_of(rank, small, larger, unit, BLOCK_M)
        most_blocks = tl.cdiv(small + tl.minimum(larger, 1) * unit, BLOCK_M)
        later_blocks = (WORLD - 1) * most_blocks
        column_blocks = 0
        for index in tl.static_range(len(widths)):
            column_blocks += tl.cdiv(widths[index], BLOCK_N)
        programs = tl.num_programs(0) - senders
        tile = tl.program_id(0) - senders
        own_tiles = own_blocks * column_blocks
        while (tile < own_tiles + later_blocks * column_blocks) & alive:
            if tile < own_tiles:
                turn, column_block = place(tile, own_blocks, column_blocks, GROUP)
            else:
                turn, column_block = place(tile - own_tiles, later_blocks, column_blocks, GROUP)
                turn += own_blocks
            block, exists = row_block_at(turn, rank, small, larger, unit, WORLD, BLOCK_M)
            if exists:
                first = block * BLOCK_M
                local = (first >= mine) & (tl.minimum(first + BLOCK_M, rows) <= mine_end)
                if not local:
                    alive = await_rows(
                        first, first + BLOCK_M, small, larger, unit, inner, part, channels,
                        table, record, rank, alive, timeout, OPERATION, WORLD, STRIDE, LANES,
                    )  # fmt: skip
                # All products side by side: which one is it?
                chosen, right = column_block * 0, column_block
                for index in tl.static_range(len(widths) - 1):
                    blocks = tl.cdiv(widths[index], BLOCK_N)
                    beyond = (chosen == index) & (right >= blocks)
                    chosen = tl.where(beyond, index + 1, chosen)
                    right = tl.where(beyond, right - blocks, right)
                right *= BLOCK_N
                width, out = pick(widths, chosen), pick(outs, chosen)
                TYPE: tl.constexpr = out.dtype.element_ty
                source = tl.where(local, x - mine.to(tl.int64) * inner, gathered)
                value = accumulate(
                    tl.full([BLOCK_M, BLOCK_N], 0.0, tl.float32), source, pick(ws, chosen),
                    first, tl.where(alive, rows - first, 0), right, width - right, inner, inner, 1,
                    pick(w_rows, chosen), pick(w_inners, chosen), BLOCK_M, BLOCK_N, BLOCK_K, TMA,
                )  # fmt: skip
                row, column = first + tl.arange(0, BLOCK_M), right + tl.arange(0, BLOCK_N)
                if biases is not None:
                    bias = tl.load(pick(biases, chosen) + column, mask=column < width, other=0.0)
                    value += widen(bias)[None, :]
                tl.store(
                    out + row[:, None].to(tl.int64) * width + column[None, :],
                    activate(value, TYPE, ACTIVATION),
                    mask=((row < rows)[:, None] & (column < width)[None, :]) & alive,
                )  # fmt: skip
            tile += programs
        finish(
            small, larger, unit, inner, part, channels, programs, table, record, rank, alive, timeout,
            OPERATION, WORLD, STRIDE, LANES,
        )  # fmt: skip


def all_gather_linear(
    x: Tensor,
    w: Tensor | Sequence[Tensor],
    workspace: Workspace,
    *,
    counts: Sequence[int] | None = None,
    bias: Tensor | Sequence[Tensor] | None = None,
    activation: str | None = None,
    gathered: Tensor | None = None,
    outs: Sequence[Tensor] | None = None,
    producer: str | None = None,
    tiling: Tiling | None = None,
) -> tuple[list[Tensor], Tensor]:
    """Products of the rows of all ranks with this rank's weights. Collective.

    Args:
        x: [R_r, K], float32, bfloat16 or float16. K and dtype are equal on all ranks.
        w: [N, K] of the dtype of x, any strides; or several [N_i, K]. Ranks may differ in N.
        counts: R_r of each rank: multiples of one number, divided as by split_sizes; default: all
            ranks have as many as this one.
        bias: [N]; or one for each weight.
        activation: None, "gelu", "gelu_tanh", "silu" or "relu", of every product.
        producer: of the rows: "programs" of the same launch, or "copies" by the copy engine, through the
            staging memory of the workspace; default: copies from COPY_BYTES on where they fit. Equal on
            all ranks.
        gathered, outs: take the results: contiguous, apart from the operands in memory.
        tiling: instead of what the shape suggests; equal on all ranks.

    Returns:
        ([y_i [R, N_i], ...], the gathered x [R, K]).

    Raises:
        ShapeError, UnsupportedError: before anything is sent.
        CollectiveTimeoutError: interpreted, as `Workspace.launch`.
    """
    operation = "all_gather_linear"
    ws = as_list(w)
    biases = [] if bias is None else as_list(bias)
    check_operand(operation, workspace, x)
    where = f"{operation} on rank {workspace.rank} of {workspace.world}"
    if x.dim() != 2 or not ws or any(one.shape != (one.shape[0], x.shape[1]) for one in ws):
        raise ShapeError(
            f"{where}: x is {tuple(x.shape)}, w {[tuple(one.shape) for one in ws]}; expected "
            "[R_r, K] and [N_i, K]"
        )
    if biases and len(biases) != len(ws):
        raise ShapeError(f"{where}: {len(biases)} biases for {len(ws)} weights")
    for one, its_bias in zip(ws, biases, strict=False):
        check_width(where, one, its_bias)
    check_alike(where, x, w=ws, bias=biases)
    if activation not in TORCH:
        raise UnsupportedError(f"{where}: activation={activation!r}; known are {tuple(TORCH)}")
    if producer not in (None, "programs", "copies"):
        raise UnsupportedError(f"{where}: producer={producer!r}; use 'programs', 'copies' or None")
    division = workspace.rows_of_ranks(operation, counts or [x.shape[0]] * workspace.world)
    if division.rows(workspace.rank) != x.shape[0]:
        raise ShapeError(f"{where}: x has {x.shape[0]} rows, counts={list(counts or [])}")
    rows, inner = division.total(workspace.world), x.shape[1]
    check_rows(where, rows)
    gathered = result_like(operation, workspace, x, (rows, inner), gathered)
    given: Sequence[Tensor | None] = outs or [None] * len(ws)
    ys = [
        result_like(operation, workspace, x, (rows, one.shape[0]), out)
        for one, out in zip(ws, given, strict=True)
    ]
    if workspace.world == 1 or rows * inner == 0:
        if workspace.world == 1:
            gathered.copy_(x)
        for index, y in enumerate(ys):
            y.copy_(
                TORCH[activation](linear(gathered, ws[index], biases[index] if biases else None))
            )
        return ys, gathered
    tiling, x = tiling or choose(x, division.most), x.contiguous()
    tiles = -(-rows // tiling.block_m) * sum(-(-y.shape[1] // tiling.block_n) for y in ys)
    most, room = division.most * inner * x.element_size(), _staged(workspace)
    if producer == "copies" and most > room:
        raise UnsupportedError(
            f"{where}: producer='copies' needs {most} bytes of staging memory, the workspace has {room}"
        )
    if producer is None:
        producer = "copies" if COPY_BYTES <= most <= room else "programs"
    if producer == "copies":
        plan = plan_products(workspace, division, inner, x.element_size(), tiling, tiles)
        source: AbstractContextManager[None] = gathered_by_copies(workspace, x, gathered, division)
    else:
        plan = plan_gather(workspace, division, inner, x.element_size(), tiling, tiles)
        source = nullcontext()
    with source:
        workspace.launch(
            gather_and_multiply,
            operation,
            plan.programs,
            x,
            gathered,
            tuple(ws),
            tuple(one.contiguous() for one in biases) or None,
            tuple(ys),
            tuple(one.shape[0] for one in ws),
            tuple(one.stride(0) for one in ws),
            tuple(one.stride(1) for one in ws),
            *division.scaled(1),
            inner,
            plan.part,
            plan.channels,
            plan.senders,
            warps=tiling.warps,
            registers=REGISTERS,
            num_stages=tiling.stages,
            TMA=tma(tiling, [x, gathered], ws),
            ACTIVATION=activation,
            **tiling.constants(x.element_size()),
        )
    return ys, gathered


def _staged(workspace: Workspace) -> int:
    """Bytes of rows that a rank can stage."""
    return workspace.staging[0].numel() if workspace.staging else 0
