"""Collectives with gradients, each beside its dual.

| forward                                     | backward                                      |
|---------------------------------------------|-----------------------------------------------|
| reduce_from_ranks: all-reduce               | identity                                      |
| copy_to_ranks: identity                     | all-reduce                                    |
| scatter_rows: this rank's rows              | all-gather of rows                            |
| gather_rows: all-gather of rows             | this rank's rows, or the reduce-scatter       |
| reduce_scatter_rows: reduce-scatter of rows | all-gather of rows                            |
| scatter_features: this rank's features      | all-gather of features                        |
| gather_features: all-gather of features     | this rank's features                          |

Rows lie along `dim`, the first dimension unless said otherwise, and are divided by `split_sizes`. Features
are the last dimension, divided in any way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tp_kernels.comm import collectives
from tp_kernels.comm.errors import ShapeError, UnsupportedError
from tp_kernels.comm.group import ParallelGroup
from tp_kernels.comm.layout import split_sizes

from ._op import Op, direct, register, rows_of


def reduce_from_ranks(x: Tensor, *, group: ParallelGroup) -> Tensor:
    """Sum of x [...] over the ranks; the gradient, equal on all ranks, passes unchanged."""
    if group.size == 1:
        return x
    return _reduce_op(x, group.name)


def copy_to_ranks(x: Tensor, *, group: ParallelGroup) -> Tensor:
    """x itself; the gradient is summed over the ranks, which use x for different parts of the work."""
    return x if group.size == 1 or direct(x) else _copy_op(x, group.name)


def scatter_rows(x: Tensor, *, group: ParallelGroup, dim: int = 0) -> Tensor:
    """[R, ...], equal on all ranks -> [split_sizes(R, W)[rank], ...]."""
    if group.size == 1:
        return x
    x = x.movedim(dim, 0)
    counts = split_sizes(x.shape[0], group.size)
    return _scatter_op(x, counts, group.name).movedim(0, dim)


def gather_rows(
    x: Tensor,
    *,
    group: ParallelGroup,
    rows: int | None = None,
    gradient: str = "slice",
    dim: int = 0,
) -> Tensor:
    """[R_r, ...] -> [R, ...]; rows: R, default R_r * W.

    gradient: "slice" where what follows is the same on all ranks (its gradient is complete);
        "reduce_scatter" where the ranks use the gathered rows for different parts of the work.
    """
    if gradient not in ("slice", "reduce_scatter"):
        raise UnsupportedError(f"gather_rows: gradient={gradient!r}; 'slice' or 'reduce_scatter'")
    if group.size == 1:
        return x
    x = x.movedim(dim, 0)
    counts = collectives.row_counts("gather_rows", x, group, rows)
    return _gather_op(x, counts, gradient == "reduce_scatter", group.name).movedim(0, dim)


def reduce_scatter_rows(x: Tensor, *, group: ParallelGroup, dim: int = 0) -> Tensor:
    """[R, ...], a summand on each rank -> [split_sizes(R, W)[rank], ...], this rank's rows of the sum."""
    if group.size == 1:
        return x
    return _reduce_scatter_op(x.movedim(dim, 0), group.name).movedim(0, dim)


def gather_features(x: Tensor, sizes: Sequence[int], *, group: ParallelGroup) -> Tensor:
    """[..., sizes[rank]] -> [..., sum(sizes)], for use that is the same on all ranks.

    Raises:
        ShapeError: `sizes` do not have one number for each rank, or not this rank's features.
    """
    if len(sizes) != group.size or sizes[group.rank] != x.shape[-1]:
        raise ShapeError(
            f"gather_features on rank {group.rank} of {group.size}: sizes={list(sizes)} of x "
            f"{tuple(x.shape)}; expected one for each rank, this rank's {x.shape[-1]} among them"
        )
    if group.size == 1:
        return x
    return _features_op(x, list(sizes), group.name)


def scatter_features(
    x: Tensor, sizes: Sequence[int] | None = None, *, group: ParallelGroup
) -> Tensor:
    """[..., sum(sizes)], equal on all ranks -> [..., sizes[rank]]; default: split_sizes(F, W).

    Raises:
        ShapeError: `sizes` do not have one number for each rank or not the sum of the features.
    """
    if sizes is None:
        sizes = split_sizes(x.shape[-1], group.size)
    elif len(sizes) != group.size or sum(sizes) != x.shape[-1]:
        raise ShapeError(
            f"scatter_features on rank {group.rank} of {group.size}: sizes={list(sizes)} of x "
            f"{tuple(x.shape)}; expected one for each rank, together {x.shape[-1]}"
        )
    return x if group.size == 1 else _scatter_features_op(x, list(sizes), group.name)


