"""The table of `make gpu-check` without a GPU: its kernels between interpreted processes, wrong results."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.processes import exchange
from tests.gpu.table import DTYPES, KERNELS, Answer, draw, faults, on_device


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_give_their_answers(interpreted, name):
    for found in interpreted(2).run(exchange, [name], ["bf16"], "cpu", shapes=1):
        assert found == []


@pytest.mark.parametrize("name", KERNELS)
def test_operands_of_every_shape(name):
    kernel = KERNELS[name]
    for seed, shape in enumerate(kernel.shapes):
        operands = draw(kernel, 3, shape, torch.float32, seed)
        answers = kernel.answers(operands)
        for one, results in zip(operands, answers, strict=True):
            moved = on_device(one, "cpu")
            assert torch.equal(moved.x, one["x"]) and moved.x.stride() == one["x"].stride()
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
