"""linear_reduce_scatter: input features spread over the ranks, its rows of the sum on each."""

from __future__ import annotations

import pytest
import torch

from tests.ops import body
from tests.oracle import digest
from tp_kernels import ParallelGroup, linear_reduce_scatter

OP = "linear_reduce_scatter"


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_values_and_gradients(world, size):
    body.values_and_gradients(world, OP, size)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_bits(world, size):
    body.bits(world, OP, size)


def test_one_rank_gives_the_bits_of_torch(world):
    world(1).run(body.compare_with_torch, OP)
    body.compare_with_torch(OP)  # without torch.distributed


@pytest.mark.parametrize("size", [1, 3])
def test_activations(world, size):
    world(size).run(body.compare_activations, OP)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_calls_that_record_nothing(world, size):
    world(size).run(body.compare_direct, OP)


def test_a_vector_is_the_row_of_rank_0(world):
    world(2).run(vectors)


def vectors() -> None:
    with ParallelGroup(timeout=30) as group:
        x, w = torch.randn(1, 6), torch.randn(4, 6)
        y = linear_reduce_scatter(x, w, group=group)
        assert y.shape == (1 - group.rank, 4)
        assert digest(y) == digest(linear_reduce_scatter(x[0], w, group=group))


def test_only_needed_gradients_cost_a_gather(world):
    assert world(2).run(frozen_calls) == [[False, True, True, True]] * 2


def frozen_calls() -> list[bool]:
    """Whether the backward communicated when nothing, x, the weight, or the bias needs a gradient."""
    communicated = []
    with ParallelGroup(timeout=30) as group:
        for needed in (None, 0, 1, 2):
            args = [torch.ones(3, 2), torch.ones(4, 2), torch.ones(4)]
            if needed is not None:
                args[needed].requires_grad_()
            group.reset_stats()
            y = linear_reduce_scatter(*args, group=group)
            if y.requires_grad:
                y.sum().backward()
            communicated.append("linear_reduce_scatter.backward" in group.stats()["calls"])
    return communicated
