"""Values between the stages of a pipeline: what arrives, in any order, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tp_kernels import ParallelGroup
from tp_kernels.pipeline import PipelineCommunicator

PROVIDERS = ("host", "none")


@contextmanager
def pipeline(provider: str = "host", **options: Any) -> Iterator[PipelineCommunicator]:
    with (
        ParallelGroup(provider=provider, timeout=20) as group,
        PipelineCommunicator(group, **options) as made,
    ):
        yield made


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("size", [2, 3])
def test_there_and_back(world, size, provider):
    world(size).run(there_and_back, provider)


def there_and_back(provider: str) -> None:
    """Every micro-batch through all stages and back, received in another order than sent."""
    with pipeline(provider) as comm:
        stage, last = comm.rank, comm.stages - 1
        for mb in range(3):
            x = torch.full((mb + 1, 5), 1.0, requires_grad=True)
            if stage == 0:
                comm.send_forward({"x": x, "n": mb, "none": None}, micro_batch=mb)
        for mb in (2, 0, 1):
            if stage > 0:
                got = comm.recv_forward(micro_batch=mb)
                assert got["n"] == mb and got["none"] is None
                assert got["x"].requires_grad and got["x"].is_leaf and got["x"].shape == (mb + 1, 5)
                if stage < last:
                    comm.send_forward({**got, "x": got["x"] + 1}, micro_batch=mb)
                else:
                    assert got["x"].unique().tolist() == [1.0 + stage - 1]
                    comm.send_backward((got["x"].detach(), mb), micro_batch=mb)
        for mb in range(3):
            if stage < last:
                gradient, number = comm.recv_backward(micro_batch=mb)
                assert number == mb and not gradient.requires_grad
                if stage > 0:
                    comm.send_backward((gradient, number), micro_batch=mb)