def _reduce(x: Tensor, name: str) -> Tensor:
    return collectives.all_reduce(x, ParallelGroup.by_name(name))


def _copy(x: Tensor, name: str) -> Tensor:
    return x.clone()  # an op may not return its input; only reached when gradients are recorded


def _scatter(x: Tensor, counts: list[int], name: str) -> Tensor:
    return collectives.my_rows(x, ParallelGroup.by_name(name)).clone()


def _gather(x: Tensor, counts: list[int], reduce: bool, name: str) -> Tensor:
    return collectives.all_gather(x, ParallelGroup.by_name(name), counts=counts)


def _features(x: Tensor, sizes: list[int], name: str) -> Tensor:
    full = collectives.all_gather(rows_of(x).t(), ParallelGroup.by_name(name), counts=sizes)
    out = x.new_empty(*x.shape[:-1], full.shape[0])  # no view: autograd would forbid to write to it
    rows_of(out).copy_(full.t())
    return out


def _scatter_features(x: Tensor, sizes: list[int], name: str) -> Tensor:
    return _part(x, -1, sizes, name).clone(memory_format=torch.contiguous_format)


def _reduce_scatter(x: Tensor, name: str) -> Tensor:
    return collectives.reduce_scatter(x, ParallelGroup.by_name(name))


def _mine(counts: Sequence[int], name: str) -> int:
    return counts[ParallelGroup.by_name(name).rank]


def _part(x: Tensor, dim: int, counts: Sequence[int], name: str) -> Tensor:
    """This rank's part of a tensor that all ranks hold, divided by `counts` along `dim`."""
    rank = ParallelGroup.by_name(name).rank
    return x.narrow(dim, sum(counts[:rank]), counts[rank])


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.arguments = inputs[1:]


def _remember_counts(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, name = inputs
    ctx.arguments = split_sizes(x.shape[0], ParallelGroup.by_name(name).size), name


_reduce_scatter_op = register(
    "reduce_scatter_rows",
    "(Tensor x, str group) -> Tensor",
    _reduce_scatter,
    lambda x, name: x.new_empty(
        _mine(split_sizes(x.shape[0], ParallelGroup.by_name(name).size), name), *x.shape[1:]
    ),
    _remember_counts,
    lambda ctx, dy: (_gather_op(dy, ctx.arguments[0], False, ctx.arguments[1]), None),
)
_gather_op: Op = register(
    "gather_rows",
    "(Tensor x, SymInt[] counts, bool reduce, str group) -> Tensor",
    _gather,
    lambda x, counts, reduce, name: x.new_empty(sum(counts), *x.shape[1:]),
    _remember,
    lambda ctx, dy: (
        _reduce_scatter_op(dy, ctx.arguments[2])
        if ctx.arguments[1]
        else _part(dy, 0, ctx.arguments[0], ctx.arguments[2]),
        None,
        None,
        None,
    ),
)
_scatter_op = register(
    "scatter_rows",
    "(Tensor x, SymInt[] counts, str group) -> Tensor",
    _scatter,
    lambda x, counts, name: x.new_empty(_mine(counts, name), *x.shape[1:]),
    _remember,
    lambda ctx, dy: (_gather_op(dy, ctx.arguments[0], False, ctx.arguments[1]), None, None),
)
_all_reduce_op = register(
    "all_reduce",
    "(Tensor x, str group) -> Tensor",
    _reduce,
    lambda x, name: x.new_empty(x.shape),
)
_reduce_op = register(
    "reduce_from_ranks",
    "(Tensor x, str group) -> Tensor",
    _reduce,
    lambda x, name: x.new_empty(x.shape),
    _remember,
    lambda ctx, dy: (dy, None),
)
_copy_op = register(
    "copy_to_ranks",
    "(Tensor x, str group) -> Tensor",
    _copy,
    lambda x, name: x.new_empty(x.shape),
    _remember,
    lambda ctx, dy: (_all_reduce_op(dy, ctx.arguments[0]), None),
)
_features_op = register(
    "gather_features",
    "(Tensor x, SymInt[] sizes, str group) -> Tensor",
    _features,
    lambda x, sizes, name: x.new_empty(*x.shape[:-1], sum(sizes)),
    _remember,
    lambda ctx, dy: (_part(dy, -1, *ctx.arguments), None, None),
)
_scatter_features_op = register(
    "scatter_features",
    "(Tensor x, SymInt[] sizes, str group) -> Tensor",
    _scatter_features,
    lambda x, sizes, name: x.new_empty(*x.shape[:-1], _mine(sizes, name)),
    _remember,
    lambda ctx, dy: (_features_op(dy, *ctx.arguments), None, None),
)
