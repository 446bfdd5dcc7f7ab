"""all_reduce, reduce_scatter, all_gather and all_reduce_rms_norm by kernels in CUDA C++ (csrc/cuda)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tp_kernels.comm.errors import ShapeError, UnsupportedError
from tp_kernels.comm.exchanges import (
    check_norm,
    choose_shots,
    counts_of_all_gather,
    counts_of_reduce_scatter,
    result_of_all_reduce,
)
from tp_kernels.comm.layout import Division
from tp_kernels.comm.workspace import Workspace, check_operand, result_like

from ._extension import extension, native_division, native_workspace, stream_on

LINE = 16  # bytes of the widest access
TILE = 4096  # bytes that a block moves at a time: below, another channel is not worth its signals
WAYS: dict[int | str, str] = {1: "one_shot", 2: "two_shots", "switch": "by_switch"}


def all_reduce(
    x: Tensor,
    workspace: Workspace,
    *,
    out: Tensor | None = None,
    shots: int | str | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Sum of `x` over the ranks of `workspace`, the same bits on all of them. Collective.

    Args:
        x: any shape, float32, bfloat16 or float16; shape and dtype equal on all ranks.
        out: takes the result: contiguous, may be `x`.
        shots: 1 or 2 instead of what the size suggests, or "switch"; equal on all ranks. The switch between
            the GPUs (NVLink SHARP) has bits of its own, and needs a workspace with a multicast address.
        bias: [H] for x [..., H], equal on all ranks, added before the one rounding; not by the switch.

    Returns:
        A new tensor of the shape of `x`, or `out`.

    Raises:
        ShapeError, UnsupportedError: before anything is sent.
        RuntimeError: CUDA refused the launch; names the kernel.
    """
    check_operand("all_reduce", workspace, x)
    if shots == "switch":
        _check_switch(workspace)
        way: int | str = "switch"
    else:
        way = choose_shots("all_reduce", workspace, x, shots)
    if bias is not None:
        _check_bias(workspace, x, bias, way)
        bias = bias.contiguous()
    out = result_of_all_reduce(workspace, x, out)
    if workspace.world == 1:
        return (
            torch.add(x, bias, out=out) if bias is not None else out if out is x else out.copy_(x)
        )
    if x.numel() == 0:
        return out
    share = x.numel() if way != 2 else -(-x.numel() // workspace.world)
    part, blocks = workspace.divide(share * x.element_size(), 1, TILE)
    x = x.contiguous()
    _launch(
        "all_reduce",
        workspace,
        blocks,
        way=WAYS[way],
        type=_type(x),
        x=x.data_ptr(),
        out=out.data_ptr(),
        bytes=x.nbytes,
        part=part,
        bias=0 if bias is None else bias.data_ptr(),
        width=0 if bias is None else bias.numel(),
        multicast=workspace.multicast,
    )
    return out


def reduce_scatter(x: Tensor, workspace: Workspace, *, out: Tensor | None = None) -> Tensor:
    """[R, ...] -> this rank's [split_sizes(R, W)[rank], ...] rows of the sum over ranks. Collective.

    Args:
        x: float32, bfloat16 or float16; shape and dtype equal on all ranks.
        out: takes the result: contiguous, apart from `x` in memory.

    Raises:
        ShapeError, UnsupportedError: before anything is sent.
        RuntimeError: CUDA refused the launch; names the kernel.
    """
    counts = counts_of_reduce_scatter(workspace, x)
    shape = (counts[workspace.rank], *x.shape[1:])
    out = result_like("reduce_scatter", workspace, x, shape, out)
    if workspace.world == 1:
        return out.copy_(x)
    if x.numel() == 0:
        return out
    x = x.contiguous()
    division = _in_bytes(counts, x.nbytes // x.shape[0])
    part, blocks = workspace.divide(division.most, 1, TILE)
    _launch(
        "reduce_scatter",
        workspace,
        blocks,
        type=_type(x),
        x=x.data_ptr(),
        out=out.data_ptr(),
        division=native_division(extension(), division),
        part=part,
    )
    return out


def all_gather(
    x: Tensor, workspace: Workspace, rows: int | None = None, *, out: Tensor | None = None
) -> Tensor:
    """This rank's rows [R_r, ...] -> [R, ...] of all ranks. Collective.

    Args:
        x: any dtype; all but the first dimension and the dtype equal on all ranks.
        rows: R, of which this rank holds split_sizes(R, W)[rank]; default: all ranks hold equally many.
        out: takes the result: contiguous, apart from `x` in memory.

    Raises:
        ShapeError, UnsupportedError: before anything is sent.
        RuntimeError: CUDA refused the launch; names the kernel.
    """
    counts = counts_of_all_gather(workspace, x, rows)
    out = result_like("all_gather", workspace, x, (sum(counts), *x.shape[1:]), out)
    if workspace.world == 1:
        return out.copy_(x)
    if out.numel() == 0:
        return out
    x = x.contiguous()
    division = _in_bytes(counts, out.nbytes // out.shape[0])
    part, blocks = workspace.divide(division.most, 1, TILE)
    _launch(
        "all_gather",
        workspace,
        blocks,
        piece=min(4, x.element_size()),
        x=x.data_ptr(),
        out=out.data_ptr(),
        division=native_division(extension(), division),
        part=part,
    )
    return out


def all_reduce_rms_norm(
    x: Tensor,
    weight: Tensor,
    workspace: Workspace,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    epsilon: float = 1e-6,
    shots: int | None = None,
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Sum over ranks, bias, residual and RMS norm (Zhang and Sennrich, 2019). Collective.

    Args:
        x: [..., H], this rank's summand; float32, bfloat16 or float16.
        weight: [H] of the norm; bias: [H]; residual: [..., H]; of the dtype of x, equal on all ranks.
        shots: 1 or 2 instead of what the size suggests; equal on all ranks.
        scale: float32 scalar; y is then float8_e4m3fn: the y of this dtype divided by it, to nearest
            even, at most 448.

    Returns:
        (y, s), both [..., H] with the same bits on every rank.

    Raises:
        ShapeError, UnsupportedError: before anything is sent; a row must fit into a chunk.
        RuntimeError: CUDA refused the launch; names the kernel.
    """
    vector = x.shape[-1:]
    check_norm(
        workspace,
        x,
        [("weight", weight, vector), ("bias", bias, vector), ("residual", residual, x.shape)],
    )
    where = f"all_reduce_rms_norm on rank {workspace.rank} of {workspace.world}"
    for name, value in (
        ("weight", weight),
        ("bias", bias),
        ("residual", residual),
        ("scale", scale),
    ):
        if value is not None and value.device != x.device:
            raise UnsupportedError(f"{where}: {name} is on {value.device}, x on {x.device}")
    if scale is not None and (scale.numel() != 1 or scale.dtype != torch.float32):
        raise ShapeError(
            f"{where}: scale is {tuple(scale.shape)} {scale.dtype}, expected one float32"
        )
    shots = choose_shots("all_reduce_rms_norm", workspace, x, shots)
    y = torch.empty(
        x.shape, dtype=x.dtype if scale is None else torch.float8_e4m3fn, device=x.device
    )
    s = x.new_empty(x.shape)
    if x.numel() == 0:
        return y, s
    width = x.shape[-1]
    rows = x.numel() // width
    share = rows if shots == 1 else -(-rows // workspace.world)
    part, blocks = workspace.divide(share, norm_pitch(width, x.element_size()), 1)
    x, weight = x.contiguous(), weight.contiguous()
    bias = bias if bias is None else bias.contiguous()
    residual = residual if residual is None else residual.contiguous()
    _launch(
        "all_reduce_rms_norm",
        workspace,
        blocks,
        way=WAYS[shots],
        type=_type(x),
        x=x.data_ptr(),
        bias=_address(bias),
        residual=_address(residual),
        weight=weight.data_ptr(),
        scale=_address(scale),
        y=y.data_ptr(),
        s=s.data_ptr(),
        rows=rows,
        width=width,
        epsilon=epsilon,
        part=part,
    )
    return y, s


def norm_pitch(width: int, itemsize: int) -> int:
    """Bytes from one row to the next in a chunk: each starts a line."""
    return -(-width * itemsize // LINE) * LINE


def _check_switch(workspace: Workspace) -> None:
    where = f"all_reduce on rank {workspace.rank} of {workspace.world}: shots='switch'"
    if not workspace.multicast:
        raise UnsupportedError(f"{where} needs a workspace with a multicast address")
    if workspace.shape.depth < 2:
        raise UnsupportedError(f"{where} needs a workspace of depth 2 or more")


def _in_bytes(counts: list[int], row: int) -> Division:
    """Rows of each rank, in bytes of rows of `row`."""
    return Division(counts[-1] * row, counts.count(counts[0]) % len(counts), row)


def _type(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _launch(name: str, workspace: Workspace, blocks: int, **arguments: Any) -> None:
    module = extension()
    with stream_on(f"{name} on rank {workspace.rank}", workspace.table.device) as stream:
        native = native_workspace(module, workspace, name)
        getattr(module, name)(**arguments, workspace=native, blocks=blocks, stream=stream)


def _check_bias(workspace: Workspace, x: Tensor, bias: Tensor, way: int | str) -> None:
    where = f"all_reduce on rank {workspace.rank} of {workspace.world}"
    if bias.shape != x.shape[-1:] or bias.dtype != x.dtype:
        raise ShapeError(
            f"{where}: bias is {tuple(bias.shape)} {bias.dtype}, x is {tuple(x.shape)} {x.dtype}; expected "
            "[H] and [..., H]"
        )
    if bias.device != x.device:
        raise UnsupportedError(f"{where}: bias is on {bias.device}, x on {x.device}")
    if way == "switch":
        raise UnsupportedError(f"{where}: the switch adds no bias; use shots=1, 2 or None")
