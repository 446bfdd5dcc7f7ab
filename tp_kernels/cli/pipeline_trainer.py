"""What `tp-kernels pipeline train` runs in every process: a small decoder in stages, trained on bytes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor, nn

import tp_kernels
from tp_kernels import ParallelGroup, split_sizes
from tp_kernels.layers import (
    ParallelLMHead,
    ParallelTransformerBlock,
    RMSNorm,
    VocabParallelEmbedding,
    clip_grad_norm_,
    finalize_gradients,
)
from tp_kernels.pipeline import Grid, PipelineCommunicator, PipelineRunner
from tp_kernels.pipeline.generators import SCHEDULES
from tp_kernels.pipeline.preparation import BESIDE_TENSORS
from tp_kernels.pipeline.timeline import Recorder, Timeline

VOCABULARY = 256


@dataclass(frozen=True)
class Settings:
    """One training run; equal settings draw equal weights and batches, however the model is divided."""

    schedule: str
    stages: int  # ranks of the pipeline
    tensor: int
    data: int
    micro_batches: int
    steps: int
    layers: int
    hidden: int
    heads: int
    tokens: int
    batch: int
    tied: bool
    checkpoint: bool
    learning_rate: float
    seed: int

    @property
    def ranks(self) -> int:
        return self.stages * self.tensor * self.data

    @property
    def placement(self) -> tuple[int, ...]:
        """The rank of every stage."""
        return SCHEDULES[self.schedule](self.stages, 1).stage_to_rank


@dataclass(frozen=True)
class Run:
    """Losses in nats per byte, how long the steps took, and what the last one did."""

    losses: list[float]
    seconds: float
    timeline: Timeline | None = None
    explained: str = ""


class Stage(nn.Module):
    """Some of the decoder's blocks; the embedding before the first, norm and head behind the last.

    forward(ids [b, s] or x [b, s, H], target [b, s] in the last) -> x [b, s, H], or the summed loss.
    """

    def __init__(
        self, settings: Settings, which: range, group: ParallelGroup, delay: bool = False
    ) -> None:
        """delay: weight gradients of the blocks wait for `backward_dw`, which a runner calls."""
        super().__init__()
        s = settings
        first, last = 0 in which, s.layers + 1 in which
        self.embed = self.norm = self.head = None
        if first:
            torch.manual_seed(s.seed)  # by part: the same weights however the model is cut
            self.embed = VocabParallelEmbedding(VOCABULARY, s.hidden, group=group)
            with torch.no_grad():
                self.embed.weight.mul_(0.1)  # drawn with a deviation of 1: too much for logits
        self.layers = nn.ModuleList()
        for index in which:
            if 0 < index <= s.layers:
                torch.manual_seed(s.seed + index)
                self.layers.append(
                    ParallelTransformerBlock(
                        s.hidden, s.heads, 3 * s.hidden, group=group, delay_wgrad=delay
                    )
                )
        if last:
            torch.manual_seed(s.seed + s.layers + 1)
            self.norm = RMSNorm(s.hidden, group=group)
            self.head = ParallelLMHead(s.hidden, VOCABULARY, group=group)
            if s.tied:  # equal to begin with; the runner keeps them equal
                torch.manual_seed(s.seed)
                embed = VocabParallelEmbedding(VOCABULARY, s.hidden, group=group)
                with torch.no_grad():
                    self.head.weight.copy_(embed.weight.mul_(0.1))

    def forward(self, x: Tensor, target: Tensor | None = None) -> Tensor:
        if self.embed is not None:
            x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        if self.norm is None or self.head is None or target is None:
            return x
        return self.head.loss(self.norm(x), target) * target.numel()


def cuts(settings: Settings) -> list[range]:
    """The parts of every stage: 0 is the embedding, then the blocks, then norm and head."""
    bounds = [0]
    for size in split_sizes(settings.layers, len(settings.placement)):
        bounds.append(bounds[-1] + size)
    ends = [1 + bound for bound in bounds]
    ends[0], ends[-1] = 0, settings.layers + 2
    return [range(start, stop) for start, stop in pairwise(ends)]


def read(path: Path | None) -> Tensor:
    """The bytes of a text, int64 [n]; without a path, the source of this package."""
    if path is not None:
        content = path.read_bytes()
    else:
        root = Path(tp_kernels.__file__).parent
        content = b"".join(file.read_bytes() for file in sorted(root.rglob("*.py")))
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).long()


def batch(text: Tensor, settings: Settings, step: int, replica: int = 0) -> tuple[Tensor, Tensor]:
    """Bytes [b, s] and the bytes that follow each."""
    draw = torch.Generator().manual_seed(settings.seed * 1_000_003 + step * 1009 + replica)
    size = settings.tokens + 1
    starts = torch.randint(text.numel() - size + 1, (settings.batch,), generator=draw)
    rows = torch.stack([text[start : start + size] for start in starts.tolist()])
    return rows[:, :-1], rows[:, 1:]


def train(settings: Settings, path: Path | None, show: bool) -> Run:
    """Train in this rank, of the default process group."""
    text, recorder = read(path), Recorder()
    with (
        Grid(settings.stages, settings.tensor, settings.data) as grid,
        PipelineCommunicator(
            grid.pipeline,
            stage_to_rank=settings.placement,
            recorder=recorder,
            buffer_bytes=_room(settings),
        ) as channel,
    ):
        which = cuts(settings)
        made = SCHEDULES[settings.schedule](settings.stages, 1)
        own = [
            Stage(settings, which[index], grid.tensor, made.splits) for index in channel.my_stages
        ]
        optimizer = torch.optim.AdamW(
            [p for s in own for p in s.parameters()], settings.learning_rate
        )
        ties = [((0, "embed.weight"), (channel.stages - 1, "head.weight"))] if settings.tied else []
        runner = PipelineRunner(
            own,
            settings.schedule,
            channel,
            micro_batches=settings.micro_batches,
            scale="token",
            tied=ties,
            data_parallel=grid.data,
            checkpoint=settings.checkpoint,
            optimizer=None if made.flush else optimizer,
        )
        losses: list[float] = []
        began = time.perf_counter()
        for step in _steps(settings, losses, show and torch.distributed.get_rank() == 0):
            ids, target = batch(text, settings, step, grid.data.rank)
            recorder.clear()
            told = runner.step(ids, target=target)
            losses.append(told.total)
            if made.flush:
                runner.clip_grad_norm_(1.0)
                start = recorder.now()
                optimizer.step()
                optimizer.zero_grad()
                recorder.record("OPT", channel.my_stages[0], None, start, recorder.now())
        seconds = time.perf_counter() - began
        timeline = recorder.timeline(channel.group, f"{settings.schedule}, last step")
        return Run(losses, seconds, timeline, explained=runner.explain())


def train_alone(settings: Settings, path: Path | None, show: bool) -> Run:
    """The same training on one process, with whole batches and a plain loop: what pipelines must equal."""
    text = read(path)
    with ParallelGroup() as group:
        model = Stage(settings, range(settings.layers + 2), group)
        if settings.tied:
            assert model.head is not None and model.embed is not None
            model.head.weight = model.embed.weight
        optimizer = torch.optim.AdamW(model.parameters(), settings.learning_rate)
        losses: list[float] = []
        began = time.perf_counter()
        for step in _steps(settings, losses, show):
            batches = [batch(text, settings, step, replica) for replica in range(settings.data)]
            ids = torch.cat([ids for ids, _ in batches])
            target = torch.cat([target for _, target in batches])
            loss = model(ids, target) / target.numel()
            optimizer.zero_grad()
            loss.backward()
            finalize_gradients(model)
            clip_grad_norm_(model, 1.0)
            optimizer.step()
            losses.append(loss.item())
        return Run(losses, time.perf_counter() - began)


def _room(settings: Settings) -> int:
    """Shared memory between two ranks: tensor-parallel stages need room for what may be under way."""
    rows = -(-settings.batch // settings.micro_batches)
    message = rows * settings.tokens * settings.hidden * 4 + BESIDE_TENSORS
    lanes = 2 * len(settings.placement) // settings.stages
    return max(4 << 20, 4 * lanes * message)


def _steps(settings: Settings, losses: Sequence[float], show: bool) -> Iterator[int]:
    """The steps, with a bar that tells the loss."""
    columns: list[Any] = [TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()]
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not show) as bars:
        task = bars.add_task("step 0", total=settings.steps)
        for step in range(settings.steps):
            yield step
            what = f"step {step + 1} of {settings.steps}, loss {losses[-1]:.4f}"
            bars.update(task, completed=step + 1, description=what)
