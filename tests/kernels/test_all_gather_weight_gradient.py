"""all_gather_weight_gradient between real processes, interpreted."""

from __future__ import annotations

import pytest

from tests.kernels import gather_body as body
from tests.kernels.body import REAL

OPERATION = "all_gather_weight_gradient"
SHAPES = [(1, 3), (7, 19), (41, 5), (30, 40), (9, 6), (50, 17)]


@pytest.mark.parametrize("size", [2, 3])
def test_bits(interpreted, size):
    """New, into a main_grad of either dtype, gathered on either side."""
    interpreted(size).run(body.exact, REAL, OPERATION, SHAPES, ())


def test_nothing_to_multiply(interpreted):
    interpreted(2).run(body.exact, REAL, OPERATION, [(0, 3), (3, 0), (5, 4)], ())


@pytest.mark.parametrize("unit", [1, 3])
def test_chunks_in_any_order(interpreted, unit):
    interpreted(3).run(body.chunks_in_any_order, REAL, OPERATION, (41 // unit, 7), unit)


@pytest.mark.parametrize(("size", "late"), [(2, 1), (3, 2)])
def test_back_to_back(interpreted, size, late):
    interpreted(size).run(body.back_to_back, REAL, OPERATION, late)


def test_slow_rank(interpreted):
    interpreted(2).run(body.slow_rank, REAL, OPERATION, 1)


def test_absent_rank(interpreted):
    interpreted(3).run(body.absent_rank, REAL, OPERATION, 1)


def test_same_bits_in_every_run(interpreted):
    first, again = (interpreted(3).run(body.random_gradient, REAL) for _ in range(2))
    assert first == again


def test_few_programs(interpreted):
    interpreted(2).run(body.few_programs, REAL, OPERATION)


def test_refused(interpreted):
    interpreted(2).run(body.refused_gradient)
