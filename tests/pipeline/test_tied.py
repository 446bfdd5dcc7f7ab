"""Weights that several stages hold: one gradient on all of them, counted once."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tp_kernels import GroupMismatchError, ShapeError, UnsupportedError
from tp_kernels.layers import use_main_grads
from tp_kernels.pipeline import PipelineError, PipelineRunner

from .stages import WIDTH, pipeline


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.a = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        return self.a(self.embedding(ids)).tanh()


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 11, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.a(x).tanh())


class Tied(nn.Module):
    """One process: embedding, a hidden layer for each stage between, head with the embedding's weight."""

    def __init__(self, between: int, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.stages = nn.Sequential(
            Embed(), *(nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(between)), Head()
        ).to(dtype)
        self.stages[-1].head.weight = self.stages[0].embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.stages(ids)


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)


def text() -> tuple[Tensor, Tensor]:
    torch.manual_seed(8)
    return torch.randint(0, 11, (8,)), torch.randint(0, 11, (8,))


def untied(stages: Any, dtype: torch.dtype) -> list[nn.Module]:
    """Copies in which every stage has parameters of its own."""
    return [copy.deepcopy(stage) for stage in stages]


def training(name: str, placement: list[int], main: bool, shared: bool) -> None:
    """Gradients, norms and weights of three steps with clipping: those of one process."""
    dtype = torch.float64
    with pipeline(placement) as channel:
        last = channel.stages - 1
        one = Tied(channel.stages - 2, dtype)
        stages = untied(one.stages, dtype)
        own = [stages[index] for index in channel.my_stages]
        if shared and {0, last} <= set(channel.my_stages):
            stages[last].head.weight = stages[0].embedding.weight  # one object on one rank
        tie = ((last, "head.weight"), (0, "embedding.weight"))  # in any order
        runner = PipelineRunner(own, name, channel, loss_fn, micro_batches=4, tied=[tie])
        ids, target = text()
        if main:
            for stage in own:
                use_main_grads(stage)
        parameters = list({id(p): p for stage in own for p in stage.parameters()}.values())
        ours = torch.optim.SGD(parameters, 0.5, momentum=0.9)
        reference = torch.optim.SGD(one.parameters(), 0.5, momentum=0.9)
        for step in range(3):
            reference.zero_grad()
            for _ in range(2):  # two calls accumulate
                for part, wanted in zip(ids.chunk(4), target.chunk(4), strict=True):
                    (loss_fn(one(part), wanted) / 4).backward()
            ours.zero_grad()
            for stage in own if main else ():
                use_main_grads(stage)
            for _ in range(2):
                runner.step(ids, target=target)
            norm = runner.clip_grad_norm_(0.05)
            expected = nn.utils.clip_grad_norm_(one.parameters(), 0.05)
            assert norm.dtype == torch.float64 and float(norm) > 0.05
            torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)
            for index, stage in zip(channel.my_stages, own, strict=True):
                for (key, p), q in zip(
                    stage.named_parameters(), one.stages[index].parameters(), strict=True
                ):
                    gradient = p.main_grad if main else p.grad
                    torch.testing.assert_close(
                        gradient, q.grad, rtol=1e-11, atol=1e-15, msg=f"{step} {index} {key}"
                    )
                    if main:
                        p.grad = p.main_grad
            ours.step()
            reference.step()
        for stage in own:
            for name_, p in stage.named_parameters():
                if name_ in ("embedding.weight", "head.weight"):
                    digests = p.detach().numpy().tobytes()
        everyone: list[Any] = [None] * channel.group.size
        mine_ = {
            index: dict(stage.named_parameters())
            for index, stage in zip(channel.my_stages, own, strict=True)
        }
        bits = [
            mine_[index][key].detach().numpy().tobytes().hex()
            for index, key in tie
            if index in mine_
        ]
        torch.distributed.all_gather_object(everyone, bits)
        assert len({b for some in everyone for b in some}) == 1  # after three steps, on all stages
        assert digests is not None if bits else True


@pytest.mark.parametrize(
    ("ranks", "name", "placement"),
    [
        (2, "one_f_one_b", [0, 1]),
        (3, "zero_bubble_h1", [0, 1, 2]),
        (2, "zero_bubble_v", [0, 1, 1, 0]),
        (2, "interleaved_one_f_one_b", [0, 1, 0, 1]),
    ],
)
@pytest.mark.parametrize("main", [False, True])
def test_training(world, ranks: int, name: str, placement: list[int], main: bool) -> None:
    world(ranks).run(training, name, placement, main, False)


def test_one_object_on_one_rank(world) -> None:
    world(2).run(training, "zero_bubble_v", [0, 1, 1, 0], False, True)


class Holder(nn.Module):
    def __init__(self, value: float, used: bool = True) -> None:
        super().__init__()
        self.w, self.used = nn.Parameter(torch.tensor([value], dtype=torch.bfloat16)), used

    def forward(self, x: Tensor) -> Tensor:
        return x * self.w if self.used else x.clone().requires_grad_()


