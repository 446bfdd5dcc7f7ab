"""The table of `make gpu-check` without a GPU: its kernels between interpreted processes, wrong results."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from tests.gpu import local, signalled
from tests.gpu.entry import Answer, draw, faults, on_device, tensors
from tests.gpu.processes import CASES, call_ops, exchange, gather_by_copies
from tests.gpu.table import ALL_KERNELS, DTYPES, KERNELS
from tests.oracle import OPERATIONS, digest


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_give_their_answers(interpreted, name):
    for found in interpreted(2).run(exchange, [name], ["bf16"], "cpu", shapes=1):
        assert found == []


@pytest.mark.parametrize("name", local.FUNCTIONS)
def test_local_kernels_are_within_their_bounds(interpreted, name):
    interpreted(1).run(run_local, name)


def run_local(name: str) -> None:
    """On small shapes: the interpreter is slow."""
    with (
        mock.patch.object(local, "SHAPES", local.SHAPES[:2]),
        mock.patch.object(local, "HEADS", local.HEADS[:1]),
    ):
        local.FUNCTIONS[name]("cpu")


@pytest.mark.parametrize("name", signalled.FUNCTIONS)
def test_signalled_kernels_give_their_answers(interpreted, name):
    interpreted(1).run(run_signalled, name)


def run_signalled(name: str) -> None:
    with mock.patch.object(signalled, "SHAPES", signalled.SHAPES[:1]):
        signalled.FUNCTIONS[name]("cpu")


def test_rows_by_copies(interpreted):
    assert interpreted(2).run(gather_by_copies, "cpu", shapes=1) == [[], []]


def test_ops_of_the_small_cases(interpreted):
    for cases in (CASES, signalled.OVERLAPPED):
        small = [case for case in cases if case.rows < 100]
        first, second = interpreted(2).run(call_ops, small, "cpu")
        assert first == second and len(small) == len(OPERATIONS) + 1


@pytest.mark.parametrize("name", ALL_KERNELS)
def test_operands_of_every_shape(name):
    kernel = ALL_KERNELS[name]
    for seed, shape in enumerate(kernel.shapes):
        operands = draw(kernel, 3, shape, torch.float32, seed)
        answers = kernel.answers(operands)
        for one, results in zip(operands, answers, strict=True):
            moved = on_device(one, "cpu")
            for key, value in one.items():
                for copy, t in zip(tensors(getattr(moved, key)), tensors(value), strict=True):
                    assert digest(copy) == digest(t) and copy.stride() == t.stride()
            assert one["out"] is None or one["out"].shape == results[0].value.shape


def test_wrong_results_are_found():
    kernel = KERNELS["all_reduce_1"]
    operands = draw(kernel, 2, (7, 5), DTYPES["fp32"], 0)
    answers = kernel.answers(operands)
    (answer,), _ = answers
    right, wrong = answer.value, answer.value.clone()
    wrong[3, 1] = torch.nextafter(wrong[3, 1], torch.tensor(9.0))
    assert faults(kernel, {0: (right,), 1: (right.clone(),)}, answers) == []
    assert faults(kernel, {0: (right,), 1: (wrong,)}, answers) == [
        "rank 1, result 0: 1 of 35 differ, first at [[3, 1]]",
        "ranks have different bits",
    ]
    near = Answer(right, torch.full_like(right, 1e-3).double())
    assert near.fault(right + 5e-4) is None
    assert "more than allowed, first at [[0, 0]]" in str(near.fault(right + 1))
    assert "more than allowed" in str(near.fault(torch.full_like(right, torch.nan)))
    assert "expected (7, 5)" in str(near.fault(right[1:]))
