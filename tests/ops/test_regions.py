"""Collectives with gradients, each against its definition on unsplit tensors, and its dual."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tp_kernels import ParallelGroup, ShapeError, UnsupportedError
from tp_kernels.ops import (
    copy_to_ranks,
    gather_features,
    gather_rows,
    reduce_from_ranks,
    reduce_scatter_rows,
    scatter_features,
    scatter_rows,
)

SHAPES = ((7, 5), (2, 3), (0, 4), (4, 3, 2), (9,))


def integers(seed: int, *shape: int) -> Tensor:
    """Small integers: every sum is exact in every dtype and order."""
    return torch.randint(-9, 9, shape, generator=torch.Generator().manual_seed(seed)).float()


def gradient(y: Tensor, x: Tensor, dy: Tensor) -> Tensor:
    (dx,) = torch.autograd.grad(y, x, dy)
    return dx


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_regions(world, size):
    world(size).run(cross_regions)


def cross_regions() -> None:
    for provider in ("auto", "none"):
        with ParallelGroup(provider=provider, window=4096, timeout=30) as group:
            for shape in SHAPES:
                of_ranks(group, shape)
                rows(group, shape)
                features(group, shape)


def of_ranks(group: ParallelGroup, shape: tuple[int, ...]) -> None:
    parts = [integers(rank, *shape) for rank in range(group.size)]
    x, dy = parts[group.rank].requires_grad_(), integers(9, *shape)
    y = reduce_from_ranks(x, group=group)
    assert torch.equal(y, sum(parts)) and torch.equal(gradient(y, x, dy), dy)
    y = copy_to_ranks(x, group=group)
    assert torch.equal(y, x)
    if group.size > 1:
        assert torch.equal(gradient(y, x, parts[group.rank].detach()), sum(parts))


def rows(group: ParallelGroup, shape: tuple[int, ...]) -> None:
    whole = integers(1, *shape)
    parts = [integers(rank, *shape) for rank in range(group.size)]
    for dim in (0, -1):
        options = {"group": group, "dim": dim}
        mine = whole.tensor_split(group.size, dim)[group.rank]
        x = whole.clone().requires_grad_()
        y = scatter_rows(x, **options)
        assert torch.equal(y, mine)
        assert torch.equal(gradient(y, x, mine), whole)
        y = reduce_scatter_rows(x * (group.rank + 1), **options)
        factor = group.size * (group.size + 1) // 2
        assert torch.equal(y, mine * factor)
        assert torch.equal(gradient(y, x, mine), whole * (group.rank + 1))
        x = mine.clone().requires_grad_()
        y = gather_rows(x, rows=shape[dim], **options)
        assert torch.equal(y, whole)
        assert torch.equal(gradient(y, x, whole), mine)
        if group.size > 1:
            y = gather_rows(x, rows=shape[dim], gradient="reduce_scatter", **options)
            expected = sum(parts).tensor_split(group.size, dim)[group.rank]
            assert torch.equal(gradient(y, x, parts[group.rank]), expected)


def features(group: ParallelGroup, shape: tuple[int, ...]) -> None:
    whole = integers(2, *shape)
    parts = whole.tensor_split(group.size, dim=-1)
    x = parts[group.rank].clone().requires_grad_()
    y = gather_features(x, [part.shape[-1] for part in parts], group=group)
    assert torch.equal(y, whole) and y.is_contiguous()
    assert torch.equal(gradient(y, x, whole), parts[group.rank])
    sizes = [part.shape[-1] for part in parts][::-1]
    for given, mine in (
        (None, parts[group.rank]),
        (sizes, whole.split(sizes, dim=-1)[group.rank]),
    ):
        z = whole.clone().requires_grad_()
        part = scatter_features(z, given, group=group)
        assert torch.equal(part, mine) and (group.size == 1 or part.is_contiguous())
        assert torch.equal(gradient(part, z, mine), whole)
    with torch.no_grad():
        direct = gather_features(x, [part.shape[-1] for part in parts], group=group)
    assert torch.equal(direct, whole)


def test_wrong_arguments(world):
    world(2).run(refuse)


def refuse() -> None:
    with ParallelGroup(timeout=30) as group:
        with pytest.raises(UnsupportedError, match="'slice' or 'reduce_scatter'"):
            gather_rows(torch.ones(2), group=group, gradient="sum")
        with pytest.raises(ShapeError, match="its share of rows=9"):
            gather_rows(torch.ones(2), group=group, rows=9)
        with pytest.raises(ShapeError, match=r"sizes=\[1, 2\].*together 4"):
            scatter_features(torch.ones(3, 4), [1, 2], group=group)
        assert gather_rows(torch.ones(2), group=group).shape == (4,)
