"""linear_all_reduce: input features spread over the ranks, the sum on all of them."""

from __future__ import annotations

import pytest
import torch

from tests.ops import body
from tests.oracle import digest
from tp_kernels import (
    ParallelGroup,
    all_reduce_rms_norm,
    linear_all_reduce,
    linear_all_reduce_rms_norm,
)

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


@pytest.mark.parametrize("rows", [1, 8, 16, 17])
def test_ranks_that_multiply_in_different_ways(world, rows):
    """Threads, strides and gradients are a rank's own affair: the ranks still make the same rounds."""
    world(3).run(differ, rows)


def differ(rows: int) -> None:
    threads = torch.get_num_threads()
    with ParallelGroup(timeout=30) as group:
        # Small integers: exact in any order.
        x = (torch.arange(rows * 4).view(rows, 4) % 5).float()
        w = (torch.arange(20).view(5, 4) % 3).float()
        residual, ones = torch.ones(rows, 5), torch.ones(5)
        expected = 3 * (x @ w.t())
        if group.rank == 1:
            w, residual = w.t().contiguous().t(), residual.t().contiguous().t()
        if group.rank == 2:
            x.requires_grad_()
        try:
            torch.set_num_threads(2 if group.rank == 0 else 1)
            for _ in range(3):
                assert torch.equal(linear_all_reduce(x, w, group=group), expected)
                y, total = linear_all_reduce_rms_norm(
                    x, w, ones, group=group, residual=residual, epsilon=1e-6
                )
                assert torch.equal(total, expected + 1)
                part = torch.nn.functional.linear(x, w)
                z, again = all_reduce_rms_norm(
                    part, ones, group=group, residual=residual, epsilon=1e-6
                )
                assert torch.equal(again, total) and torch.equal(z, y)
        finally:
            torch.set_num_threads(threads)
