"""Stages that raise, die or are late, and ranks that disagree: all ranks raise and say where. No run hangs.

TP_KERNELS_PIPELINE_RUNS is the number of randomised runs (default 500).
"""

from __future__ import annotations

import os
import random
import re
import signal
from collections.abc import Callable
from time import monotonic, sleep
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tp_kernels import (
    CollectiveTimeoutError,
    ParallelGroup,
    PeerLostError,
    RankError,
    Ranks,
    TpKernelsError,
)
from tp_kernels.comm.faults import origin
from tp_kernels.pipeline import PipelineCommunicator, PipelineError, PipelineRunner
from tp_kernels.pipeline.generators import SCHEDULES

RUNS = int(os.environ.get("TP_KERNELS_PIPELINE_RUNS", "500"))
Happens = Callable[[str, int, int], None]  # in a phase of a stage and a micro-batch


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, happens: Happens, stage: int, k: int) -> Tensor:
        ctx.call = happens, stage, k
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        happens, stage, k = ctx.call
        happens("backward", stage, k)
        return g, None, None, None


class Scale(nn.Module):
    """x * w; `happens` is called in the forward and in the backward of every micro-batch."""

    def __init__(self, stage: int, happens: Happens) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(1.0 + stage / 8, dtype=torch.float64))
        self.stage, self.happens, self.calls = stage, happens, 0

    def forward(self, x: Tensor) -> Tensor:
        k, self.calls = self.calls, self.calls + 1
        self.happens("forward", self.stage, k)
        return _Backward.apply(x * self.w, self.happens, self.stage, k)


def nothing(phase: str, stage: int, k: int) -> None: ...


def mean(output: Tensor, target: Any) -> Tensor:
    return output.mean()


class Pipe:
    """Group, channel and runner of one rank, which a fault breaks."""

    def __init__(
        self,
        name: str,
        happens: Happens = nothing,
        timeout: float = 20.0,
        provider: str = "auto",
        **options: Any,
    ) -> None:
        processes = None
        if provider == "none":  # which is of no more use after a fault
            processes = torch.distributed.new_group()
        self.group = ParallelGroup(processes, timeout=20.0, provider=provider)
        ranks = self.group.size
        placement = SCHEDULES[name](ranks, 1).stage_to_rank
        self.channel = PipelineCommunicator(self.group, stage_to_rank=placement, timeout=timeout)
        self.stages = [Scale(index, happens) for index in self.channel.my_stages]
        if name == "pipedream":
            parameters = [p for stage in self.stages for p in stage.parameters()]
            options["optimizer"] = torch.optim.SGD(parameters, 0.0)
        self.runner = PipelineRunner(self.stages, name, self.channel, mean, **options)

    def step(self, m: int, happens: Happens | None = None) -> Any:
        for stage in self.stages:
            stage.calls = 0
            stage.happens = happens or nothing
            stage.zero_grad()
        x = torch.arange(1.0, 2 * m + 1, dtype=torch.float64)
        return self.runner.step(x, target=0, micro_batches=m)

    def check(self, m: int, losses: Any, updates: bool) -> None:
        """Against the closed form of loss and gradients."""
        product = 1.0
        for stage in range(self.channel.stages):
            product *= 1.0 + stage / 8
        x = torch.arange(1.0, 2 * m + 1, dtype=torch.float64).view(m, 2).mean(1)
        assert losses.each == pytest.approx((x * product).tolist())
        for stage in self.stages if not updates else ():
            wanted = float(x.mean()) * product / (1.0 + stage.stage / 8)
            assert float(stage.w.grad) == pytest.approx(wanted)

    def close(self) -> None:
        self.channel.leave()
        self.group.close()


class Planned(Exception):
    pass


def raising(phase: str, stage: int, k: int) -> Happens:
    def happens(now: str, at: int, micro_batch: int) -> None:
        if (now, at, micro_batch) == (phase, stage, k):
            raise Planned("as planned")

    return happens


