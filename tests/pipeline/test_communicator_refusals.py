"""What communicators refuse, told before anything is sent or when it is noticed."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from tp_kernels import (
    GroupMismatchError,
    ParallelGroup,
    RankError,
    TpKernelsError,
    UnsupportedError,
)
from tp_kernels.comm import barrier
from tp_kernels.pipeline import PipelineCommunicator

from .test_communicator import PROVIDERS, pipeline


@pytest.mark.parametrize("provider", PROVIDERS)
def test_what_is_refused(world, provider):
    world(2).run(refuse, provider)


def refuse(provider: str) -> None:
    """Nothing is sent or lost by it, and the pipeline goes on."""
    with pipeline(provider) as comm:
        here, x = comm.rank, torch.ones(2)
        wrong_end = comm.send_forward if here else comm.send_backward
        refused = {
            f"stage {here} of 2 has no {'next' if here else 'previous'} stage": lambda: wrong_end(
                x, micro_batch=0
            ),
            f"send_forward: stage=5 on rank {here}, which has stages .{here}.": lambda: (
                comm.send_forward(x, micro_batch=0, stage=5)
            ),
            "micro_batch=-1: use": lambda: (comm.send_backward if here else comm.send_forward)(
                x, micro_batch=-1
            ),
            "micro_batch=4294967296": lambda: (comm.recv_forward if here else comm.recv_backward)(
                micro_batch=1 << 32
            ),
            "type builtins.set": lambda: (comm.send_backward if here else comm.send_forward)(
                {1}, micro_batch=0
            ),
            "send_to: rank 2 is not in the group of 2": lambda: comm.send_to(x, 2, tag=""),
            "recv_from: rank -1 is not": lambda: comm.recv_from(-1, tag=""),
        }
        for text, call in refused.items():
            with pytest.raises(UnsupportedError, match=text):
                call()
        if here == 0:
            comm.send_forward(x, micro_batch=0)
        else:
            assert comm.recv_forward(micro_batch=0).tolist() == [1, 1]
        comm.close()
        comm.close()
        with pytest.raises(UnsupportedError, match=r"send: this pipeline of .* is closed"):
            (comm.send_backward if here else comm.send_forward)(x, micro_batch=0)


def test_arguments_that_differ(world):
    for options in (
        [{"credits": 2}, {"credits": 3}],
        [{"stage_to_rank": (0, 1)}, {"stage_to_rank": (1, 0)}],
        [{"ring": False}, {"ring": True}],
        [{"buffer_bytes": 8192}, {"buffer_bytes": 4096}],
    ):
        name = next(iter(options[0]))
        for rank, text in enumerate(world(2).run(construct, options)):
            kind, message = text.split(": ", 1)
            assert kind == "GroupMismatchError"
            assert (
                message.startswith(f"ranks {rank} and {1 - rank} of 'tp_kernels:")
                and f"{name}=" in message
            )


def construct(options: list[dict[str, Any]]) -> str:
    with ParallelGroup(timeout=20) as group, pytest.raises(TpKernelsError) as caught:
        PipelineCommunicator(group, **options[group.rank])
    return f"{type(caught.value).__name__}: {caught.value}"


def test_arguments_that_make_no_sense(world):
    for options, text in (
        ({"stage_to_rank": (0, 2)}, r"ShapeError: stage_to_rank=\(0, 2\): use ranks from 0 to 1"),
        ({"stage_to_rank": ()}, "ShapeError"),
        ({"credits": 0}, "UnsupportedError: 2 stages, credits=0"),
        ({"credits": 256}, "credits=256"),
        ({"buffer_bytes": 10}, "buffer_bytes=10"),
        ({"buffer_bytes": 4e6}, "UnsupportedError: .*buffer_bytes=4000000.0"),
        ({"buffer_bytes": 1 << 60}, "UnsupportedError: .*use .* 4096 to 1125899906842624 bytes"),
        ({"credits": 2.5}, "UnsupportedError: .*credits=2.5"),
        ({"timeout": -1}, "UnsupportedError: .*timeout=-1"),
        ({"stage_to_rank": (0, 1.0)}, "ShapeError"),
        (
            {"buffer_bytes": 1 << 50},
            r"does not fit: \d+ bytes are free.*; pass buffer_bytes=\d+, or make",
        ),
    ):
        for outcome in world(2).run(construct, [options, options]):
            assert re.search(text, outcome), outcome


def test_a_tensor_that_changes_before_it_has_left(world):
    with pytest.raises(RankError) as caught:
        world(2).run(change_early)
    error = caught.value.outcomes[0]
    assert isinstance(error, UnsupportedError)
    assert (
        "a tensor of forward of micro-batch 0 from stage 0 on rank 0 to stage 1 on rank 1 was changed"
        in str(error)
    )


def change_early() -> None:
    with pipeline(buffer_bytes=8192, timeout=5) as comm:
        if comm.rank == 0:
            small, large = torch.zeros(10), torch.zeros(100_000)
            for mb in range(2):
                comm.send_forward(small, micro_batch=100 + mb)
                comm.flush()
                small += 1  # it has left
            comm.send_forward(large, micro_batch=0)
            large += 1
            comm.flush()
        else:
            assert [comm.recv_forward(micro_batch=100 + mb)[0].item() for mb in range(2)] == [0, 1]
            comm.recv_forward(micro_batch=0)
            comm.recv_forward(micro_batch=1)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_messages_that_nobody_receives(world, provider):
    with pytest.raises(RankError) as caught:
        world(2).run(send_too_many, provider)
    assert isinstance(caught.value.outcomes[1], GroupMismatchError)
    assert re.search(
        "rank 1 closes its pipeline with 2 messages that arrived and were not received: forward of "
        "micro-batch 1 from stage 0 on rank 0 to stage 1 on rank 1, 'x' from rank 0",
        str(caught.value.outcomes[1]),
    )


def send_too_many(provider: str) -> None:
    with pipeline(provider, timeout=10) as comm:
        if comm.rank == 0:
            for mb in range(2):
                comm.send_forward(mb, micro_batch=mb)
            comm.send_to(1, 1, tag="x")
        else:
            comm.recv_forward(micro_batch=0)
        comm.flush()
        barrier(comm.group)
