"""all_reduce_rms_norm: the sum over ranks, bias, residual and RMS norm in one launch.

    s = round(round(x_0 + ... + x_{W-1} + bias) + residual)        in float32, in rank order
    y = round(weight * round(s / sqrt(mean(s^2) + epsilon)))

s has the bits of all_reduce, bias and residual as separate operations; y those of the same kernel
on every rank. One and two shots as in all_reduce.py, by rows; in two shots every rank sends s and norms
all rows itself, which costs less than sending y as well.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tp_kernels.comm.exchanges import check_norm, choose_shots

from ._device import device_function, narrow, widen
from ._rounds import receive, send, send_to_peers, sum_of_ranks
from ._signals import CREDIT, READY, enter, leave, observe, publish
from .workspace import WARPS, Workspace, tile


def reference(
    xs: list[Tensor],
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    epsilon: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """(y, s) for the `x` of all ranks."""
    total, dtype = xs[0].float(), xs[0].dtype
    for x in xs[1:]:
        total = total + x.float()
    s = (total if bias is None else total + bias.float()).to(dtype)
    s = s if residual is None else s + residual
    scale = (s.float().pow(2).mean(-1, keepdim=True) + epsilon).rsqrt()
    return weight * (s.float() * scale).to(dtype), s


@device_function
def _add_to_row(total, bias, residual, columns, at, mask, TYPE: tl.constexpr):
    """s of a row: bias into the float32 sum, residual as an operation of its own."""
    if bias is not None:
        total += widen(tl.load(bias + columns, mask=mask, other=0.0))
    value = narrow(total, TYPE)
    if residual is not None:
        more = widen(tl.load(residual + at + columns, mask=mask, other=0.0))
        value = narrow(widen(value) + more, TYPE)
    return value


@device_function
def _norm_row(squares, s, weight, y, at, width, epsilon, alive, BLOCK: tl.constexpr):
    """y of the row of s at `at`, whose squares add up to those in `squares` [BLOCK]."""
    mean = tl.sum(squares, axis=0) / width
    scale = tl.div_rn(1.0, tl.sqrt_rn(mean + epsilon))
    tl.debug_barrier()  # other threads may have stored what this one reads again
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        mask = (columns < width) & alive
        value = tl.load(s + at + columns, mask=mask, other=0.0)
        unit = narrow(widen(value) * scale, value.dtype.scalar)
        scaled = widen(tl.load(weight + columns, mask=mask, other=0.0)) * widen(unit)
        tl.store(y + at + columns, narrow(scaled, value.dtype.scalar), mask=mask)


@triton.jit(do_not_specialize=["rank", "timeout"])
def one_shot(
    x, bias, residual, weight, y, s, rows, width, epsilon, part, table, record, rank, timeout,
    OPERATION: tl.constexpr, WORLD: tl.constexpr, STRIDE: tl.constexpr, DEPTH: tl.constexpr,
    CHUNK: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """x, residual, y, s [rows, width]; bias, weight [width]; a round takes `part` rows."""
    TYPE: tl.constexpr = x.dtype.element_ty
    channel = tl.program_id(0).to(tl.int64)
    epoch, alive = enter(table, record, rank, channel, STRIDE, LANES)
    first = channel * part
    while (first < rows) & alive:
        epoch += 1
        alive = observe(
            table, record, rank, channel, CREDIT, epoch - DEPTH, alive, timeout,
            OPERATION, WORLD, STRIDE, LANES,
        )  # fmt: skip
        length = (tl.minimum(rows - first, part) * width).to(tl.int32)
        for place in range(0, length, BLOCK):
            offsets = place + tl.arange(0, BLOCK)
            mask = (offsets < length) & alive
            value = tl.load(x + first * width + offsets, mask=mask)
            send_to_peers(
                value, table, rank, channel, epoch, offsets, mask,
                WORLD, STRIDE, DEPTH, CHUNK,
            )  # fmt: skip
        publish(table, rank, channel, READY, epoch, alive, WORLD, STRIDE, LANES)
        alive = observe(
            table, record, rank, channel, READY, epoch, alive, timeout,
            OPERATION, WORLD, STRIDE, LANES,
        )  # fmt: skip
        for row in range(0, tl.minimum(rows - first, part)):
            at = (first + row) * width
            squares = tl.full([BLOCK], 0.0, tl.float32)
            for start in range(0, width, BLOCK):
                columns = start + tl.arange(0, BLOCK)
                mask = (columns < width) & alive
                own = tl.load(x + at + columns, mask=mask, other=0.0)
                total = sum_of_ranks(
                    own, table, rank, channel, epoch, row * width + columns, mask,
                    WORLD, STRIDE, DEPTH, CHUNK,
                )  # fmt: skip
                value = _add_to_row(total, bias, residual, columns, at, mask, TYPE)
                tl.store(s + at + columns, value, mask=mask)
                squares += widen(value) * widen(value)
            _norm_row(squares, s, weight, y, at, width, epsilon, alive, BLOCK)
        publish(table, rank, channel, CREDIT, epoch, alive, WORLD, STRIDE, LANES)
        first += tl.num_programs(0) * part
    leave(table, rank, channel, epoch, alive, STRIDE)


@triton.jit(do_not_specialize=["rank", "timeout"])
def two_shots(
    x, bias, residual, weight, y, s, rows, width, epsilon, part, table, record, rank, timeout,
    OPERATION: tl.constexpr, WORLD: tl.constexpr, STRIDE: tl.constexpr, DEPTH: tl.constexpr,
    CHUNK: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """As one_shot; two rounds of a channel take `part` rows for every rank to sum."""
    TYPE: tl.constexpr = x.dtype.element_ty
    channel = tl.program_id(0).to(tl.int64)
    epoch, alive = enter(table, record, rank, channel, STRIDE, LANES)
    first = channel * part * WORLD
    while (first < rows) & alive:
        epoch += 1
        alive = observe(
            table, record, rank, channel, CREDIT, epoch - DEPTH, alive, timeout,
            OPERATION, WORLD, STRIDE, LANES,
        )  # fmt: skip
        for step in range(1, WORLD):
            peer = (rank + step) % WORLD
            theirs = first + peer * part
            length = (tl.minimum(rows - theirs, part) * width).to(tl.int32)
            for place in range(0, length, BLOCK):
                offsets = place + tl.arange(0, BLOCK)
                mask = (offsets < length) & alive
                value = tl.load(x + theirs * width + offsets, mask=mask)
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
        for row in range(0, tl.minimum(rows - mine, part)):
            at = (mine + row) * width
            squares = tl.full([BLOCK], 0.0, tl.float32)
            for start in range(0, width, BLOCK):
                columns = start + tl.arange(0, BLOCK)
                mask = (columns < width) & alive
                own = tl.load(x + at + columns, mask=mask, other=0.0)
                total = sum_of_ranks(
                    own, table, rank, channel, scattered, row * width + columns, mask,
                    WORLD, STRIDE, DEPTH, CHUNK,
                )  # fmt: skip
                value = _add_to_row(total, bias, residual, columns, at, mask, TYPE)
                tl.store(s + at + columns, value, mask=mask)
                send_to_peers(
                    value, table, rank, channel, epoch, row * width + columns, mask,
                    WORLD, STRIDE, DEPTH, CHUNK,
                )  # fmt: skip
                squares += widen(value) * widen(value)
            _norm_row(squares, s, weight, y, at, width, epsilon, alive, BLOCK)
        publish(table, rank, channel, READY, epoch, alive, WORLD, STRIDE, LANES)
        publish(table, rank, channel, CREDIT, scattered, alive, WORLD, STRIDE, LANES)
        alive = observe(
            table, record, rank, channel, READY, epoch, alive, timeout,
            OPERATION, WORLD, STRIDE, LANES,
        )  # fmt: skip
        for step in range(1, WORLD):
            peer = (rank + step) % WORLD
            theirs = first + peer * part
            for row in range(0, tl.minimum(rows - theirs, part)):
                at = (theirs + row) * width
                squares = tl.full([BLOCK], 0.0, tl.float32)
                for start in range(0, width, BLOCK):
                    columns = start + tl.arange(0, BLOCK)
                    mask = (columns < width) & alive
                    value = receive(
                        TYPE, table, peer, rank, channel, epoch, row * width + columns, mask,
                        WORLD, STRIDE, DEPTH, CHUNK,
                    )  # fmt: skip
                    tl.store(s + at + columns, value, mask=mask)
                    squares += widen(value) * widen(value)
                _norm_row(squares, s, weight, y, at, width, epsilon, alive, BLOCK)
        publish(table, rank, channel, CREDIT, epoch, alive, WORLD, STRIDE, LANES)
        first += tl.num_programs(0) * part * WORLD
    leave(table, rank, channel, epoch, alive, STRIDE)


def all_reduce_rms_norm(
    x: Tensor,
    weight: Tensor,
    workspace: Workspace,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    epsilon: float = 1e-6,
    shots: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Sum over ranks, bias, residual and RMS norm (Zhang and Sennrich, 2019). Collective.

    Args:
        x: [..., H], this rank's summand; float32, bfloat16 or float16.
        weight: [H] of the norm; bias: [H]; residual: [..., H]; of the dtype of x, equal on all ranks.
        shots: 1 or 2 instead of what the size suggests; equal on all ranks.

    Returns:
        (y, s), both [..., H] with the same bits on every rank.

    Raises:
        ShapeError, UnsupportedError: before anything is sent; a row must fit into a chunk.
        CollectiveTimeoutError: interpreted, as `Workspace.launch`.
    """
    check_norm(
        workspace,
        x,
        [
            ("weight", weight, x.shape[-1:]),
            ("bias", bias, x.shape[-1:]),
            ("residual", residual, x.shape),
        ],
    )
    width, shots = x.shape[-1], choose_shots("all_reduce_rms_norm", workspace, x, shots)
    y, s = x.new_empty(x.shape), x.new_empty(x.shape)
    if x.numel() == 0:
        return y, s
    rows = x.numel() // width
    share = rows if shots == 1 else -(-rows // workspace.world)
    part, programs = workspace.divide(share, width * x.element_size(), 1)
    block = min(tile(x.dtype), triton.next_power_of_2(width))
    workspace.launch(
        one_shot if shots == 1 else two_shots,
        "all_reduce_rms_norm",
        programs,
        x.contiguous(),
        bias if bias is None else bias.contiguous(),
        residual if residual is None else residual.contiguous(),
        weight.contiguous(),
        y,
        s,
        rows,
        width,
        epsilon,
        part,
        warps=WARPS,
        BLOCK=block,
    )
    return y, s
