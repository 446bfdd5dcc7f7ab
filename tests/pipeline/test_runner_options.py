"""What a runner is asked for beside a schedule: batches, scales, checkpoints, frozen stages, memory."""

from __future__ import annotations

import copy
import gc
import weakref
from time import monotonic, sleep
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tp_kernels import (
    ParallelGroup,
    PeerLostError,
    UnsupportedError,
)
from tp_kernels.layers import ColumnParallelLinear, RandomStreams
from tp_kernels.pipeline import MicroBatches, PipelineError, PipelineRunner, Whole
from tp_kernels.pipeline.micro_batches import cut
from tp_kernels.pipeline.timeline import Recorder

from .stages import (
    WIDTH,
    call,
    check_gradients,
    make_batch,
    make_stages,
    mean_loss,
    mine,
    one_process,
    pipeline,
)


class Plain(nn.Module):
    """x -> x, with dropout if asked for."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.b(self.dropout(self.a(x).tanh())) * scale


def plain_stages(count: int, dropout: float = 0.0) -> list[nn.Module]:
    torch.manual_seed(3)
    return [Plain(dropout).double() for _ in range(count)]


def numbers(rows: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(4)
    return torch.randn(rows, WIDTH, dtype=torch.float64), torch.randn(
        rows, WIDTH, dtype=torch.float64
    )


def squares(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def token_sum(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), target.flatten(), reduction="sum")


def scales() -> None:
    stages = make_stages(2)
    with pipeline() as channel:
        batch, target = make_batch(5)
        target[0] = -100  # one micro-batch has fewer tokens
        whole = copy.deepcopy(stages)
        value: Any = batch
        for stage in whole:
            value = call(stage, value)
        # Independent of how a runner does it: the mean over the tokens of the whole batch. The last stage
        # looks at its whole micro-batch, so that it is given one of a fixed mean.
        own = mine(stages, channel)
        for scale, loss_fn, factor in (
            ("token", token_sum, 1.0 / 12),
            ("sum", mean_loss, 1.0),
            ("micro_batch", mean_loss, 0.5),
        ):
            for stage in (*own, *stages):
                stage.zero_grad()
            each = one_process(stages, batch, target, 2, loss_fn, factor)
            runner = PipelineRunner(
                own, "one_f_one_b", channel, loss_fn, micro_batches=2, scale=scale
            )
            losses = runner.step(*batch, target=target)
            assert losses.each == tuple(each)
            assert losses.total == pytest.approx(sum(each) * factor, rel=1e-12)
            check_gradients(own[0], stages[channel.rank], True, scale)
        # by a count of the user's own
        runner = PipelineRunner(
            own,
            "gpipe",
            channel,
            lambda y, t: (y * t["weight"]).sum(),
            micro_batches=2,
            scale="token",
            count=lambda t: t["weight"].numel(),
        )
        losses = runner.step(*batch, target={"weight": torch.ones(5, 1, 1).double()})
        assert losses.total == pytest.approx(sum(losses.each) / 5)
        # not one token: no loss, and gradients of zero
        runner = PipelineRunner(own, "gpipe", channel, token_sum, micro_batches=1, scale="token")
        own[0].zero_grad()
        assert runner.step(*batch, target=target.fill_(-100)).total == 0.0
        assert all(p.grad is None or not p.grad.any() for p in own[0].parameters())


def token_scale_is_the_full_batch() -> None:
    """Micro-batches of 3 and 2 rows, unequal numbers of tokens: the gradient of the batch as a whole."""
    stages = plain_stages(2)
    with pipeline() as channel:
        x, _ = numbers(5)
        target = torch.tensor([0, -100, 2, 3, -100])
        F.cross_entropy(stages[1](stages[0](x)), target).backward()
        own = mine(stages, channel)[0]
        own.zero_grad()
        loss_fn = lambda y, t: F.cross_entropy(y, t, reduction="sum")
        runner = PipelineRunner(own, "gpipe", channel, loss_fn, micro_batches=2, scale="token")
        runner.step(x, target=target)
        check_gradients(own, stages[channel.rank], False)


def outputs_and_evaluation() -> None:
    stages = plain_stages(4)
    placement = [0, 1, 1, 0]
    with pipeline(placement) as channel:
        x, target = numbers(5)
        with torch.no_grad():
            expected = stages[3](stages[2](stages[1](stages[0](x))))
        own = mine(stages, channel)
        runner = PipelineRunner(own, "zero_bubble_v", channel, squares, micro_batches=2)
        y = runner.forward(x)
        assert (y is None) == (channel.rank != 0)
        if y is not None:
            torch.testing.assert_close(y, expected, rtol=1e-13, atol=1e-13)
            assert not y.requires_grad
        y = runner.forward(x, broadcast=True, micro_batches=5)
        torch.testing.assert_close(y, expected, rtol=1e-13, atol=1e-13)
        parts = [squares(e, t) for e, t in zip(cut(expected, 2), cut(target, 2), strict=True)]
        losses = runner.eval(x, target=target)
        assert losses.each == pytest.approx([part.item() for part in parts])
        assert all(p.grad is None for stage in own for p in stage.parameters())
        # without a loss and with a schedule that has no backward
        inference = PipelineRunner(own, lambda m: forward_only_v(m), channel, None, micro_batches=2)
        assert (inference.forward(x) is None) == (channel.rank != 0)
        with pytest.raises(UnsupportedError, match="forward_only has no backward"):
            inference.step(x)


def forward_only_v(micro_batches: int) -> Any:
    from dataclasses import replace

    from tp_kernels.pipeline.generators import zero_bubble_v
    from tp_kernels.pipeline.schedule import Kind, lay_out

    made = zero_bubble_v(2, micro_batches)
    orders = [[a for a in made.order(r) if a.kind is Kind.F] for r in range(2)]
    made = lay_out("forward_only", orders, made.stage_to_rank, micro_batches)
    return replace(made, name="forward_only")


def frozen() -> None:
    """Any stages frozen, also all; a batch that requires a gradient."""
    with pipeline() as channel:
        for which in [{0}, {1}, {2}, {0, 1}, {1, 2}, {0, 2}, {0, 1, 2}]:
            for name in ("one_f_one_b", "zero_bubble_h1"):
                stages = make_stages(3)
                for index in which:
                    stages[index].requires_grad_(False)
                own = mine(stages, channel)
                runner = PipelineRunner(own, name, channel, mean_loss, micro_batches=3)
                batch, target = make_batch(4)
                if which == {0, 1, 2}:
                    losses = runner.step(*batch, target=target)
                    assert losses == runner.eval(*batch, target=target)
                else:
                    one_process(stages, batch, target, 3)
                    runner.step(*batch, target=target)
                check_gradients(own[0], stages[channel.rank], True, (which, name))
        stages = plain_stages(3)
        x, target = numbers(4)
        here, there = x.clone().requires_grad_(), x.clone().requires_grad_()
        one_process(stages, (here,), target, 3, squares)
        runner = PipelineRunner(mine(stages, channel), "zero_bubble_h1", channel, squares)
        runner.step(there, target=target, micro_batches=3)
        assert (there.grad is None) == (channel.rank != 0)
        if there.grad is not None:
            assert torch.equal(there.grad, here.grad)


class Integers(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return {"x": (x * 10).long()}


class FromIntegers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x: Tensor) -> Any:
        y = self.a(x.double())
        return y, y.detach(), y, [y[0]]  # the same tensor twice, one without gradient, a view


class Twice(nn.Module):
    def forward(self, y: Tensor, without: Tensor, again: Tensor, row: list[Tensor]) -> Tensor:
        return y * 2 + again * 3 + without + row[0]


def odd_values() -> None:
    """Integer outputs, outputs without gradient, one tensor twice."""
    with pipeline() as channel:
        for name in ("gpipe", "zero_bubble_h2"):
            torch.manual_seed(0)
            stages = [Integers(), FromIntegers(), Twice()]
            own = mine(stages, channel)
            x, target = numbers(3)
            one_process(stages, (x,), target, 3, squares)
            PipelineRunner(own, name, channel, squares).step(x, target=target, micro_batches=3)
            check_gradients(own[0], stages[channel.rank])


class InPlace(nn.Module):
    """Overwrites what it gets and what it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(1.5)
        return self.a(x).tanh_()


