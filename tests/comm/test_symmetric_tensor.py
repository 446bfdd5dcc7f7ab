"""Collectives on tensors that all ranks address: the bits of those on private ones, nothing read too late."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from torch import Tensor

from tests.oracle import digest
from tp_kernels import (
    ParallelGroup,
    PeerLostError,
    RankError,
    ShapeError,
    SymmetricTensor,
    UnsupportedError,
    split_range,
)
from tp_kernels.comm import all_reduce

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((1,), (5, 3), (2, 7, 9), (301, 64), (0, 4))


def values(shape: tuple[int, ...], dtype: torch.dtype, rank: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(shape, generator=generator).to(dtype)


@pytest.mark.parametrize("provider", ["host", "none"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_same_bits_as_private_tensors(world, size, provider):
    by_rank = world(size).run(compare, provider)
    assert all(digests == by_rank[0] for digests in by_rank)


def compare(provider: str) -> list[str]:
    digests = []
    with ParallelGroup(provider=provider, timeout=30) as group:
        size, rank = group.size, group.rank
        for dtype in DTYPES:
            for shape in SHAPES:
                x = SymmetricTensor(shape, group=group, dtype=dtype)
                assert (x._memory is not None) == (provider == "host" and x.local.numel() > 0)
                out = None
                # Overwritten right after each call: a peer that still reads gets other sums.
                for seed in range(4):
                    parts = [values(shape, dtype, peer, seed) for peer in range(size)]
                    total = all_reduce(parts[rank], group)
                    start, stop = split_range(shape[0], size, rank)

                    x.local.copy_(parts[rank])
                    part = x.reduce_scatter(out)
                    assert torch.equal(x.local, parts[rank]), "the summands are kept"
                    x.local.fill_(torch.nan)
                    assert digest(part) == digest(total[start:stop]), (dtype, shape, seed)
                    out = part if seed == 1 else None

                    x.local.copy_(parts[rank])
                    result = x.all_reduce_()
                    assert result is x.local
                    assert digest(result) == digest(total), (dtype, shape, seed)
                    digests.append(digest(result))

                    rows = max(0, shape[0] * size - 1 - seed)
                    first, last = split_range(rows, size, rank)
                    x.local[: last - first] = rank + 1
                    whole = x.all_gather(rows)
                    x.local.fill_(torch.nan)
                    expected = torch.cat(
                        [
                            torch.full((b - a, *shape[1:]), peer + 1.0, dtype=dtype)
                            for peer in range(size)
                            for a, b in [split_range(rows, size, peer)]
                        ]
                    )
                    assert torch.equal(whole, expected), (dtype, shape, seed)
                x.close()
    return digests


def test_one_rank():
    with ParallelGroup() as group:
        x = SymmetricTensor((4, 3), group=group)
        x.local.copy_(torch.arange(12.0).view(4, 3))
        kept = x.local.clone()
        assert torch.equal(x.all_reduce_(), kept)
        assert torch.equal(x.reduce_scatter(), kept)
        assert torch.equal(x.all_gather(), kept)


def test_wrong_arguments(world):
    world(2).run(refusals)


def refusals() -> None:
    with ParallelGroup(timeout=30) as group:
        with pytest.raises(UnsupportedError, match="int64"):
            SymmetricTensor((3,), group=group, dtype=torch.int64)
        x = SymmetricTensor((4, 3), group=group)
        with pytest.raises(ShapeError, match=r"expected a contiguous \(2, 3\)"):
            x.reduce_scatter(torch.empty(3, 3))
        with pytest.raises(ShapeError, match="float32"):
            x.all_gather(out=torch.empty(8, 3, dtype=torch.float16))
        with pytest.raises(UnsupportedError, match="its tensor has 4"):
            x.all_gather(9 if group.rank == 0 else 10)
        x.local.fill_(1)  # nothing was sent
        assert torch.equal(x.all_reduce_(), torch.full((4, 3), 2.0))
        x.close()
        with pytest.raises((PeerLostError, UnsupportedError)):
            x.all_reduce_()
        assert torch.equal(x.local, torch.full((4, 3), 2.0))


@pytest.mark.parametrize("call", ["all_reduce_", "reduce_scatter", "all_gather"])
@pytest.mark.parametrize("how", ["killed", "failed"])
def test_a_lost_rank(world, call, how):
    with pytest.raises(RankError) as caught:
        world(3).run(lose, call, how)
    outcomes = caught.value.outcomes
    outcomes.pop(1)
    for error in outcomes:
        assert isinstance(error, PeerLostError), error
        assert "rank 1" in str(error)


def lose(call: str, how: str) -> None:
    group = ParallelGroup(timeout=10)
    x = SymmetricTensor((6, 5), group=group)
    x.local.fill_(1)
    if group.rank == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        group.fail("out of luck")  # elsewhere in the group, not in this tensor's memory
        raise ValueError("out of luck")
    getattr(x, call)()
