"""Small stages, and one process that does what a pipeline of them should."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tp_kernels import ParallelGroup
from tp_kernels.pipeline import PipelineCommunicator
from tp_kernels.pipeline.generators import SCHEDULES
from tp_kernels.pipeline.micro_batches import cut
from tp_kernels.pipeline.schedule import Schedule

WIDTH = 6


class First(nn.Module):
    """From a batch to what stages send each other: tensors of several kinds, numbers, text, None."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, WIDTH)
        self.project = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor, x: Tensor) -> tuple[Any, ...]:
        x = self.project(x) + self.table(ids)
        return x, {"skip": x.sin(), "count": 0, "text": "a"}, [ids, None], x.cos()


class Middle(nn.Module):
    """Uses one linear twice, passes tensors on, makes one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.twice = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, side: dict[str, Any], more: list[Any], unused: Tensor) -> Any:
        y = self.twice(self.twice(self.norm(x)))
        y = x + self.down(F.gelu(self.up(y))) * 0.5 + 0.1 * side["skip"]
        side = {**side, "count": side["count"] + 1, "text": side["text"] + "b"}
        if side["count"] == 2:
            side["skip"] = side["skip"] * self.norm.weight
        return y, side, more, unused * 2


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.middle, self.head = Middle(), nn.Linear(WIDTH, 5)

    def forward(self, *received: Any) -> Tensor:
        y, side, (ids, nothing), _ = self.middle(*received)
        assert nothing is None and side["text"] == "a" + "b" * side["count"]
        return self.head(y + side["skip"]) * (1 + ids.double().mean())


def make_stages(count: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> list[nn.Module]:
    torch.manual_seed(seed)
    stages = [First(), *(Middle() for _ in range(count - 2)), Last()]
    return [stage.to(dtype) for stage in stages]


def make_batch(rows: int, seed: int = 0) -> tuple[tuple[Tensor, Tensor], Tensor]:
    torch.manual_seed(100 + seed)
    ids = torch.randint(0, 11, (rows, 3))
    return (ids, torch.randn(rows, 3, WIDTH, dtype=torch.float64)), torch.randint(0, 5, (rows, 3))


def mean_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


def call(stage: nn.Module, value: Any, first: bool = False) -> Any:
    if isinstance(value, dict):
        return stage(**value)
    return stage(*value) if isinstance(value, tuple) else stage(value)


def one_process(
    stages: Sequence[nn.Module],
    args: tuple[Any, ...],
    target: Any,
    micro_batches: int,
    loss_fn: Callable[..., Tensor] = mean_loss,
    factor: float | None = None,
) -> list[float]:
    """Forward and backward of one micro-batch after the other; the losses."""
    factor = 1.0 / micro_batches if factor is None else factor
    losses = []
    for value, wanted in zip(cut(args, micro_batches), cut(target, micro_batches), strict=True):
        for stage in stages:
            value = call(stage, value)
        loss = loss_fn(value, wanted)
        (loss * factor).backward()
        losses.append(loss.item())
    return losses


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    return {n: None if p.grad is None else p.grad.clone() for n, p in module.named_parameters()}


def check_gradients(
    module: nn.Module, expected: nn.Module, exact: bool = True, what: object = ""
) -> None:
    for (name, p), q in zip(module.named_parameters(), expected.parameters(), strict=True):
        if q.grad is None:
            assert p.grad is None, (what, name)
        elif exact:
            assert p.grad is not None and torch.equal(p.grad, q.grad), (what, name)
        else:
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-6, atol=1e-12)


def schedule_of(name: str, ranks: int, micro_batches: int) -> Schedule:
    return SCHEDULES[name](ranks, micro_batches)


@contextmanager
def pipeline(
    stage_to_rank: Sequence[int] | None = None,
    timeout: float = 30.0,
    provider: str = "auto",
    **options: Any,
) -> Iterator[PipelineCommunicator]:
    with (
        ParallelGroup(timeout=timeout, provider=provider) as group,
        PipelineCommunicator(group, stage_to_rank=stage_to_rank, **options) as channel,
    ):
        yield channel


def mine(stages: Sequence[nn.Module], channel: PipelineCommunicator) -> list[nn.Module]:
    """Copies of this rank's stages."""
    return [copy.deepcopy(stages[index]) for index in channel.my_stages]
