"""Ranks that do not do the same: all of them raise before anything is sent, and can go on."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tp_kernels import GroupMismatchError, Ranks, ShapeError, UnsupportedError
from tp_kernels.pipeline import MicroBatches, PipelineError, PipelineRunner, Whole
from tp_kernels.pipeline.schedule import Schedule

from .stages import check_gradients, one_process, pipeline


def squares(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def linears() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(3, 3).double() for _ in range(2)]


def data(rows: int) -> Tensor:
    return torch.arange(3.0 * rows, dtype=torch.float64).view(rows, 3).sin()


def other_calls() -> None:
    """Calls of different names take nothing from each other; neither do other arguments of one."""
    stages = linears()
    with pipeline() as channel:
        rank = channel.rank
        own = linears()[rank]
        runner = PipelineRunner(own, "one_f_one_b", channel, squares, micro_batches=2)
        one_process(stages, (data(4),), data(4), 2, squares)
        runner.step(data(4), target=data(4))

        def step() -> Any:
            return runner.step(data(4), target=data(4))

        def forward(broadcast: bool) -> Any:
            return runner.forward(data(4), broadcast=broadcast)

        for first, second, words in (
            (step, lambda: runner.clip_grad_norm_(1e-3), ("step", "clip_grad_norm_")),
            (lambda: forward(True), lambda: forward(False), ("broadcast=True", "broadcast=False")),
            (
                lambda: runner.clip_grad_norm_(1e-3),
                lambda: runner.clip_grad_norm_(1e-4),
                ("max_norm=0.001", "max_norm=0.0001"),
            ),
            (lambda: runner.clip_grad_norm_(1e-3, 1.0), step, ("norm_type=1.0", "step")),
        ):
            mine, theirs = words if rank == 0 else words[::-1]
            said = rf"rank {rank} calls .*{mine}.*, rank {1 - rank} .*{theirs}"
            with pytest.raises(GroupMismatchError, match=said):
                (first if rank == 0 else second)()
            check_gradients(own, stages[rank])  # neither scaled nor added to
        with pytest.raises(UnsupportedError if rank else PipelineError, match="not positive"):
            runner.clip_grad_norm_(1.0, 0.0 if rank else 2.0)
        one_process(stages, (data(4),), data(4), 2, squares)
        step()
        check_gradients(own, stages[rank])


def other_runners() -> None:
    with pipeline() as channel:
        rank = channel.rank
        own = linears()[0]
        tie = [(0, "weight"), (1, "weight")]
        for name, values in (
            ("scale", ("sum", "micro_batch")),
            ("tied", ([tie], [])),
            ("checkpoint", ([], {1})),
        ):
            said = (
                rf"rank {rank} calls PipelineRunner\(.*{name}=.*, rank {1 - rank} PipelineRunner\("
            )
            with pytest.raises(GroupMismatchError, match=said):
                PipelineRunner(own, "gpipe", channel, squares, **{name: values[rank]})
        with pytest.raises(UnsupportedError if rank else PipelineError, match="2 modules for"):
            PipelineRunner([own] * (1 + rank), "gpipe", channel, squares)
        runner = PipelineRunner(own, "gpipe", channel, squares, tied=[tie])
        runner.step(data(4), target=data(4), micro_batches=2)


class Scaled(nn.Module):
    """x * by; `by` is a keyword argument of the stage."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor, by: Tensor) -> Tensor:
        return x * self.w * by


def other_rows() -> None:
    """Batch, target and keyword arguments that are cut differently would be paired wrongly."""
    with pipeline() as channel:
        own = Scaled()
        runner = PipelineRunner(own, "gpipe", channel, squares, micro_batches=2)
        by = torch.ones(4, 1, dtype=torch.float64)
        six = torch.ones(6, 1, dtype=torch.float64) if channel.rank == 1 else Whole(by[:1])
        for target, factor, words in (
            (data(2), by, "4 rows in the batch on rank 0, 2 in the target on rank 1"),
            (data(8), Whole(by[:1]), "4 rows in the batch on rank 0, 8 in the target on rank 1"),
            (data(4), six, "4 rows in the batch on rank 0, 6 in the keyword arguments on rank 1"),
        ):
            for call in (runner.step, runner.eval):
                with pytest.raises(ShapeError, match=words):
                    call(data(4), target=target, by=factor)
        assert own.w.grad is None
        x = data(4)
        wanted = runner.step(x, target=x * 2, by=by)
        halves = MicroBatches([x[:2] * 2, x[2:] * 2])
        for args, target in (
            ((x,), halves),
            ((MicroBatches([x[:2], x[2:]]),), halves),
            ((x,), MicroBatches([half.flatten().view(1, 2, 3) for half in halves.values])),
        ):
            assert runner.step(*args, target=target, by=by) == wanted
        whole = Whole(torch.zeros(1, 3, dtype=torch.float64))
        assert runner.eval(x, target=whole, by=by).total > 0


def inference_mode() -> None:
    with pipeline() as channel:
        rank = channel.rank
        own = linears()[rank]
        runner = PipelineRunner(own, "one_f_one_b", channel, squares, micro_batches=2)
        kind = UnsupportedError if rank else PipelineError
        with torch.inference_mode(rank == 1), pytest.raises(kind, match=r"step: .*inference_mode"):
            runner.step(data(4), target=data(4))
        with torch.inference_mode():
            evaluated = runner.eval(data(4), target=data(4))
        assert runner.step(data(4), target=data(4)) == evaluated
        assert own.weight.grad is not None


def looped(forwards: int, early: int) -> Schedule:
    """4 stages looped on 2 ranks: rank 1 waits for stage 2 while rank 0 still runs stage 0."""
    k = range(forwards)
    first = [f"0F{i}" for i in k] + [f"2F{i}" for i in k]
    second = [f"1F{i}" for i in k] + [f"3F{i}" for i in k if i]
    second.insert(early, "3F0")
    return Schedule.from_csv(",".join(first) + "\n" + ",".join(second) + "\n")


def as_many_as_validated() -> None:
    """Schedules that need all messages that may be on their way and queued, twice the credits."""
    for credits, forwards, early in ((1, 3, 1), (2, 5, 1), (4, 9, 1), (4, 11, 3)):
        schedule = looped(forwards, early)
        with pipeline(schedule.stage_to_rank, credits=credits) as channel:
            modules = [nn.Identity(), nn.Identity()]
            runner = PipelineRunner(modules, schedule, channel, lambda out, target: out.sum())
            total = runner.eval(data(forwards), target=data(forwards))
            assert total.each == pytest.approx(data(forwards).sum(1).tolist())


@pytest.mark.parametrize(
    "function", [other_calls, other_runners, other_rows, inference_mode, as_many_as_validated]
)
def test_two_ranks(world, function: Any) -> None:
    world(2).run(function)


def modules_of_a_first_step() -> list[str]:
    """What is imported while other ranks wait."""
    with pipeline() as channel:
        own = linears()[channel.rank]
        runner = PipelineRunner(own, "gpipe", channel, squares, micro_batches=2, checkpoint={1})
        before = set(sys.modules)
        runner.step(data(4), target=data(4))
        return sorted(set(sys.modules) - before)


def test_checkpointing_is_loaded_by_the_constructor() -> None:
    with Ranks(2, timeout=60) as ranks:
        for loaded in ranks.run(modules_of_a_first_step):
            assert not [name for name in loaded if name.startswith("torch._dynamo")], loaded