def in_place() -> None:
    """Stages that begin with an operation in place, on other ranks and on the same."""
    for placement, name in (([0, 1], "gpipe"), ([0, 1, 1, 0], "zero_bubble_v")):
        with pipeline(placement) as channel:
            torch.manual_seed(0)
            stages = [Plain().double(), *(InPlace() for _ in placement[1:])]
            own = mine(stages, channel)
            x, target = numbers(6)
            runner = PipelineRunner(own, name, channel, squares, micro_batches=3)
            if name == "gpipe":
                one_process(stages, (x,), target, 3, squares)
                runner.step(x, target=target)
                check_gradients(own[0], stages[channel.rank])
            else:  # stage 1 needs the output that stage 2 overwrites on the same rank: noticed
                with pytest.raises((PipelineError, PeerLostError), match="inplace operation"):
                    runner.step(x, target=target)


def cut_already() -> None:
    """MicroBatches of sizes of their own, as arguments, targets and keywords."""
    stages = plain_stages(2)
    with pipeline() as channel:
        own = mine(stages, channel)[0]
        x, target = numbers(7)
        sizes = [1, 4, 2]
        for part, t, scale in zip(
            x.split(sizes), target.split(sizes), (1.0, 2.0, 3.0), strict=True
        ):
            (squares(stages[1](stages[0](part, scale), scale), t) * (1 / 3)).backward()
        runner = PipelineRunner(own, "one_f_one_b", channel, squares, micro_batches=3)
        runner.step(
            MicroBatches(x.split(sizes)),
            target=MicroBatches(target.split(sizes)),
            scale=MicroBatches([1.0, 2.0, 3.0]),
        )
        check_gradients(own, stages[channel.rank])


