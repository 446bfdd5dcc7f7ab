"""The training loop that `examples.train` runs in every rank."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from tp_kernels import ParallelGroup
from tp_kernels.layers import RandomStreams, clip_grad_norm_, finalize_gradients

from .models import MODELS, ParallelDecoder


@dataclass(frozen=True)
class Settings:
    """One training run; equal settings draw equal weights, batches and masks at every world size."""

    model: str = "llama"
    sequence_parallel: bool = False
    steps: int = 200
    batch: int = 8
    tokens: int = 64
    dropout: float = 0.1
    checkpointing: bool = True
    learning_rate: float = 3e-3
    weight_decay: float = 0.1
    max_norm: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class Run:
    """Losses from step `start` on, in nats per byte, and how long it took."""

    start: int
    losses: list[float]
    seconds: float


def read(path: Path) -> Tensor:
    """The bytes of a text, int64 [n]."""
    return torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).long()


def unigram_entropy(text: Tensor) -> float:
    """Nats per byte of the best guess that does not look at what comes before."""
    share = torch.bincount(text).double() / text.numel()
    share = share[share > 0]
    return float(-(share * share.log()).sum())


def batch(text: Tensor, settings: Settings, step: int) -> tuple[Tensor, Tensor]:
    """Bytes [b, s] and the bytes that follow each, drawn by step: a resumed run sees the same."""
    draw = torch.Generator().manual_seed(settings.seed * 1_000_003 + step)
    size = settings.tokens + 1
    starts = torch.randint(text.numel() - size + 1, (settings.batch,), generator=draw)
    rows = torch.stack([text[start : start + size] for start in starts])
    return rows[:, :-1], rows[:, 1:]


def learning_rate(settings: Settings, step: int) -> float:
    """Half a cosine, from the whole rate to a tenth of it."""
    return settings.learning_rate * (0.55 + 0.45 * math.cos(math.pi * step / settings.steps))


class Trainer:
    """Model, optimizer and random streams of one rank."""

    def __init__(self, settings: Settings, text: Tensor, group: ParallelGroup) -> None:
        self.settings, self.text, self.step = settings, text, 0
        self.streams = RandomStreams(settings.seed, group=group)
        torch.manual_seed(
            settings.seed
        )  # equal on all ranks: weights do not depend on how many there are
        self.model = ParallelDecoder(
            MODELS[settings.model],
            group=group,
            streams=self.streams,
            sequence_parallel=settings.sequence_parallel,
            dropout=settings.dropout,
            checkpointing=settings.checkpointing,
        )
        matrices = [p for p in self.model.parameters() if p.dim() > 1]
        vectors = [p for p in self.model.parameters() if p.dim() <= 1]
        groups: list[dict[str, Any]] = [
            {"params": matrices, "weight_decay": settings.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))

    def advance(self) -> float:
        """One step; the loss before it."""
        ids, labels = batch(self.text, self.settings, self.step)
        loss = self.model(ids, labels)
        self.optimizer.zero_grad()
        loss.backward()
        finalize_gradients(self.model)  # gradients that ranks hold in parts
        clip_grad_norm_(self.model, self.settings.max_norm)  # the norm of the unsplit gradient
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.settings, self.step)
        self.optimizer.step()
        self.step += 1
        return float(loss.detach())

    def state_dict(self) -> dict[str, Any]:
        """All that this rank needs to go on as if nothing had happened."""
        return {
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "streams": self.streams.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.streams.load_state_dict(state["streams"])


def train(
    settings: Settings,
    text: Path,
    *,
    stop: int | None = None,
    resume: Path | None = None,
    save: Path | None = None,
    show: bool = False,
) -> Run:
    """Train in this rank, of the default process group, up to step `stop` (None: all steps).

    resume, save: directories of states, one file per rank. show: a progress bar, on rank 0.
    """
    with ParallelGroup() as group:
        trainer = Trainer(settings, read(text), group)
        if resume is not None:
            trainer.load_state_dict(torch.load(resume / f"rank{group.rank}.pt"))
        began = time.perf_counter()
        start = trainer.step
        steps = range(start, settings.steps if stop is None else stop)
        way = "sequence parallel" if settings.sequence_parallel else "tensor parallel"
        bar = track(
            steps,
            f"{settings.model}, ranks: {group.size}" + (f", {way}" if group.size > 1 else ""),
            console=Console(stderr=True),
            transient=True,
            disable=not show or group.rank > 0,
        )
        losses = [trainer.advance() for _ in bar]
        seconds = time.perf_counter() - began
        if save is not None:
            save.mkdir(parents=True, exist_ok=True)
            torch.save(trainer.state_dict(), save / f"rank{group.rank}.pt")
        return Run(start, losses, seconds)
