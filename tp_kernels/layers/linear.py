"""Linear layers divided over ranks by output features or by input features.

`sequence_parallel=True` exchanges the pair of ops and nothing else: inputs of column-parallel layers and
outputs of row-parallel layers are then divided by rows (the first dimension) instead of whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from tp_kernels.comm.errors import ShapeError, UnsupportedError
from tp_kernels.comm.group import GroupLike, ParallelGroup, as_group
from tp_kernels.comm.layout import split_range
from tp_kernels.ops import (
    WeightGradientQueue,
    all_gather_linear,
    copy_linear,
    gather_features,
    linear_all_reduce,
    linear_reduce_scatter,
    scatter_features,
)

from .gradients import backward_dw
from .placement import ParamPlacement, Ranges, place


def even_ranges(total: int, world: int) -> tuple[tuple[int, int], ...]:
    return tuple(split_range(total, world, rank) for rank in range(world))


class _ShardedLinear(nn.Module):
    """Weight [N, K] divided along one dimension; shared by the column and row layers."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    placements: dict[str, ParamPlacement]

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        dim: int,
        *,
        group: GroupLike,
        sequence_parallel: bool,
        batch_first: bool | None,
        skip_bias_add: bool,
        out_dtype: torch.dtype | None,
        delay_wgrad: bool,
        ranges: Ranges | None,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.group: ParallelGroup = as_group(group)
        name = type(self).__name__
        if in_features < 1 or out_features < 1:
            raise ShapeError(f"{name}({in_features}, {out_features}): features must be positive")
        if out_dtype is not None and not out_dtype.is_floating_point:
            raise UnsupportedError(f"{name}: out_dtype={out_dtype} is no floating-point dtype")
        self.in_features, self.out_features = in_features, out_features
        self.sequence_parallel = sequence_parallel
        self.batch_first = not sequence_parallel if batch_first is None else batch_first
        self.skip_bias_add, self.out_dtype = skip_bias_add, out_dtype
        self.delayed = WeightGradientQueue() if delay_wgrad else None
        split = (out_features, in_features)[dim]
        self.ranges = tuple(ranges) if ranges else even_ranges(split, self.group.size)
        shape = (out_features, in_features)
        placement = ParamPlacement(self.group, shape, dim, self.ranges)
        place(self, "weight", placement)
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        self.weight = nn.Parameter(torch.empty(placement.local_shape(), **options))
        if bias:
            division: dict[str, Any] = {"dim": 0, "ranges": self.ranges}
            if dim == 1:  # whole; a caller who adds it adds it to the rows of this rank
                division = {"partial_gradient": sequence_parallel and skip_bias_add}
            place(self, "bias", ParamPlacement(self.group, (out_features,), **division))
            self.bias = nn.Parameter(torch.empty(self.placements["bias"].local_shape(), **options))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """nn.Linear's initialisation of the unsplit layer, of which each rank keeps its part.

        Equal seeds on all ranks therefore give the same full weights at every world size.
        """
        if self.weight.is_meta:
            return
        dense = nn.Linear(
            self.in_features,
            self.out_features,
            self.bias is not None,
            device=self.weight.device,
            dtype=self.weight.dtype,
        )
        self.load_dense(dense.weight, dense.bias)

    @torch.no_grad()
    def load_dense(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Take this rank's part of the unsplit weight [N, K] and bias [N]."""
        if (bias is None) != (self.bias is None):
            raise ShapeError(f"{type(self).__name__}: bias given and bias held do not agree")
        self.weight.copy_(self.placements["weight"].slice(weight))
        if self.bias is not None and bias is not None:
            self.bias.copy_(self.placements["bias"].slice(bias))

    def used_weight(self, given: Tensor | None) -> Tensor:
        """The layer's weight, or the one passed at call, which has to be divided alike."""
        if given is None:
            return self.weight
        shape = self.placements["weight"].local_shape()
        if tuple(given.shape) != shape:
            raise ShapeError(
                f"{type(self).__name__} on rank {self.group.rank} of {self.group.size}: weight= is "
                f"{tuple(given.shape)}; expected this rank's part {shape} of {self.out_features} x "
                f"{self.in_features}"
            )
        return given

    @property
    def added_bias(self) -> Tensor | None:
        return None if self.skip_bias_add else self.bias

    def finish(self, y: Tensor) -> Any:
        """The result of `forward` of the result of the op."""
        if self.out_dtype is not None:
            y = y.to(self.out_dtype)
        return (y, self.bias) if self.skip_bias_add else y

    def backward_dw(self) -> None:
        """Compute what `delay_wgrad=True` has left of the oldest backward pass; see gradients.backward_dw."""
        backward_dw(self)

    def _sizes(self, option: str) -> list[int]:
        """Features of every rank, where all of them follow each other in the unsplit tensor."""
        placement = self.placements["weight"]
        held = [piece for rank in range(self.group.size) for piece in placement.pieces(rank)]
        if len(held) != self.group.size or any(a[1] != b[0] for a, b in pairwise(held)):
            raise UnsupportedError(
                f"{type(self).__name__}: {option} needs one range of features per rank, one after the "
                f"other; ranges={self.ranges}"
            )
        return [stop - start for start, stop in held]

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, rank {self.group.rank} of {self.group.size}, "
            f"sequence_parallel={self.sequence_parallel}"
        )