def each_phase_and_stage() -> None:
    """Every rank raises and names where it happened; the runner then refuses; new ones work."""
    rank = torch.distributed.get_rank()
    for name in ("one_f_one_b", "zero_bubble_v"):
        stages = SCHEDULES[name](3, 1).stages
        for phase in ("forward", "backward"):
            for stage in range(0, stages, 2):
                pipe = Pipe(name)
                started = monotonic()
                with pytest.raises(TpKernelsError) as caught:
                    pipe.step(4, raising(phase, stage, 2))
                assert monotonic() - started < 15
                here = stage in pipe.channel.my_stages
                assert type(caught.value) is (PipelineError if here else PeerLostError)
                where = (
                    rf"{phase}.* of micro-batch 2 in stage {stage} on rank \d: Planned: as planned"
                )
                assert re.search(where, str(caught.value)), (rank, str(caught.value))
                if here:
                    assert isinstance(caught.value.__cause__, Planned)
                for again in (pipe.runner.step, pipe.runner.eval, pipe.runner.forward):
                    with pytest.raises(PipelineError, match=r"of no more use since .*micro-batch"):
                        again(torch.zeros(4))
                assert not pipe.runner._stages[pipe.channel.my_stages[0]]._in_flight
                pipe.close()
    pipe = Pipe("one_f_one_b")
    pipe.check(3, pipe.step(3), False)
    pipe.close()


def test_each_phase_and_stage(world) -> None:
    world(3).run(each_phase_and_stage)


def through_a_process_group() -> None:
    """At once and not at the deadline, also for ranks that have done their part and wait for losses."""
    for phase, stage, k in (("forward", 1, 1), ("backward", 2, 1), ("backward", 0, 3)):
        pipe = Pipe("one_f_one_b", provider="none")
        started = monotonic()
        with pytest.raises(TpKernelsError) as caught:
            pipe.step(4, raising(phase, stage, k))
        assert monotonic() - started < 15
        assert f"micro-batch {k} in stage {stage} on rank {stage}: Plan" in str(caught.value)
        pipe.close()


def test_through_a_process_group(world) -> None:
    world(3).run(through_a_process_group)


def other_ways_to_fail() -> None:
    """Losses that are none, wrong gradients, values that cannot travel, Ctrl-C."""

    def last(module: nn.Module, words: str, kind: Any = PipelineError, **options: Any) -> None:
        pipe = Pipe("gpipe")
        stage = module if pipe.channel.rank else pipe.stages[0]
        pipe.runner = PipelineRunner(stage, "gpipe", pipe.channel, **options)
        with pytest.raises((kind, PeerLostError), match=words):
            pipe.step(2)
        pipe.close()

    for stage_class, words in (
        (Vector, r"loss_fn|last stage returned a tensor \(2,\), not a loss"),
        (Text, "returned str, not a loss"),
        (Detached, "the loss requires no gradient"),
    ):
        last(stage_class(), words)
    pipe = Pipe("gpipe")
    pipe.stages[0].forward = lambda x: object() if pipe.channel.rank == 0 else x
    with pytest.raises(
        (PipelineError, PeerLostError), match=r"of micro-batch 0 in stage 0.*object"
    ):
        pipe.step(2)
    pipe.close()
    pipe = Pipe("gpipe")

    def interrupted(phase: str, stage: int, k: int) -> None:
        if (phase, stage, k) == ("forward", 1, 1):
            raise KeyboardInterrupt

    with pytest.raises((KeyboardInterrupt, PeerLostError)) as caught:
        pipe.step(2, interrupted)
    assert (type(caught.value) is KeyboardInterrupt) == (pipe.channel.rank == 1)
    pipe.close()


class Vector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stage = 1

    def forward(self, x: Tensor, target: Any = None) -> Tensor:
        return x


class Detached(Vector):
    def forward(self, x: Tensor, target: Any = None) -> Tensor:
        return x.detach().sum()


class Text(Vector):
    def forward(self, x: Tensor, target: Any = None) -> Any:
        return "text"


def test_other_ways_to_fail(world) -> None:
    world(2).run(other_ways_to_fail)


def late() -> list[str]:
    """A stage that sleeps past the deadline of the channel."""
    pipe = Pipe("one_f_one_b", timeout=1.0)

    def happens(phase: str, stage: int, k: int) -> None:
        if (phase, stage, k) == ("forward", 1, 1):
            sleep(3.0)

    with pytest.raises((PeerLostError, CollectiveTimeoutError)) as caught:
        pipe.step(3, happens)
    pipe.close()
    return str(caught.value)


