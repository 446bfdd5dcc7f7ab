"""Placements: pieces, slices, owners and gathers, against lists of indices."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tp_kernels.comm import ParallelGroup, ShapeError
from tp_kernels.layers import ParamPlacement, finalize_gradients
from tp_kernels.layers.placement import place

PACKED = {  # of 11 rows: ranges for each world size
    1: (((7, 11), (0, 7)),),
    2: (((0, 3), (6, 9)), ((3, 6), (9, 11))),  # q|k blocks of two ranks
    3: (((0, 2), (6, 9)), ((2, 4), (6, 9)), ((4, 6), (9, 11))),  # rows 6..8 on two ranks
    4: (
        (0, 4),
        ((4, 4),),
        ((8, 11), (2, 8)),
        (),
    ),  # an overlap in the middle, two ranks without any
}


def of(size: int, rank: int, shape: tuple[int, ...], dim: int | None, ranges, **options):
    """The placement that `rank` would have, without processes."""
    return ParamPlacement(SimpleNamespace(size=size, rank=rank), shape, dim, ranges, **options)


def indices(ranges, rank: int) -> list[int]:
    held = ranges[rank]
    pieces = [held] if held and isinstance(held[0], int) else held
    return [index for start, stop in pieces for index in range(start, stop)]


@st.composite
def divisions(draw):
    """(total, ranges) where every element has at least one holder, in pieces of any order."""
    total, world = draw(st.integers(1, 12)), draw(st.integers(1, 4))
    cuts = sorted({0, total, *draw(st.lists(st.integers(0, total), max_size=6))})
    pieces = list(pairwise(cuts))
    holders = [draw(st.sets(st.integers(0, world - 1), min_size=1)) for _ in pieces]
    ranges = []
    for rank in range(world):
        mine = [piece for piece, by in zip(pieces, holders, strict=True) if rank in by]
        ranges.append(tuple(draw(st.permutations(mine))))
    return total, tuple(ranges)


@given(divisions(), st.sampled_from([0, 1]))
def test_slices_and_owners(division, dim):
    total, ranges = division
    world = len(ranges)
    shape = (total, 3) if dim == 0 else (3, total)
    full = torch.arange(3 * total).view(shape)
    owners: list[int] = []
    refilled = torch.full_like(full, -1)
    for rank in range(world):
        placement = of(world, rank, shape, dim, ranges)
        mine = indices(ranges, rank)
        local = full.index_select(dim, torch.tensor(mine, dtype=torch.long))
        assert torch.equal(placement.slice(full), local)
        assert placement.local_shape() == tuple(local.shape)
        placement.fill(refilled, local)
        owned = indices([placement.owned()], 0)
        views = placement.owned_views(local)
        seen = torch.cat([v.reshape(-1) for v in views]) if views else full.new_empty(0)
        wanted = [full.narrow(dim, index, 1).reshape(-1) for index in owned]
        assert sorted(seen.tolist()) == sorted(torch.cat(wanted).tolist() if wanted else [])
        assert all(
            v.untyped_storage().data_ptr() == local.untyped_storage().data_ptr() for v in views
        )
        earlier = {index for before in range(rank) for index in indices(ranges, before)}
        assert owned == [index for index in mine if index not in earlier]
        owners += owned
        held = [index for other in range(world) for index in indices(ranges, other)]
        assert placement.overlapping == (len(held) > len(set(held)))
    assert sorted(owners) == list(range(total))
    assert torch.equal(refilled, full)


def gathered(dim: int, dtype: torch.dtype, provider: str) -> list[Tensor]:
    with ParallelGroup(provider=provider, timeout=30) as group:
        full = torch.randn(11, 11, generator=torch.Generator().manual_seed(1)).to(dtype)
        placement = ParamPlacement(group, (11, 11), dim, PACKED[group.size])
        local = placement.slice(full)
        # What another rank owns must come from there.
        noisy = torch.full_like(local, -7)
        for clean, view in zip(
            placement.owned_views(local), placement.owned_views(noisy), strict=True
        ):
            view.copy_(clean)
        with pytest.raises(ShapeError, match="this tensor is"):
            placement.gather(local.new_zeros(2, 2))
        return [full, placement.gather(local), placement.gather(noisy)]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("dim", [0, 1])
def test_gather(world, size, dim):
    for dtype, provider in ((torch.float64, "none"), (torch.bfloat16, "auto")):
        for full, first, second in world(size).run(gathered, dim, dtype, provider):
            assert torch.equal(first, full)
            assert torch.equal(second, full)


def summed(size: int) -> tuple[Tensor, Tensor, bool]:
    """Gradient of a packed weight whose rows two ranks may hold: (found, expected, nothing given)."""
    with ParallelGroup(provider="none", timeout=30) as group:
        placement = ParamPlacement(group, (11, 2), 0, PACKED[size])
        drawn = [
            torch.randn(placement.local_shape(r), dtype=torch.float64, generator=draw)
            for r in range(size)
            for draw in [torch.Generator().manual_seed(r)]
        ]
        module = nn.Module()
        module.weight = nn.Parameter(torch.zeros(placement.local_shape(), dtype=torch.float64))
        place(module, "weight", placement)
        module.weight.grad = drawn[group.rank].clone()
        finalize_gradients(module)
        expected = torch.zeros(11, 2, dtype=torch.float64)
        for rank, part in enumerate(drawn):
            expected[indices(PACKED[size], rank)] += part
        return module.weight.grad, expected[indices(PACKED[size], group.rank)]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_gradients_of_packed_overlaps(world, size):
    for found, expected in world(size).run(summed, size):
        torch.testing.assert_close(found, expected, rtol=1e-15, atol=0)


@pytest.mark.parametrize(
    ("shape", "dim", "ranges", "message"),
    [
        ((4, 2), 0, ((0, 2), (2, 3)), "do not cover dimension 0"),
        ((4, 2), 0, ((0, 1), (2, 4)), "do not cover dimension 0"),
        ((4, 2), 0, ((0, 2),), "1 ranges"),
        ((4, 2), 0, ((0, 2), (2, 5)), "rank 1 holds .* not inside"),
        ((4, 2), 0, ((0, 2), (4, 2)), "rank 1 holds .* not inside"),
        ((4, 2), 0, (((0, 2), (1, 3)), (3, 4)), "rank 0 holds .* overlap"),
        ((4, 2), 2, ((0, 2), (2, 4)), "no dimension 2"),
        ((4, 2), None, ((0, 2), (2, 4)), "dim=None"),
    ],
)
def test_refusals(shape, dim, ranges, message):
    with pytest.raises(ShapeError, match=message):
        of(2, 0, shape, dim, ranges)


def test_partial_gradient_is_of_whole_parameters():
    with pytest.raises(ShapeError, match="only whole parameters"):
        of(2, 0, (4,), 0, ((0, 2), (2, 4)), partial_gradient=True)
    with pytest.raises(ShapeError, match=r"unsplit tensor is \(3,\)"):
        of(2, 0, (4,), 0, ((0, 2), (2, 4))).slice(torch.zeros(3))
