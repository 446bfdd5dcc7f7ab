"""Calls of the kernels that exchange data: what is refused before anything is sent, and how they are made.

The same for kernels in Triton (kernels/) and in CUDA C++ (native/).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .errors import ShapeError, UnsupportedError
from .layout import split_sizes
from .workspace import Workspace, check_operand, result_like

# Bytes up to which one shot is chosen: below, the second round costs more than W - 1 times the traffic. Not
# measured yet; the crossing is known to lie between 100 KiB and 1 MiB on eight GPUs with NVLink.
ONE_SHOT_BYTES = 256 << 10


def choose_shots(operation: str, workspace: Workspace, x: Tensor, shots: int | str | None) -> int:
    """`shots`, or what the size of x suggests."""
    where = f"{operation} on rank {workspace.rank} of {workspace.world}"
    if shots not in (None, 1, 2):
        raise UnsupportedError(f"{where}: shots={shots}; use 1, 2 or None")
    if shots == 2 and workspace.shape.depth < 2:
        raise UnsupportedError(f"{where}: two shots need a workspace of depth 2 or more")
    if isinstance(shots, int):
        return shots
    return 1 if x.nbytes <= ONE_SHOT_BYTES or workspace.shape.depth < 2 else 2


def result_of_all_reduce(workspace: Workspace, x: Tensor, out: Tensor | None) -> Tensor:
    """Memory for the sum of x, which may be that of x."""
    if out is x and not x.is_contiguous():
        raise ShapeError(
            f"all_reduce: out is x, which has strides {x.stride()}; only a contiguous tensor can be "
            "summed in place"
        )
    return result_like("all_reduce", workspace, x, x.shape, out)


def counts_of_reduce_scatter(workspace: Workspace, x: Tensor) -> list[int]:
    """Rows of x that each rank gets."""
    check_operand("reduce_scatter", workspace, x)
    if x.dim() == 0:
        raise ShapeError("reduce_scatter: a scalar has no rows to divide over ranks")
    return split_sizes(x.shape[0], workspace.world)


def counts_of_all_gather(workspace: Workspace, x: Tensor, rows: int | None) -> list[int]:
    """Rows that each rank holds of `rows`, or as many as this one."""
    check_operand("all_gather", workspace, x, dtypes=None)
    world, rank = workspace.world, workspace.rank
    if x.dim() == 0:
        raise ShapeError("all_gather: a scalar has no rows to divide over ranks")
    rows = x.shape[0] * world if rows is None else rows
    counts = split_sizes(rows, world)
    if counts[rank] != x.shape[0]:
        raise ShapeError(
            f"all_gather: rank {rank} of {world} holds {x.shape[0]} rows, but its share of rows={rows} "
            f"is {counts[rank]} (tp_kernels.split_sizes({rows}, {world}) = {counts})"
        )
    return counts


def check_norm(
    workspace: Workspace, x: Tensor, others: Sequence[tuple[str, Tensor | None, Sequence[int]]]
) -> None:
    """Refuse what all_reduce_rms_norm cannot read; others: (name, tensor, shape), of the dtype of x."""
    check_operand("all_reduce_rms_norm", workspace, x)
    where = f"all_reduce_rms_norm on rank {workspace.rank} of {workspace.world}"
    for name, value, shape in others:
        if x.dim() == 0 or (
            value is not None and (value.shape != tuple(shape) or value.dtype != x.dtype)
        ):
            raise ShapeError(
                f"{where}: x is {tuple(x.shape)} {x.dtype}, {name} is "
                f"{None if value is None else (tuple(value.shape), value.dtype)}; expected [..., H] and "
                "[H], a residual like x, all of one dtype"
            )
    width = x.shape[-1]
    if width * x.element_size() > workspace.shape.chunk:
        raise UnsupportedError(
            f"{where}: a row takes {width * x.element_size()} bytes and must fit into a chunk of "
            f"{workspace.shape.chunk}; construct WorkspaceShape(chunk=) larger"
        )