class ColumnParallelLinear(_ShardedLinear):
    """y = x W^T + b with the output features divided over ranks.

    Args:
        in_features, out_features: of the unsplit layer; any sizes.
        bias: divided like the output.
        group: ParallelGroup, ProcessGroup, one-dimensional DeviceMesh, or None for the default group.
        sequence_parallel: the input is this rank's rows [R_r, ..., K] and is gathered by the op.
        batch_first: rows are the second dimension of an input [b, R_r, ..., K]; None: the first. It says
            something under sequence parallelism only.
        gather_output: return all features on every rank, for use that is the same everywhere. Under
            sequence parallelism that is the whole output: all rows, all features.
        skip_bias_add: return (y, bias) and leave it to the caller to add the bias [N_r] (None without one).
        out_dtype: of y, which is rounded in the dtype of x first.
        delay_wgrad: a backward computes the gradient of the input only; `backward_dw()` computes those of
            weight and bias later.
        gathered: under sequence parallelism, "keep" the gathered input for the weight gradient or "redo"
            the gather, see all_gather_linear.
        ranges: of every rank, [start, stop) of the output features (or a tuple of such pieces), instead of
            an even division.

    forward(x [..., K], rows=None, weight=None) -> [..., N_r], or (that, bias) with skip_bias_add.
        rows: R under sequence parallelism; default R_r * W.
        weight: [N_r, K] instead of the layer's own, as of a tied embedding; its gradients go there.

    Raises:
        ShapeError, UnsupportedError: sizes and options that do not go together; on all ranks, before
            anything is sent.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: GroupLike = None,
        sequence_parallel: bool = False,
        batch_first: bool | None = None,
        gather_output: bool = False,
        skip_bias_add: bool = False,
        out_dtype: torch.dtype | None = None,
        delay_wgrad: bool = False,
        gathered: str = "keep",
        ranges: Ranges | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if gather_output and skip_bias_add:
            raise UnsupportedError(
                "ColumnParallelLinear: gather_output=True with skip_bias_add=True would return all "
                "features with this rank's part of the bias; use one of them"
            )
        if gathered not in ("keep", "redo") or (gathered == "redo" and not sequence_parallel):
            raise UnsupportedError(
                f"ColumnParallelLinear: gathered={gathered!r}; 'keep', or under sequence_parallel=True "
                "'redo'"
            )
        super().__init__(
            in_features,
            out_features,
            bias,
            0,
            group=group,
            sequence_parallel=sequence_parallel,
            batch_first=batch_first,
            skip_bias_add=skip_bias_add,
            out_dtype=out_dtype,
            delay_wgrad=delay_wgrad,
            ranges=ranges,
            device=device,
            dtype=dtype,
        )
        self.gather_output, self.gathered = gather_output, gathered
        if gather_output:
            self.sizes = self._sizes("gather_output=True")

    def forward(self, x: Tensor, rows: int | None = None, weight: Tensor | None = None) -> Any:
        return _in_one(x, [self], rows, [weight])[0]

    def finish(self, y: Tensor) -> Any:
        if self.gather_output:
            y = gather_features(y, self.sizes, group=self.group)
        return super().finish(y)


class RowParallelLinear(_ShardedLinear):
    """y = x W^T + b with the input features divided over ranks; the sum is completed by the op.

    Args: as ColumnParallelLinear, but
        ranges: divide the input features.
        bias: whole on every rank, added once. Its gradient is complete on every rank, unless the caller adds
            it (skip_bias_add) to this rank's rows: then `finalize_gradients` completes it.
        sequence_parallel: the output is this rank's rows.
        input_is_parallel: False: the input [..., K] is whole and equal on all ranks, and each takes its
            features of it; the gradient of the input is whole, too.

    forward(x [..., K_r], rows=None, weight=None) -> [..., N], or (that, bias) with skip_bias_add; under
    sequence parallelism [split_sizes(R, W)[rank], ..., N] of x [R, ..., K_r], or with batch_first
    [b, split_sizes(R, W)[rank], ..., N] of x [b, R, ..., K_r]. rows: R; says nothing new, is compared.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: GroupLike = None,
        sequence_parallel: bool = False,
        batch_first: bool | None = None,
        input_is_parallel: bool = True,
        skip_bias_add: bool = False,
        out_dtype: torch.dtype | None = None,
        delay_wgrad: bool = False,
        ranges: Ranges | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            in_features,
            out_features,
            bias,
            1,
            group=group,
            sequence_parallel=sequence_parallel,
            batch_first=batch_first,
            skip_bias_add=skip_bias_add,
            out_dtype=out_dtype,
            delay_wgrad=delay_wgrad,
            ranges=ranges,
            device=device,
            dtype=dtype,
        )
        if self.placements["weight"].overlapping:
            raise ShapeError(
                f"RowParallelLinear: ranges {self.ranges} overlap; the ranks would add the products of "
                "the same features several times"
            )
        self.input_is_parallel = input_is_parallel
        if not input_is_parallel:
            self.sizes = self._sizes("input_is_parallel=False")

    def forward(self, x: Tensor, rows: int | None = None, weight: Tensor | None = None) -> Any:
        if not self.input_is_parallel:
            x = scatter_features(x, self.sizes, group=self.group)
        weight = self.used_weight(weight)
        if not self.sequence_parallel:
            refuse_rows(self, rows)
            y = linear_all_reduce(x, weight, self.added_bias, group=self.group, delay=self.delayed)
            return self.finish(y)
        x = rows_first(self, x)
        if rows is not None and rows != x.shape[0]:
            raise ShapeError(f"RowParallelLinear: x has {x.shape[0]} rows, but rows={rows}")
        y = linear_reduce_scatter(x, weight, self.added_bias, group=self.group, delay=self.delayed)
        return self.finish(rows_first(self, y))