def accumulation() -> None:
    """Two steps without zero_grad are one of twice the micro-batches, halves swapped for `scale`."""
    stages = plain_stages(2)
    with pipeline() as channel:
        own = mine(stages, channel)
        runner = PipelineRunner(own, "zero_bubble_h1", channel, squares, scale="sum")
        for rows in (4, 6):
            x, target = numbers(rows)
            one_process(stages, (x,), target, 2, squares, factor=1.0)
            runner.step(x, target=target, micro_batches=2)
        check_gradients(own[0], stages[channel.rank])


def hooks() -> None:
    """Hooks of parameters run once for every micro-batch, in W where the backward is split."""
    stages = plain_stages(2)
    with pipeline() as channel:
        for name in ("one_f_one_b", "zero_bubble_h1"):
            own = mine(stages, channel)
            seen: list[str] = []
            for key, p in own[0].named_parameters():
                p.register_post_accumulate_grad_hook(lambda p, key=key, seen=seen: seen.append(key))
            x, target = numbers(6)
            PipelineRunner(own, name, channel, squares).step(x, target=target, micro_batches=3)
            assert sorted(seen) == sorted([key for key, _ in own[0].named_parameters()] * 3)


def checkpoints() -> None:
    """Dropout replayed: the same gradients with and without, bit by bit; fewer bytes kept."""
    with pipeline() as channel:
        x, target = numbers(6)
        for name in ("one_f_one_b", "zero_bubble_h1"):
            found, kept = [], []
            for checkpoint in (False, True, {1}):
                own = mine(plain_stages(2, dropout=0.5), channel)
                recorder = Recorder()
                runner = PipelineRunner(
                    own,
                    name,
                    channel,
                    squares,
                    micro_batches=3,
                    checkpoint=checkpoint,
                    recorder=recorder,
                )
                torch.manual_seed(9)
                runner.step(x, target=target)
                found.append([p.grad for p in own[0].parameters()])
                kept.append(max(m.amount for m in recorder.timeline().memory))
            for other in found[1:]:
                assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
            assert kept[1] < kept[0], kept
            assert (kept[2] == kept[0]) == (channel.rank == 0), kept


class Streamed(nn.Module):
    def __init__(self, streams: RandomStreams) -> None:
        super().__init__()
        self.a, self.streams = nn.Linear(WIDTH, WIDTH).double(), streams

    def forward(self, x: Tensor) -> Tensor:
        with self.streams.fork("own"):
            return F.dropout(self.a(x), 0.5)


