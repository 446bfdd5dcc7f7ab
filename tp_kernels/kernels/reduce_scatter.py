"""reduce_scatter: every rank gets its rows of the sum over ranks.

    out_r = round(x_0[rows of r] + x_1[rows of r] + ... )        in float32, in rank order, rounded once

Every rank writes the rows of rank j of its x to j, which sums: one round. Backward: all_gather.
Rows are divided as by `tp_kernels.split_sizes`, so any number of them works; a rank with none still signals.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tp_kernels.comm.exchanges import counts_of_reduce_scatter
from tp_kernels.comm.layout import split_range

from ._device import narrow
from ._rounds import length_of, send, start_of, sum_of_ranks
from ._signals import CREDIT, READY, enter, leave, observe, publish
from .workspace import WARPS, Workspace, result_like, tile


def reference(xs: list[Tensor], rank: int) -> Tensor:
    """The result of `rank` for the `x` of all ranks."""
    start, stop = split_range(xs[0].shape[0], len(xs), rank)
    total = xs[0][start:stop].float()
    for x in xs[1:]:
        total = total + x[start:stop].float()
    return total.to(xs[0].dtype)


@triton.jit(do_not_specialize=["rank", "timeout"])
def scatter(
    x, out, small, larger, width, most, part, table, record, rank, timeout,
    OPERATION: tl.constexpr, WORLD: tl.constexpr, STRIDE: tl.constexpr, DEPTH: tl.constexpr,
    CHUNK: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """x [rows of all ranks], out [rows of this rank]; a round takes `part` elements of every rank's rows.

    small, larger, width: see start_of. most: elements of the rank that has most.
    """
    channel = tl.program_id(0).to(tl.int64)
    me = tl.cast(rank, tl.int64)
    epoch, alive = enter(table, record, rank, channel, STRIDE, LANES)
    mine = start_of(me, small, larger, width)
    my_count = start_of(me + 1, small, larger, width) - mine
    first = channel * part
    while (first < most) & alive:
        epoch += 1
        my_length = length_of(my_count, first, part)
        alive = observe(
            table, record, rank, channel, CREDIT, epoch - DEPTH, alive, timeout,
            OPERATION, WORLD, STRIDE, LANES,
        )  # fmt: skip
        for step in range(1, WORLD):  # not all to the same rank at once
            peer = (me + step) % WORLD
            theirs = start_of(peer, small, larger, width)
            their_count = start_of(peer + 1, small, larger, width) - theirs
            length = length_of(their_count, first, part)
            for start in range(0, part, BLOCK):
                offsets = start + tl.arange(0, BLOCK)
                mask = (offsets < length) & alive
                value = tl.load(x + theirs + first + offsets, mask=mask)
                send(
                    value, table, peer, rank, channel, epoch, offsets, mask,
                    WORLD, STRIDE, DEPTH, CHUNK,
                )  # fmt: skip
        publish(table, rank, channel, READY, epoch, alive, WORLD, STRIDE, LANES)
        alive = observe(
            table, record, rank, channel, READY, epoch, alive, timeout,
            OPERATION, WORLD, STRIDE, LANES,
        )  # fmt: skip
        for start in range(0, part, BLOCK):
            offsets = start + tl.arange(0, BLOCK)
            mask = (offsets < my_length) & alive
            own = tl.load(x + mine + first + offsets, mask=mask, other=0.0)
            total = sum_of_ranks(
                own, table, rank, channel, epoch, offsets, mask, WORLD, STRIDE, DEPTH, CHUNK
            )
            tl.store(out + first + offsets, narrow(total, own.dtype.scalar), mask=mask)
        publish(table, rank, channel, CREDIT, epoch, alive, WORLD, STRIDE, LANES)
        first += tl.num_programs(0) * part
    leave(table, rank, channel, epoch, alive, STRIDE)


def reduce_scatter(x: Tensor, workspace: Workspace, *, out: Tensor | None = None) -> Tensor:
    """[R, ...] -> this rank's [split_sizes(R, W)[rank], ...] rows of the sum over ranks. Collective.

    Args:
        x: float32, bfloat16 or float16; shape and dtype equal on all ranks.
        out: takes the result: contiguous, apart from `x` in memory.

    Raises:
        ShapeError, UnsupportedError: before anything is sent.
        CollectiveTimeoutError: interpreted, as `Workspace.launch`.
    """
    counts = counts_of_reduce_scatter(workspace, x)
    rows, width = x.shape[0], x.shape[1:].numel()
    shape = (counts[workspace.rank], *x.shape[1:])
    out = result_like("reduce_scatter", workspace, x, shape, out)
    if workspace.world == 1:
        return out.copy_(x)
    if x.numel() == 0:
        return out
    block = tile(x.dtype)
    part, programs = workspace.divide(counts[0] * width, x.element_size(), block)
    workspace.launch(
        scatter,
        "reduce_scatter",
        programs,
        x.contiguous(),
        out,
        counts[-1] * width,
        rows % workspace.world,
        width,
        counts[0] * width,
        part,
        warps=WARPS,
        BLOCK=block,
    )
    return out