def column_parallel(
    x: Tensor,
    layers: Sequence[ColumnParallelLinear],
    rows: int | None = None,
    weights: Sequence[Tensor | None] | None = None,
) -> tuple[Any, ...]:
    """What each of several layers makes of one input: one gather forward, one reduction backward.

    The layers agree in group, sequence_parallel, batch_first, gathered and delay_wgrad. weights: given
    at call.
    Where one has hooks, or another module stands in its place (an adapter), each is called by itself.
    """
    given = weights or [None] * len(layers)
    if all(map(_is_plain, layers)):
        return _in_one(x, layers, rows, given)
    ys = []
    for layer, weight in zip(layers, given, strict=True):
        passed = {"rows": rows, "weight": weight}
        ys.append(layer(x, **{name: value for name, value in passed.items() if value is not None}))
    return tuple(ys)


def _is_plain(layer: nn.Module) -> bool:
    """Whether a call of the layer is its product and nothing else."""
    return (
        type(layer).forward is ColumnParallelLinear.forward
        and "forward" not in layer.__dict__
        and not (layer._forward_hooks or layer._forward_pre_hooks)
        and not (layer._backward_hooks or layer._backward_pre_hooks)
    )


def _in_one(
    x: Tensor,
    layers: Sequence[ColumnParallelLinear],
    rows: int | None,
    given: Sequence[Tensor | None],
) -> tuple[Any, ...]:
    first = layers[0]
    used = [layer.used_weight(weight) for layer, weight in zip(layers, given, strict=True)]
    biases = [layer.added_bias for layer in layers]
    delay = [layer.delayed for layer in layers if layer.delayed is not None] or None
    ys: Tensor | tuple[Tensor, ...]
    if first.sequence_parallel:
        x = rows_first(first, x)
        ys = all_gather_linear(
            x,
            used,
            biases,
            group=first.group,
            rows=rows,
            gathered=first.gathered,
            delay=delay,
        )
        ys = tuple(rows_first(first, y) for y in ys)
    else:
        refuse_rows(first, rows)
        ys = copy_linear(x, used, biases, group=first.group, delay=delay)
    return tuple(layer.finish(y) for layer, y in zip(layers, ys, strict=True))


def rows_first(layer: _ShardedLinear, x: Tensor) -> Tensor:
    """[b, s, ...] <-> [s, b, ...] where the layer's rows are the second dimension."""
    if not (layer.sequence_parallel and layer.batch_first):
        return x
    if x.dim() < 3:
        raise ShapeError(
            f"{type(layer).__name__}(batch_first=True): x is {tuple(x.shape)}, expected [b, s, ..., K]"
        )
    return x.transpose(0, 1)


def refuse_rows(layer: _ShardedLinear, rows: int | None) -> None:
    if rows is not None:
        raise UnsupportedError(
            f"{type(layer).__name__}: rows= has a meaning only under sequence_parallel=True"
        )
