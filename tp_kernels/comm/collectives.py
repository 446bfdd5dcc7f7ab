"""Collectives on plain tensors: fp32 sums in rank order, rounded once, equal bits on every rank.

They carry no gradients; `tp_kernels.ops` has the differentiable pairs. Rows are the first dimension and
are divided by `split_sizes`. Host memory is used where the group has it and the tensor is a CPU tensor of
a dtype the engine sums, otherwise the process group.

`out` takes the result instead of a new tensor and is returned: contiguous, of the result's shape, dtype and
device, apart from `x` in memory. A large result in a new tensor costs a page fault per 4 KiB on each call.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .errors import ShapeError, UnsupportedError
from .group import ParallelGroup
from .host_slot import REDUCIBLE
from .layout import split_range, split_sizes
from .process_group import ordered_sum


def all_reduce(x: Tensor, group: ParallelGroup, out: Tensor | None = None) -> Tensor:
    """Sum of `x` over the ranks, same shape; a new tensor on every rank, or `out`, which may be `x`."""
    result = group.short.all_reduce(x, out)
    if result is not None:
        return result
    if out is not x:
        if out is not None:
            _check_out("all_reduce", x, x.shape, out, group)
    elif x.is_neg():
        raise ShapeError(f"all_reduce on rank {group.rank}: out is x, which is a negative view")
    elif not x.is_contiguous():
        raise ShapeError(
            f"all_reduce on rank {group.rank}: out is x, which has strides {x.stride()}; only a "
            "contiguous tensor can be summed in place"
        )
    if group.memory is None or x.dtype not in REDUCIBLE or not x.is_cpu:
        if group.size == 1:
            return _copied(x, out)
        return group.run("all_reduce", "process_group", _all_reduce, x, group, out)
    if out is not x:
        x = x.resolve_neg().contiguous()
        out = torch.empty_like(x) if out is None else out
    group.run("all_reduce", "host", group.slot.all_reduce, x, out)
    return out


def reduce_scatter(x: Tensor, group: ParallelGroup, out: Tensor | None = None) -> Tensor:
    """[R, ...] -> this rank's [split_sizes(R, W)[rank], ...] rows of the sum over ranks."""
    result = group.short.reduce_scatter(x, out)
    if result is not None:
        return result
    if x.dim() == 0:
        raise ShapeError("reduce_scatter: a scalar has no rows to divide over ranks")
    counts = split_sizes(x.shape[0], group.size)
    if out is not None:
        _check_out("reduce_scatter", x, (counts[group.rank], *x.shape[1:]), out, group)
    if group.size == 1:
        return _copied(x, out)
    implementation = "host" if _on_host(x, group) else "process_group"
    return group.run(
        "reduce_scatter", implementation, _reduce_scatter, x, group, counts, implementation, out
    )