def test_late(world) -> None:
    told = world(3).run(late)
    assert any(
        "forward of micro-batch 1 in stage 2 on rank 2" in text and "not within 1 s" in text
        for text in told
    ), told
    for text in told:
        assert re.search(r"micro-batch \d (in|from) stage \d on rank \d", text), text


def killed(phase: str) -> str:
    def happens(now: str, stage: int, k: int) -> None:
        if (now, stage, k) == (phase, 1, 1):
            os.kill(os.getpid(), signal.SIGKILL)

    pipe = Pipe("one_f_one_b")
    try:
        pipe.step(4, happens)
    finally:
        pipe.close()
    return "ended"


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_killed(phase: str) -> None:
    with Ranks(3, timeout=20) as ranks, pytest.raises(RankError) as caught:
        ranks.run(killed, phase)
    assert caught.value.rank == 1
    for rank in (0, 2):
        error = caught.value.outcomes[rank]
        assert isinstance(error, PeerLostError), error
        assert re.search(rf"micro-batch \d in stage {rank} on rank {rank}", str(error))
        assert "rank 1" in str(error)


def test_origin() -> None:
    """What travels on is what the first rank to fail said, however many pass it on."""
    first = "forward of micro-batch 2 in stage 1 on rank 1: ZeroDivisionError: division by zero"
    assert origin(first) == first
    told = f"recv: rank 0 of group 'g' waited for rank 1 (slot 0): rank 1 failed: {first}"
    assert origin(told) == f"rank 1 failed: {first}"
    assert origin(f"barrier: rank 2 waited: rank 0 failed: {told}") == f"rank 1 failed: {first}"


def randomised(first: int, count: int) -> int:
    """Runs of random schedules with random delays, and faults in one of four; the number of faults."""
    ranks = torch.distributed.get_world_size()
    pipes: dict[str, Pipe] = {}
    faults = 0
    try:
        for seed in range(first, first + count):
            draw = random.Random(seed)
            name = draw.choice([n for n in SCHEDULES if n != "forward_only"])
            m = draw.choice([1, 2, ranks, draw.randint(1, 8)])
            stages = SCHEDULES[name](ranks, 1).stages
            busy = {
                (phase, stage, k): draw.uniform(0, 0.003)
                for phase in ("forward", "backward")
                for stage in range(stages)
                for k in range(m)
                if draw.random() < 0.2
            }
            fault = draw.random()
            where = (
                draw.choice(["forward", "backward"]),
                draw.randrange(stages),
                draw.randrange(m),
            )
            if name not in pipes:
                pipes[name] = Pipe(name)
            pipe = pipes[name]

            def happens(
                phase: str,
                stage: int,
                k: int,
                busy: Any = busy,
                fault: float = fault,
                at: Any = where,
            ) -> None:
                sleep(busy.get((phase, stage, k), 0.0))
                if fault < 0.2 and (phase, stage, k) == at:
                    raise Planned("as planned")

            culprit = draw.randrange(ranks)
            if fault < 0.2:
                faults += 1
                with pytest.raises(TpKernelsError) as caught:
                    pipe.step(m, happens)
                said = rf"{where[0]}.* of micro-batch {where[2]} in stage {where[1]} .*as planned"
                assert re.search(said, str(caught.value)), (seed, where, str(caught.value))
                with pytest.raises(PipelineError, match="of no more use"):
                    pipe.step(m)
                pipes.pop(name).close()
            elif fault < 0.25 and ranks > 1:
                # Micro-batch counts that differ: all raise, and the pipe goes on.
                faults += 1
                with pytest.raises(TpKernelsError, match=f"{m + 1} micro-batches"):
                    pipe.step(m + 1 if pipe.channel.rank == culprit else m, happens)
            else:
                pipe.check(m, pipe.step(m, happens), name == "pipedream")
    finally:
        for pipe in pipes.values():
            pipe.close()
    return faults


@pytest.mark.parametrize(("ranks", "share"), [(2, 0.5), (3, 0.3), (4, 0.2)])
def test_randomised(world, ranks: int, share: float) -> None:
    """No hang: every wait of a rank ends with its step or with an error that says where."""
    left, first = round(RUNS * share), 10_000 * ranks
    while left > 0:
        count = min(left, 50)
        faults = world(ranks).run(randomised, first, count)
        assert len(set(faults)) == 1 and (faults[0] > 0 or count < 20)
        left, first = left - count, first + count
