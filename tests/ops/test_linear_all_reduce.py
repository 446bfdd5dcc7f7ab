"""linear_all_reduce: input features spread over the ranks, the sum on all of them."""

from __future__ import annotations

import pytest
import torch

from tests.ops import body
from tests.oracle import digest
from tp_kernels import ParallelGroup, linear_all_reduce

OP = "linear_all_reduce"


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


def test_a_vector_is_a_row(world):
    world(2).run(vectors)


def vectors() -> None:
    with ParallelGroup(timeout=30) as group:
        x, w, b = torch.randn(1, 6), torch.randn(4, 6), torch.ones(4)
        y = linear_all_reduce(x, w, b, group=group)
        vector = linear_all_reduce(x[0], w, b, group=group)
        assert vector.shape == (4,) and digest(vector[None]) == digest(y)


def test_a_bias_of_any_layout_is_added_once(world):
    world(3).run(biases)


def biases() -> None:
    with ParallelGroup(timeout=30) as group:
        x, w = torch.zeros(5, 2), torch.zeros(4, 2)
        for b in (torch.arange(8.0)[::2], torch.ones(1).expand(4), torch.arange(9.0)[5:]):
            for implementation in body.IMPLEMENTATIONS:
                y = linear_all_reduce(x, w, b, group=group, implementation=implementation)
                assert torch.equal(y, b.expand(5, 4)), implementation