def all_gather(
    x: Tensor,
    group: ParallelGroup,
    rows: int | None = None,
    *,
    counts: Sequence[int] | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """This rank's rows [R_r, ...] -> [R, ...] of all ranks; any dtype.

    rows: R, of which this rank holds split_sizes(rows, W)[rank]; default: all ranks hold equally many.
    counts: rows of every rank, instead of `rows`, when they are divided in another way.
    """
    if counts is None:
        result = group.short.all_gather(x, rows, out)
        if result is not None:
            return result
    if counts is None:
        counts = row_counts("all_gather", x, group, rows) if group.size > 1 else x.shape[:1]
    elif len(counts) != group.size or counts[group.rank] != x.shape[0]:
        raise ShapeError(
            f"all_gather on rank {group.rank} of {group.size}: counts={list(counts)} of x "
            f"{tuple(x.shape)}; expected one for each rank, this rank's {x.shape[0]} among them"
        )
    if out is not None:
        _check_out("all_gather", x, (sum(counts), *x.shape[1:]), out, group)
    if group.size == 1:
        return _copied(x, out)
    implementation = "host" if x.is_cpu and group.memory else "process_group"
    return group.run(
        "all_gather", implementation, _all_gather, x, group, counts, implementation, out
    )


def broadcast(x: Tensor, group: ParallelGroup, source: int = 0) -> Tensor:
    """`x` of rank `source` on every rank, as a new tensor; any dtype.

    Elsewhere only the shape and dtype of `x` count: all ranks must agree about them.
    """
    check_source("broadcast", source, group)
    if group.size == 1:
        return x.clone()
    implementation = "host" if x.is_cpu and group.memory else "process_group"
    return group.run("broadcast", implementation, _broadcast, x, group, source, implementation)


def barrier(group: ParallelGroup) -> None:
    """Return when every rank of the group has called it."""
    if group.size == 1:
        return
    if group.memory is not None:
        group.run("barrier", "host", group.slot.barrier)
    else:
        group.run("barrier", "process_group", group.transport.barrier)


def row_counts(operation: str, x: Tensor, group: ParallelGroup, rows: int | None) -> list[int]:
    """Rows per rank for `rows` in total, checked against the rows of `x` on this rank."""
    if x.dim() == 0:
        raise ShapeError(f"{operation}: a scalar has no rows to divide over ranks")
    if rows is None:
        return [x.shape[0]] * group.size
    counts = split_sizes(rows, group.size)
    if counts[group.rank] != x.shape[0]:
        raise ShapeError(
            f"{operation}: rank {group.rank} of {group.size} holds {x.shape[0]} rows, but its share of "
            f"rows={rows} is {counts[group.rank]} (tp_kernels.split_sizes({rows}, {group.size}) = "
            f"{counts})"
        )
    return counts


def _on_host(x: Tensor, group: ParallelGroup) -> bool:
    return group.memory is not None and x.is_cpu and x.dtype in REDUCIBLE


def _check_out(
    operation: str, x: Tensor, shape: tuple[int, ...], out: Tensor, group: ParallelGroup
) -> None:
    """Refuse an `out` that cannot hold the result, before anything is sent."""
    first, start = x.data_ptr(), out.data_ptr()
    apart = start >= first + _extent(x) or start + out.nbytes <= first or x.numel() == 0
    if (
        apart
        and out.shape == shape
        and out.dtype is x.dtype
        and out.is_contiguous()
        and out.device == x.device
        and not out.is_neg()
    ):
        return
    where = f"{operation} on rank {group.rank}: out"
    if out.shape != shape:
        raise ShapeError(f"{where} has shape {tuple(out.shape)}, the result has {tuple(shape)}")
    if out.dtype != x.dtype or out.device != x.device:
        raise ShapeError(f"{where} is {out.dtype} on {out.device}, x is {x.dtype} on {x.device}")
    if not out.is_contiguous():
        raise ShapeError(f"{where} has strides {out.stride()}; it must be contiguous")
    if out.is_neg():
        raise ShapeError(f"{where} is a negative view")
    raise ShapeError(f"{where} shares memory with x; pass a tensor of its own")


def _extent(x: Tensor) -> int:
    """Bytes from the first element of `x` to the end of its last one."""
    if x.is_contiguous():
        return x.nbytes
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return (last + 1) * x.element_size()


def _row(x: Tensor) -> int:
    """Elements of a row."""
    rows = x.shape[0]
    return x.numel() // rows if rows else x.shape[1:].numel()


def _copied(x: Tensor, out: Tensor | None) -> Tensor:
    """What one rank alone gets."""
    return x.clone() if out is None else x if out is x else out.copy_(x)


def _all_reduce(x: Tensor, group: ParallelGroup, out: Tensor | None) -> Tensor:
    x = x.resolve_neg().contiguous()
    transport = group.transport
    transport.agree("all_reduce", x, x.numel())
    if x.numel() == 0:
        return x.new_empty(x.shape) if out is None else out
    part = -(-x.numel() // group.size)
    padded = x.new_zeros(group.size, part)
    padded.view(-1)[: x.numel()] = x.view(-1)
    ones = [1] * group.size
    parts = transport.all_to_all(padded, ones, ones).wait()
    mine = ordered_sum(parts, None, x.new_empty(1, part))
    total = transport.all_gather(mine, ones).wait().view(-1)[: x.numel()].view(x.shape)
    return total if out is None else out.copy_(total)


def _reduce_scatter(
    x: Tensor,
    group: ParallelGroup,
    counts: Sequence[int],
    implementation: str,
    out: Tensor | None,
) -> Tensor:
    x, row = x.resolve_neg().contiguous(), _row(x)
    out = x.new_empty(counts[group.rank], *x.shape[1:]) if out is None else out
    if implementation == "host":
        group.slot.reduce_scatter(x, out, counts, row)
        return out
    transport = group.transport
    transport.agree("reduce_scatter", x, x.shape[0], row)
    if x.numel() == 0:
        return out
    received = transport.all_to_all(
        x.view(-1, row), counts, [counts[group.rank]] * group.size
    ).wait()
    return ordered_sum(received.view(group.size, *out.shape), None, out)


def _all_gather(
    x: Tensor,
    group: ParallelGroup,
    counts: Sequence[int],
    implementation: str,
    out: Tensor | None,
) -> Tensor:
    x, row = x.resolve_neg().contiguous(), _row(x)
    if implementation == "host":
        out = x.new_empty(sum(counts), *x.shape[1:]) if out is None else out
        group.slot.all_gather(x, out, counts, row)
        return out
    transport = group.transport
    transport.agree("all_gather", x, sum(counts), row)
    gathered = transport.all_gather(x.view(-1, row) if row else x, counts).wait()
    gathered = gathered.view(sum(counts), *x.shape[1:])
    return gathered if out is None else out.copy_(gathered)


def _broadcast(x: Tensor, group: ParallelGroup, source: int, implementation: str) -> Tensor:
    # What is not sent is not read: the others need not have initialised `x`.
    mine = group.rank == source
    out = x.detach().clone(memory_format=torch.contiguous_format) if mine else x.new_empty(x.shape)
    if implementation == "host":
        counts = [out.numel() if rank == source else 0 for rank in range(group.size)]
        group.slot.all_gather(out, out, counts, operation="broadcast")
    else:
        group.transport.agree("broadcast", out, source, out.numel())
        group.transport.broadcast(out, source)
    return out


def check_source(operation: str, source: int, group: ParallelGroup) -> None:
    if not 0 <= source < group.size:
        raise UnsupportedError(
            f"{operation}: source={source} is not a rank of a group of {group.size}"
        )


def my_rows(x: Tensor, group: ParallelGroup) -> Tensor:
    """This rank's rows of a tensor that all ranks hold; a view."""
    start, stop = split_range(x.shape[0], group.size, group.rank)
    return x[start:stop]
