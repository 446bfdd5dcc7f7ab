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

from tp_kernels.comm.errors import ShapeError, UnsupportedError

from ._device import device_function, narrow, widen
from ._rounds import receive, send, sum_of_ranks
from ._signals import CREDIT, READY, enter, leave, observe, publish
from .all_reduce import ONE_SHOT_BYTES
from .workspace import Workspace, check_operand

MOST_COLUMNS = 16384  # of a row, which a program holds in registers: beyond, they spill


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
def _add_to_row(total, bias, residual, columns, offsets, mask, TYPE: tl.constexpr):
    """s of a row: bias into the float32 sum, residual as an operation of its own."""
    if bias is not None:
        total += widen(tl.load(bias + columns, mask=mask, other=0.0))
    value = narrow(total, TYPE)
    if residual is not None:
        value = narrow(
            widen(value) + widen(tl.load(residual + offsets, mask=mask, other=0.0)), TYPE
        )
    return value


@device_function
def _norm_row(value, weight, y, s, columns, offsets, mask, width, epsilon, TYPE: tl.constexpr):
    """Store s and y of a row."""
    wide = widen(value)
    mean = tl.sum(wide * wide, axis=0) / width
    scale = tl.div_rn(1.0, tl.sqrt_rn(mean + epsilon))
    unit = narrow(wide * scale, TYPE)
    scaled = widen(tl.load(weight + columns, mask=mask, other=0.0)) * widen(unit)
    tl.store(s + offsets, value, mask=mask)
    tl.store(y + offsets, narrow(scaled, TYPE), mask=mask)


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
    columns = tl.arange(0, BLOCK)
    first = channel * part
    while (first < rows) & alive:
        epoch += 1
        alive = observe(
            table, record, rank, channel, CREDIT, epoch - DEPTH, alive, timeout,
            OPERATION, WORLD, STRIDE, LANES,
        )  # fmt: skip
        length = tl.minimum(rows - first, part)
        for row in range(0, length):
            mask = (columns < width) & alive
            value = tl.load(x + (first + row) * width + columns, mask=mask)
            for step in tl.static_range(1, WORLD):  # not all to the same rank at once
                send(
                    value, table, (rank + step) % WORLD, rank, channel, epoch,
                    row * width + columns, mask, WORLD, STRIDE, DEPTH, CHUNK,
                )  # fmt: skip
        publish(table, rank, channel, READY, epoch, alive, WORLD, STRIDE, LANES)
        alive = observe(
            table, record, rank, channel, READY, epoch, alive, timeout,
            OPERATION, WORLD, STRIDE, LANES,
        )  # fmt: skip
        for row in range(0, length):
            mask = (columns < width) & alive
            offsets = (first + row) * width + columns
            own = tl.load(x + offsets, mask=mask, other=0.0)
            total = sum_of_ranks(
                own, table, rank, channel, epoch, row * width + columns, mask,
                WORLD, STRIDE, DEPTH, CHUNK,
            )  # fmt: skip
            value = _add_to_row(total, bias, residual, columns, offsets, mask, TYPE)
            _norm_row(value, weight, y, s, columns, offsets, mask, width, epsilon, TYPE)
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
    columns = tl.arange(0, BLOCK)
    first = channel * part * WORLD
    while (first < rows) & alive:
        epoch += 1
        alive = observe(
            table, record, rank, channel, CREDIT, epoch - DEPTH, alive, timeout,
            OPERATION, WORLD, STRIDE, LANES,
        )  # fmt: skip
        for step in tl.static_range(1, WORLD):
            peer = (rank + step) % WORLD
            theirs = first + peer * part
            for row in range(0, tl.minimum(rows - theirs, part)):
                mask = (columns < width) & alive
                value = tl.load(x + (theirs + row) * width + columns, mask=mask)
                send(
                    value, table, peer, rank, channel, epoch, row * width + columns, mask,
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
            mask = (columns < width) & alive
            offsets = (mine + row) * width + columns
            own = tl.load(x + offsets, mask=mask, other=0.0)
            total = sum_of_ranks(
                own, table, rank, channel, scattered, row * width + columns, mask,
                WORLD, STRIDE, DEPTH, CHUNK,
            )  # fmt: skip
            value = _add_to_row(total, bias, residual, columns, offsets, mask, TYPE)
            for step in tl.static_range(1, WORLD):
                send(
                    value, table, (rank + step) % WORLD, rank, channel, epoch,
                    row * width + columns, mask, WORLD, STRIDE, DEPTH, CHUNK,
                )  # fmt: skip
            _norm_row(value, weight, y, s, columns, offsets, mask, width, epsilon, TYPE)
        publish(table, rank, channel, READY, epoch, alive, WORLD, STRIDE, LANES)
        publish(table, rank, channel, CREDIT, scattered, alive, WORLD, STRIDE, LANES)
        alive = observe(
            table, record, rank, channel, READY, epoch, alive, timeout,
            OPERATION, WORLD, STRIDE, LANES,
        )  # fmt: skip
        for step in tl.static_range(1, WORLD):
            peer = (rank + step) % WORLD
            theirs = first + peer * part
            for row in range(0, tl.minimum(rows - theirs, part)):
                mask = (columns < width) & alive
                value = receive(
                    TYPE, table, peer, rank, channel, epoch, row * width + columns, mask,
                    WORLD, STRIDE, DEPTH, CHUNK,
                )  # fmt: skip
                offsets = (theirs + row) * width + columns
                _norm_row(value, weight, y, s, columns, offsets, mask, width, epsilon, TYPE)
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
        x: [..., H], this rank's summand; float32, bfloat16 or float16; H at most 16384.
        weight: [H] of the norm; bias: [H]; residual: [..., H]; of the dtype of x, equal on all ranks.
        shots: 1 or 2 instead of what the size suggests; equal on all ranks.

    Returns:
        (y, s), both [..., H] with the same bits on every rank.

    Raises:
        ShapeError, UnsupportedError: before anything is sent; a row must fit into a chunk.
        CollectiveTimeoutError: as `Workspace.launch`.
    """
    check_operand("all_reduce_rms_norm", workspace, x)
    where = f"all_reduce_rms_norm on rank {workspace.rank} of {workspace.world}"
    width = x.shape[-1] if x.dim() else 0
    for name, value, shape in (
        ("weight", weight, x.shape[-1:]),
        ("bias", bias, x.shape[-1:]),
        ("residual", residual, x.shape),
    ):
        if x.dim() == 0 or (value is not None and (value.shape != shape or value.dtype != x.dtype)):
            raise ShapeError(
                f"{where}: x is {tuple(x.shape)} {x.dtype}, {name} is "
                f"{None if value is None else (tuple(value.shape), value.dtype)}; expected [..., H] and "
                "[H], a residual like x, all of one dtype"
            )
    if width > MOST_COLUMNS or width * x.element_size() > workspace.shape.chunk:
        raise UnsupportedError(
            f"{where}: rows of {width}; at most {MOST_COLUMNS}, and {width * x.element_size()} bytes must "
            f"fit into a chunk of {workspace.shape.chunk}: WorkspaceShape(chunk=)"
        )
    if shots not in (None, 1, 2):
        raise UnsupportedError(f"{where}: shots={shots}; use 1, 2 or None")
    if shots == 2 and workspace.shape.depth < 2:
        raise UnsupportedError(f"{where}: two shots need a workspace of depth 2 or more")
    y, s = x.new_empty(x.shape), x.new_empty(x.shape)
    if x.numel() == 0:
        return y, s
    if shots is None:
        shots = 1 if x.nbytes <= ONE_SHOT_BYTES or workspace.shape.depth < 2 else 2
    rows = x.numel() // width
    share = rows if shots == 1 else -(-rows // workspace.world)
    part, programs = workspace.divide(share, width * x.element_size(), 1)
    block = triton.next_power_of_2(width)
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
        warps=warps_of(block),
        BLOCK=block,
    )
    return y, s


def warps_of(block: int) -> int:
    """Warps for a row of `block` columns: enough that it stays in registers."""
    return min(16, max(4, block // 512))