def three_holders() -> None:
    """Summed in the order of stages in fp32, rounded once; also where some have no gradient."""
    with pipeline() as channel:
        parts = [1.0, 2.0**-8, 2.0**-8]  # in bf16, one after the other, they vanish
        rank = channel.rank
        for used in ([True] * 3, [True, False, True], [False] * 3):
            own = Holder(1.0, used[rank])
            tie = [(stage, "w") for stage in range(3)]
            runner = PipelineRunner(own, "gpipe", channel, None, tied=[tie])
            own.w.register_hook(lambda g: torch.full_like(g, parts[rank]))
            runner.step(torch.ones(1, dtype=torch.bfloat16), micro_batches=1)
            total = sum(part for part, there in zip(parts, used, strict=True) if there)
            if any(used):
                assert own.w.grad.dtype == torch.bfloat16
                assert float(own.w.grad) == float(torch.tensor(total, dtype=torch.bfloat16))
            else:
                assert own.w.grad is None


def test_three_holders(world) -> None:
    world(3).run(three_holders)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.ones(2, dtype=torch.float64)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.a * 2 + self.b * 3).sum().view(1)


def two_in_one_stage() -> None:
    """Also of one stage: all parameters of a tie get the sum."""
    with pipeline() as channel:
        own = Two()
        tie = [(s, name) for s in range(2) for name in ("b", "a")]
        runner = PipelineRunner(own, "gpipe", channel, None, tied=[tie])
        runner.step(torch.ones(1, dtype=torch.float64), micro_batches=1)
        # stage 0: x = 1, y = 10; stage 1: dy = 4 of two elements
        expected = 2 * 4 + 3 * 4 + 2 * 10 + 3
        for p in own.parameters():
            assert p.grad.tolist() == [expected] * 2, p.grad
        norm = float(runner.clip_grad_norm_(1e9))
        assert norm == pytest.approx(expected * 2**0.5)  # counted once


def test_two_in_one_stage(world) -> None:
    world(2).run(two_in_one_stage)


def refused() -> None:
    with pipeline() as channel:
        rank = channel.rank
        tie = [(0, "w"), (1, "w")]
        with pytest.raises(GroupMismatchError, match=r"stage 0's w is .* digest .*stage 1's w"):
            PipelineRunner(Holder(1.0 + rank), "gpipe", channel, tied=[tie])
        own = Holder(1.0)
        own.w.requires_grad_(rank == 0)
        with pytest.raises(GroupMismatchError, match=r"bfloat16 \(frozen\) of digest"):
            PipelineRunner(own, "gpipe", channel, tied=[tie])
        own = Holder(1.0)
        for words, wrong in (
            ("names stage 2 of 2", [(0, "w"), (2, "w")]),
            ("has two parameters or more", [(0, "w")]),
        ):
            with pytest.raises(ShapeError, match=words):
                PipelineRunner(own, "gpipe", channel, tied=[wrong])
        with pytest.raises(
            ShapeError if rank == 1 else PipelineError, match="stage 1 has no parameter 'v'"
        ):
            PipelineRunner(own, "gpipe", channel, tied=[[(0, "w"), (1, "v")]])
        optimizer = torch.optim.SGD(own.parameters(), 0.1)
        with pytest.raises(UnsupportedError, match="untie them"):
            PipelineRunner(own, "pipedream", channel, tied=[tie], optimizer=optimizer)


def test_refused(world) -> None:
    world(2).run(refused)


def norms() -> None:
    """Any order of the norm; nan on one rank is nan on all."""
    with pipeline() as channel:
        torch.manual_seed(channel.rank)
        own = nn.Linear(3, 3).double()
        everything = []
        for rank in range(2):
            torch.manual_seed(10 + rank)
            everything += [torch.randn(3, 3).double(), torch.randn(3).double()]
        runner = PipelineRunner(own, "gpipe", channel)
        for order in (1.0, 2.0, 3.0, float("inf")):
            own.weight.grad, own.bias.grad = (g.clone() for g in everything[2 * channel.rank :][:2])
            expected = torch.linalg.vector_norm(torch.cat([g.flatten() for g in everything]), order)
            norm = runner.clip_grad_norm_(0.1, order)
            torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)
            scaled = everything[2 * channel.rank] * (0.1 / (float(norm) + 1e-6))
            torch.testing.assert_close(own.weight.grad, scaled)
        if channel.rank == 1:
            own.bias.grad[1] = float("nan")
        for order in (2.0, float("inf")):
            with pytest.raises(RuntimeError, match="is nan"):
                runner.clip_grad_norm_(0.1, order, error_if_nonfinite=True)
            assert not own.weight.grad.isnan().any()
        runner.clip_grad_norm_(0.1)  # as torch's
        assert own.weight.grad.isnan().all() and own.bias.grad.isnan().all()
        with pytest.raises(UnsupportedError, match="not positive"):
            runner.clip_grad_norm_(0.1, 0.0)


def test_norms(world) -> None:
    world(2).run(norms)