def streams() -> None:
    with pipeline() as channel, ParallelGroup(timeout=30) as group:
        x, target = numbers(6)
        found = []
        for checkpoint in (False, True):
            random = RandomStreams(5, group=group)
            torch.manual_seed(1)
            own = Streamed(random)
            options = {"checkpoint": True, "streams": random} if checkpoint else {}
            runner = PipelineRunner(own, "zero_bubble_h1", channel, squares, **options)
            runner.step(x, target=target, micro_batches=3)
            found.append([p.grad for p in own.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


class Watched(nn.Module):
    """Keeps weak references to its inputs and outputs."""

    def __init__(self, seen: dict[str, list[Any]]) -> None:
        super().__init__()
        self.a, self.seen = nn.Linear(WIDTH, WIDTH).double(), seen

    def forward(self, x: Tensor) -> Tensor:
        deadline = monotonic() + 5.0  # they may be sent by a thread
        while (alive := sum(r() is not None for r in self.seen["outputs"])) > 1:
            if monotonic() > deadline:
                break
            sleep(0.001)
        self.seen["alive"].append(alive)
        y = self.a(x) + 1.0  # which the graph does not need
        self.seen["outputs"].append(weakref.ref(y.untyped_storage()))
        return y


def freed() -> None:
    """Outputs are gone once they are sent, although their backward is to come."""
    with pipeline(credits=8) as channel:
        seen: dict[str, list[Any]] = {"outputs": [], "alive": []}
        own = Watched(seen)
        x, target = numbers(8)
        runner = PipelineRunner(own, "gpipe", channel, squares, micro_batches=8)
        gc.disable()  # nothing here is a cycle
        try:
            runner.step(x, target=target)
        finally:
            gc.enable()
        if channel.rank == 0:
            assert max(seen["alive"]) <= 1, seen["alive"]
        assert sum(ref() is not None for ref in seen["outputs"]) <= 1


def delayed_layers() -> None:
    """delay_wgrad=True in schedules that split and that do not; compiled stages."""
    import torch.distributed as dist

    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    with pipeline() as channel, ParallelGroup(alone) as group:
        x, target = numbers(6)
        for name in ("one_f_one_b", "zero_bubble_h1", "gpipe"):
            found = []
            for delay in (False, True):
                torch.manual_seed(0)
                stage = nn.Sequential(
                    ColumnParallelLinear(
                        WIDTH, WIDTH, group=group, delay_wgrad=delay, dtype=torch.float64
                    ),
                    nn.Tanh(),
                    nn.Linear(WIDTH, WIDTH).double(),
                )
                runner = PipelineRunner(stage, name, channel, squares, micro_batches=3)
                runner.step(x, target=target)
                found.append([p.grad for p in stage.parameters()])
                told = runner.explain()
                assert ("0.weight: later (delay_wgrad=True)" in told) == delay
                assert ("2.weight: later" in told) == (name == "zero_bubble_h1")
            assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
        stages = plain_stages(2)
        one_process(stages, (x,), target, 3, squares)
        own = mine(plain_stages(2), channel)[0]
        compiled = torch.compile(own, backend="eager")
        runner = PipelineRunner(compiled, "zero_bubble_h1", channel, squares, micro_batches=3)
        runner.step(x, target=target)
        check_gradients(own, stages[channel.rank], False)
        assert "compiled" in runner.explain()


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x: Tensor, target: Tensor | None = None, scale: float = 1.0) -> Tensor:
        y = self.a(x) * scale
        return y if target is None else squares(y, target)


def loss_inside_and_keywords() -> None:
    torch.manual_seed(0)
    stages = [Plain().double(), WithLoss()]
    with pipeline() as channel:
        own = mine(stages, channel)[0]
        x, target = numbers(5)
        runner = PipelineRunner(own, "one_f_one_b", channel, micro_batches=2)
        losses = runner.step(x, target=target, scale=2.0)
        for part, t in zip(cut(x, 2), cut(target, 2), strict=True):
            (squares(stages[1].a(stages[0](part, scale=2.0)) * 2.0, t) * 0.5).backward()
        check_gradients(own, stages[channel.rank])
        y = runner.forward(x, scale=Whole(2.0))
        if y is not None:
            torch.testing.assert_close(y, stages[1].a(stages[0](x, 2.0)) * 2.0)
        assert losses == runner.eval(x, target=target, scale=2.0)


TWO = [
    scales,
    token_scale_is_the_full_batch,
    outputs_and_evaluation,
    in_place,
    cut_already,
    accumulation,
    hooks,
    checkpoints,
    streams,
    freed,
    delayed_layers,
    loss_inside_and_keywords,
]


@pytest.mark.parametrize("function", TWO)
def test_two_ranks(world, function: Any) -> None:
    world(2).run(function)


@pytest.mark.parametrize("function", [frozen, odd_values])
def test_three_ranks(world, function: Any) -> None:
    world(3).run(function)
