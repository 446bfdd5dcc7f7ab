"""Shims: the kernels under the signatures that they are going to have. Replaced by the kernels themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tp_kernels import kernels
from tp_kernels.comm.layout import split_sizes

from ._gemm import products

Workspace = Any


def linear_reduce_scatter(
    xs: Sequence[Tensor],
    ws: Sequence[Tensor],
    workspace: Workspace,
    *,
    counts: Sequence[int],
    bias: Tensor | None = None,
) -> Tensor:
    x, w = torch.cat(list(xs), 1), torch.cat(list(ws), 1)
    inner = _inner(counts)
    parts = [
        kernels.linear_reduce_scatter(x[index::inner], w, workspace, bias=bias)
        for index in range(inner)
    ]
    return torch.stack(parts, 1).flatten(0, 1)


def linear_all_reduce(
    xs: Sequence[Tensor],
    ws: Sequence[Tensor],
    workspace: Workspace,
    *,
    bias: Tensor | None = None,
) -> Tensor:
    x, w = torch.cat(list(xs), 1), torch.cat(list(ws), 1)
    return kernels.linear_all_reduce(x, w, workspace, bias=bias)


def all_gather_linear(
    x: Tensor,
    ws: Sequence[Tensor],
    workspace: Workspace,
    *,
    counts: Sequence[int],
    biases: Sequence[Tensor] = (),
    keep: bool = False,
) -> tuple[list[Tensor], Tensor | None]:
    inner = _inner(counts)
    own = counts[workspace.rank] // inner
    rows = x.contiguous().view(own, inner * x.shape[1])
    whole = kernels.all_gather(rows, workspace, sum(counts) // inner)
    whole = whole.view(sum(counts), x.shape[1])
    return products(whole, ws, biases), whole if keep else None


def _inner(counts: Sequence[int]) -> int:
    """Rows that are never divided: counts are those of split_sizes times this."""
    even = list(counts) == split_sizes(sum(counts), len(counts))
    return 1 if even else counts[0] - counts[-1]
