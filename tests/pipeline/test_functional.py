"""Loops written by hand with the autograd functions: gradients of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tp_kernels import ParallelGroup
from tp_kernels.pipeline import PipelineCommunicator
from tp_kernels.pipeline.functional import recv_forward, send_forward

WIDTH, MICRO_BATCHES = 5, 4


def stage_of(index: int) -> nn.Module:
    torch.manual_seed(index)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double()


def run_stage(module: nn.Module, value: Any) -> Any:
    """A value of several tensors: one that is not used behind it, one without a gradient, one used twice."""
    x = value["x"] * value["scale"]
    return {
        "x": module(x) + value["pair"][0],
        "pair": (x.exp(), value["x"].detach().clone(), x.sum()),
        "scale": torch.tensor(0.5, dtype=torch.float64),
        "n": value["n"] + 1,
    }


def first_value(micro_batch: int) -> Any:
    torch.manual_seed(100 + micro_batch)
    x = torch.randn(micro_batch + 1, WIDTH, dtype=torch.float64)
    return {
        "x": x,
        "pair": (x.cos(), x, x.sum()),
        "scale": torch.ones((), dtype=torch.float64),
        "n": 0,
    }


def loss_of(value: Any) -> Tensor:
    return (value["x"] ** 2).sum() * value["n"]


@pytest.mark.parametrize("provider", ["host", "none"])
@pytest.mark.parametrize("size", [2, 3])
def test_gradients_are_those_of_one_process(world, size, provider):
    modules = [stage_of(index) for index in range(size)]
    losses = []
    for micro_batch in range(MICRO_BATCHES):
        value = first_value(micro_batch)
        for module in modules:
            value = run_stage(module, value)
        loss = loss_of(value)
        loss.backward()
        losses.append(loss.item())
    for outcome, module in zip(world(size).run(train, provider), modules, strict=True):
        assert outcome["losses"] in ([], losses)
        for got, parameter in zip(outcome["gradients"], module.parameters(), strict=True):
            assert torch.equal(got, parameter.grad)
    assert outcome["losses"] == losses


def train(provider: str) -> dict[str, Any]:
    with ParallelGroup(provider=provider, timeout=20) as group, PipelineCommunicator(group) as comm:
        module, last = stage_of(group.rank), group.size - 1
        ends, losses = [], []
        for micro_batch in range(MICRO_BATCHES):
            first = group.rank == 0
            value = (
                first_value(micro_batch) if first else recv_forward(comm, micro_batch=micro_batch)
            )
            value = run_stage(module, value)
            if group.rank < last:
                ends.append(send_forward(value, comm, micro_batch=micro_batch))
            else:
                ends.append(loss_of(value))
                losses.append(ends[-1].item())
        for end in ends:
            end.backward()
        return {"losses": losses, "gradients": [p.grad for p in module.parameters()]}


def test_values_without_gradients(world):
    assert world(2).run(pass_plain) == [False, False]


def pass_plain() -> bool:
    with ParallelGroup(timeout=20) as group, PipelineCommunicator(group) as comm:
        if group.rank == 0:
            return send_forward((torch.ones(2), 3), comm, micro_batch=0).requires_grad
        x, number = recv_forward(comm, micro_batch=0)
        assert number == 3
        return x.requires_grad
