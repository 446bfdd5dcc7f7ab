"""Linear layers divided over ranks by output features or by input features.

`sequence_parallel=True` exchanges the pair of ops and nothing else: inputs of column-parallel layers and
outputs of row-parallel layers are then divided by rows (the first dimension) instead of whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tp_kernels.comm.errors import ShapeError, UnsupportedError
from tp_kernels.comm.group import GroupLike, ParallelGroup, as_group
from tp_kernels.comm.layout import split_range
from tp_kernels.ops import (
    all_gather_linear,
    copy_linear,
    gather_features,
    linear_all_reduce,
    linear_reduce_scatter,
)

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
        group: GroupLike,
        sequence_parallel: bool,
        dim: int,
        ranges: Ranges | None,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.group: ParallelGroup = as_group(group)
        if in_features < 1 or out_features < 1:
            raise ShapeError(
                f"{type(self).__name__}({in_features}, {out_features}): features must be positive"
            )
        self.in_features, self.out_features = in_features, out_features
        self.sequence_parallel = sequence_parallel
        split = (out_features, in_features)[dim]
        self.ranges = tuple(ranges) if ranges else even_ranges(split, self.group.size)
        shape = (out_features, in_features)
        placement = ParamPlacement(self.group, shape, dim, self.ranges)
        place(self, "weight", placement)
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        self.weight = nn.Parameter(torch.empty(placement.local_shape(), **options))
        if bias:
            division = (0, self.ranges) if dim == 0 else ()  # else whole
            place(self, "bias", ParamPlacement(self.group, (out_features,), *division))
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
        gather_output: return all features on every rank, for use that is the same everywhere.
        ranges: [start, stop) of the output features of every rank, instead of an even division.

    forward(x [..., K], rows=None) -> [..., N_r]; `rows` is R under sequence parallelism, default R_r * W.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: GroupLike = None,
        sequence_parallel: bool = False,
        gather_output: bool = False,
        ranges: Ranges | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            in_features, out_features, bias, group, sequence_parallel, 0, ranges, device, dtype
        )
        self.gather_output = gather_output

    def forward(self, x: Tensor, rows: int | None = None) -> Tensor:
        (y,) = column_parallel(x, [self], rows)
        if self.gather_output:
            place = self.placements["weight"]
            sizes = [place.local_shape(rank)[0] for rank in range(self.group.size)]
            y = gather_features(y, sizes, group=self.group)
        return y


class RowParallelLinear(_ShardedLinear):
    """y = x W^T + b with the input features divided over ranks; the sum is completed by the op.

    Args: as ColumnParallelLinear; `ranges` divide the input features. bias is whole on every rank and
    added once. Under sequence parallelism the output is this rank's rows.

    forward(x [..., K_r]) -> [..., N], or [split_sizes(R, W)[rank], ..., N] of x [R, ..., K_r].
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: GroupLike = None,
        sequence_parallel: bool = False,
        ranges: Ranges | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            in_features, out_features, bias, group, sequence_parallel, 1, ranges, device, dtype
        )

    def forward(self, x: Tensor) -> Tensor:
        op = linear_reduce_scatter if self.sequence_parallel else linear_all_reduce
        return op(x, self.weight, self.bias, group=self.group)


def column_parallel(
    x: Tensor, layers: Sequence[ColumnParallelLinear], rows: int | None = None
) -> tuple[Tensor, ...]:
    """Several column-parallel layers on one input: one gather forward, one reduction backward."""
    first = layers[0]
    weights = [layer.weight for layer in layers]
    biases = [layer.bias for layer in layers]
    ys: Tensor | tuple[Tensor, ...]
    if first.sequence_parallel:
        ys = all_gather_linear(x, weights, biases, group=first.group, rows=rows)
    elif rows is not None:
        raise UnsupportedError("rows= has a meaning only under sequence_parallel=True")
    else:
        ys = copy_linear(x, weights, biases, group=first.group)
    return tuple(ys)
