"""all_reduce: the sum over ranks, on every rank, by kernels that write into each other's memory.

    out = round(x_0 + x_1 + ... + x_{W-1})        in float32, in rank order, rounded once

One shot: every rank sends all of x to every peer and sums for itself: one round, W - 1 times the traffic.
Two shots: rank j gets part j of every x, sums it and sends the sum to every peer: two rounds, 2 (W-1) / W.
Both give the same bits, which are those of `tp_kernels.all_reduce` except for the payload of NaNs.

Graphs: a launch depends on nothing of the host that changes from call to call, see _signals.py.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tp_kernels.comm.exchanges import choose_shots, result_of_all_reduce

from ._device import narrow
from ._rounds import receive, send, send_to_peers, sum_of_ranks
from ._signals import CREDIT, READY, enter, leave, observe, publish
from .workspace import WARPS, Workspace, check_operand, tile


def reference(xs: list[Tensor]) -> Tensor:
    """The result for the `x` of all ranks."""
    total = xs[0].float()
    for x in xs[1:]:
        total = total + x.float()
    return total.to(xs[0].dtype)


@triton.jit(do_not_specialize=["rank", "timeout"])
def one_shot(
    x, out, count, part, table, record, rank, timeout,
    OPERATION: tl.constexpr, WORLD: tl.constexpr, STRIDE: tl.constexpr, DEPTH: tl.constexpr,
    CHUNK: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """x, out [count]; a round of a channel takes `part` elements."""
    channel = tl.program_id(0).to(tl.int64)
    epoch, alive = enter(table, record, rank, channel, STRIDE, LANES)
    first = channel * part
    while (first < count) & alive:
        length = tl.minimum(count - first, part).to(tl.int32)
        epoch += 1
        alive = observe(
            table, record, rank, channel, CREDIT, epoch - DEPTH, alive, timeout,
            OPERATION, WORLD, STRIDE, LANES,
        )  # fmt: skip
        for start in range(0, part, BLOCK):
            offsets = start + tl.arange(0, BLOCK)
            mask = (offsets < length) & alive
            value = tl.load(x + first + offsets, mask=mask)
            send_to_peers(
                value, table, rank, channel, epoch, offsets, mask,
                WORLD, STRIDE, DEPTH, CHUNK,
            )  # fmt: skip
        publish(table, rank, channel, READY, epoch, alive, WORLD, STRIDE, LANES)
        alive = observe(
            table, record, rank, channel, READY, epoch, alive, timeout,
            OPERATION, WORLD, STRIDE, LANES,
        )  # fmt: skip
        for start in range(0, part, BLOCK):
            offsets = start + tl.arange(0, BLOCK)
            mask = (offsets < length) & alive
            own = tl.load(x + first + offsets, mask=mask, other=0.0)
            total = sum_of_ranks(
                own, table, rank, channel, epoch, offsets, mask, WORLD, STRIDE, DEPTH, CHUNK
            )
            tl.store(out + first + offsets, narrow(total, own.dtype.scalar), mask=mask)
        publish(table, rank, channel, CREDIT, epoch, alive, WORLD, STRIDE, LANES)
        first += tl.num_programs(0) * part
    leave(table, rank, channel, epoch, alive, STRIDE)


@triton.jit(do_not_specialize=["rank", "timeout"])
def two_shots(
    x, out, count, part, table, record, rank, timeout,
    OPERATION: tl.constexpr, WORLD: tl.constexpr, STRIDE: tl.constexpr, DEPTH: tl.constexpr,
    CHUNK: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """x, out [count]; two rounds of a channel take `part` elements for every rank to sum."""
    channel = tl.program_id(0).to(tl.int64)
    epoch, alive = enter(table, record, rank, channel, STRIDE, LANES)
    first = channel * part * WORLD
    while (first < count) & alive:
        epoch += 1
        alive = observe(
            table, record, rank, channel, CREDIT, epoch - DEPTH, alive, timeout,
            OPERATION, WORLD, STRIDE, LANES,
        )  # fmt: skip
        for step in range(1, WORLD):
            peer = (rank + step) % WORLD
            theirs = first + peer * part
            length = tl.minimum(count - theirs, part).to(tl.int32)
            for start in range(0, part, BLOCK):
                offsets = start + tl.arange(0, BLOCK)
                mask = (offsets < length) & alive
                value = tl.load(x + theirs + offsets, mask=mask)
                send(
                    value, table, peer, rank, channel, epoch, offsets, mask,
                    WORLD, STRIDE, DEPTH, CHUNK,
                )  # fmt: skip
        publish(table, rank, channel, READY, epoch, alive, WORLD, STRIDE, LANES)
        alive = observe(
            table, record, rank, channel, READY, epoch, alive, timeout,
            OPERATION, WORLD, STRIDE, LANES,
        )  # fmt: skip
        scattered = epoch
        epoch += 1
        alive = observe(
            table, record, rank, channel, CREDIT, epoch - DEPTH, alive, timeout,
            OPERATION, WORLD, STRIDE, LANES,
        )  # fmt: skip
        mine = first + rank * part
        length = tl.minimum(count - mine, part).to(tl.int32)
        for start in range(0, part, BLOCK):
            offsets = start + tl.arange(0, BLOCK)
            mask = (offsets < length) & alive
            own = tl.load(x + mine + offsets, mask=mask, other=0.0)
            total = sum_of_ranks(
                own, table, rank, channel, scattered, offsets, mask, WORLD, STRIDE, DEPTH, CHUNK
            )
            value = narrow(total, own.dtype.scalar)
            tl.store(out + mine + offsets, value, mask=mask)
            send_to_peers(
                value, table, rank, channel, epoch, offsets, mask,
                WORLD, STRIDE, DEPTH, CHUNK,
            )  # fmt: skip
        publish(table, rank, channel, READY, epoch, alive, WORLD, STRIDE, LANES)
        publish(table, rank, channel, CREDIT, scattered, alive, WORLD, STRIDE, LANES)
        alive = observe(
            table, record, rank, channel, READY, epoch, alive, timeout,
            OPERATION, WORLD, STRIDE, LANES,
        )  # fmt: skip
        for step in range(1, WORLD):
            peer = (rank + step) % WORLD
            theirs = first + peer * part
            length = tl.minimum(count - theirs, part).to(tl.int32)
            for start in range(0, part, BLOCK):
                offsets = start + tl.arange(0, BLOCK)
                mask = (offsets < length) & alive
                value = receive(
                    out.dtype.element_ty, table, peer, rank, channel, epoch, offsets, mask,
                    WORLD, STRIDE, DEPTH, CHUNK,
                )  # fmt: skip
                tl.store(out + theirs + offsets, value, mask=mask)
        publish(table, rank, channel, CREDIT, epoch, alive, WORLD, STRIDE, LANES)
        first += tl.num_programs(0) * part * WORLD
    leave(table, rank, channel, epoch, alive, STRIDE)


def all_reduce(
    x: Tensor, workspace: Workspace, *, out: Tensor | None = None, shots: int | None = None
) -> Tensor:
    """Sum of `x` over the ranks of `workspace`, the same bits on all of them. Collective.

    Args:
        x: any shape, float32, bfloat16 or float16; shape and dtype equal on all ranks.
        out: takes the result: contiguous, may be `x`.
        shots: 1 or 2 instead of what the size suggests; equal on all ranks.

    Returns:
        A new tensor of the shape of `x`, or `out`.

    Raises:
        ShapeError, UnsupportedError: before anything is sent.
        CollectiveTimeoutError: interpreted, as `Workspace.launch`.
    """
    check_operand("all_reduce", workspace, x)
    shots = choose_shots("all_reduce", workspace, x, shots)
    out = result_of_all_reduce(workspace, x, out)
    if workspace.world == 1:
        return out if out is x else out.copy_(x)
    if x.numel() == 0:
        return out
    block = tile(x.dtype)
    share = x.numel() if shots == 1 else -(-x.numel() // workspace.world)
    part, programs = workspace.divide(share, x.element_size(), block)
    workspace.launch(
        one_shot if shots == 1 else two_shots,
        "all_reduce",
        programs,
        x.contiguous(),
        out,
        x.numel(),
        part,
        warps=WARPS,
        BLOCK=block,
    )
    return out
