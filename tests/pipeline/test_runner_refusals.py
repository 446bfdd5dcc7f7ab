"""What a runner refuses, and that ranks which are told can go on."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tp_kernels import (
    GroupMismatchError,
    ShapeError,
    UnsupportedError,
)
from tp_kernels.pipeline import PipelineError, PipelineRunner
from tp_kernels.pipeline.generators import forward_only, gpipe, one_f_one_b, zero_bubble_h1

from .stages import (
    check_gradients,
    mine,
    one_process,
    pipeline,
)
from .test_runner_options import (
    numbers,
    plain_stages,
    squares,
)


def refusals() -> None:
    """Raised on every rank that can know, and the runner goes on where nothing was sent."""
    stages = plain_stages(2)
    with pipeline() as channel:
        own = mine(stages, channel)
        x, target = numbers(4)
        first = channel.rank == 0
        for words, options in {
            "there is no schedule 'gpip'; there are gpipe": {"schedule": "gpip"},
            "is for 3 ranks": {"schedule": one_f_one_b(3, 2)},
            "optimizer= has no effect with gpipe": {
                "schedule": "gpipe",
                "micro_batches": 2,
                "optimizer": torch.optim.SGD(own[0].parameters(), 0.1),
            },
            "pipedream updates parameters after every micro-batch: pass optimizer=": {
                "schedule": "pipedream",
                "micro_batches": 2,
            },
            "does not update b.weight": {
                "schedule": "pipedream",
                "optimizer": torch.optim.SGD(own[0].a.parameters(), 0.1),
            },
            "scale='tokens': use one of": {"schedule": "gpipe", "scale": "tokens"},
            "count= has no effect": {"schedule": "gpipe", "count": len},
            "streams= has no effect without checkpoint": {"schedule": "gpipe", "streams": object()},
            r"checkpoint: stages \[2\] of 2": {"schedule": "gpipe", "checkpoint": {2}},
        }.items():
            with pytest.raises(UnsupportedError, match=words):
                PipelineRunner(own, channel=channel, loss_fn=squares, **options).step(
                    x, target=target
                )
        with pytest.raises(UnsupportedError, match="loss_fn Linear has parameters"):
            PipelineRunner(own, "gpipe", channel, nn.Linear(1, 1))
        with pytest.raises(UnsupportedError, match="2 modules for stages"):
            PipelineRunner(own * 2, "gpipe", channel)
        wrapped = nn.parallel.DistributedDataParallel(copy.deepcopy(own[0]))
        with pytest.raises(UnsupportedError, match=r"DistributedDataParallel.*data_parallel=group"):
            PipelineRunner(wrapped, "gpipe", channel)

        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
        divided = torch.distributed.fsdp.fully_shard(copy.deepcopy(own[0]), mesh=mesh)
        with pytest.raises(UnsupportedError, match=r"FSDP.*data_parallel=group"):
            PipelineRunner(divided, "gpipe", channel)

        runner = PipelineRunner(own, "gpipe", channel, squares)
        fixed = PipelineRunner(own, zero_bubble_h1(2, 3), channel, squares)
        inference = PipelineRunner(own, forward_only(2, 2), channel, squares)
        other_number = PipelineRunner(own, lambda m: gpipe(2, 3), channel, squares)
        mine_or = lambda kind, mine: kind if mine else PipelineError
        for kind, words, function, options in (
            (UnsupportedError, "into how many micro-batches", runner.step, {}),
            (ShapeError, "0 micro-batches", runner.step, {"micro_batches": 0}),
            (UnsupportedError, "has no backward", inference.step, {}),
            (UnsupportedError, "made gpipe of 3 micro-", other_number.step, {"micro_batches": 2}),
            (UnsupportedError, "schedule zero_bubble_h1 is of 3", fixed.step, {"micro_batches": 2}),
            (ShapeError, "4 rows for 5", runner.step, {"micro_batches": 5}),
        ):
            with pytest.raises(kind, match=words):
                function(x if first else None, target=None if first else [target], **options)
        with pytest.raises(mine_or(UnsupportedError, first), match="has stage 0 and got no batch"):
            runner.step(target=target, micro_batches=2)
        with pytest.raises(mine_or(UnsupportedError, not first), match="got no target"):
            runner.step(x, micro_batches=2)
        with pytest.raises(
            GroupMismatchError,
            match=r"[23] micro-batches of .* [23] micro-batches",
        ):
            runner.step(x, target=target, micro_batches=2 + channel.rank)
        with pytest.raises(GroupMismatchError, match=r"rank . calls (step|eval)"):
            (runner.step if first else runner.eval)(x, target=target, micro_batches=2)
        other = PipelineRunner(own, "one_f_one_b" if first else "gpipe", channel, squares)
        with pytest.raises(GroupMismatchError, match="digest"):
            other.step(x, target=target, micro_batches=4)
        assert all(p.grad is None for p in own[0].parameters())
        one_process(stages, (x,), target, 2, squares)
        runner.step(x, target=target, micro_batches=2)  # nothing was left behind
        check_gradients(own[0], stages[channel.rank])


def test_refusals(world) -> None:
    world(2).run(refusals)
