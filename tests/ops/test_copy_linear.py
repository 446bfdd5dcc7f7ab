"""copy_linear: an input that all ranks hold times the output features of this one."""

from __future__ import annotations

import pytest
import torch

from tests.ops import body
from tests.oracle import digest
from tp_kernels import ParallelGroup, copy_linear

OP = "copy_linear"


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


def test_vectors_and_lists(world):
    world(2).run(vectors_and_lists)


def vectors_and_lists() -> None:
    with ParallelGroup(timeout=30) as group:
        x, w, b = torch.ones(1, 6), torch.randn(4, 6), torch.randn(4)
        y = copy_linear(x, w, b, group=group)
        (z,) = copy_linear(x, [w], [b], group=group)
        vector = copy_linear(x[0], w, b, group=group)
        assert vector.shape == (4,)
        assert digest(y) == digest(z) == digest(vector[None])


def test_the_forward_communicates_nothing(world):
    for calls in world(2).run(lonely_forward):
        assert calls == {"copy_linear": {"local": 1}}


def lonely_forward() -> dict[str, dict[str, int]]:
    with ParallelGroup(timeout=1) as group:
        if group.rank == 0:
            return {"copy_linear": {"local": 1}}
        copy_linear(torch.ones(1, 6), torch.ones(4, 6), group=group)
        return group.stats()["calls"]
