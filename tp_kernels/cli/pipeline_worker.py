"""What the ranks of `tp-kernels pipeline run` do."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from tp_kernels.comm.collectives import barrier
from tp_kernels.comm.objects import all_gather_object
from tp_kernels.pipeline import PipelineCommunicator
from tp_kernels.pipeline.causal_lm import load_stage
from tp_kernels.pipeline.decode import PipelinedDecoder, Sampling
from tp_kernels.pipeline.grid import Grid
from tp_kernels.pipeline.timeline import Recorder, Timeline

from .progress import progress_bars
from .worker import Question, Source, encode, loaded, tokenizer


@dataclass(frozen=True)
class Job:
    """What to generate, and with which stages."""

    checkpoint: Path
    cut: int | tuple[int, ...]
    stages: int
    tensor: int
    prompts: tuple[str, ...]
    max_new_tokens: int
    in_flight: int
    batch: int
    temperature: float
    seed: int


@dataclass(frozen=True)
class Answers:
    """What came of it."""

    tokens: list[list[int]]
    seconds: float  # from the first prefill to the last token
    weight_bytes: list[int]  # by stage
    timeline: Timeline

    @property
    def count(self) -> int:
        return sum(map(len, self.tokens))

    @property
    def rate(self) -> float:
        """New tokens per second."""
        return self.count / self.seconds


def answer_all(job: Job) -> Answers:
    """Answer all prompts; rank 0 shows how far it is."""
    recorder = Recorder()
    with ExitStack() as stack:
        grid = stack.enter_context(Grid(job.stages, job.tensor, timeout=120))
        channel = stack.enter_context(
            PipelineCommunicator(
                grid.pipeline,
                ring=True,
                credits=max(4, -(-job.in_flight // job.stages)),
                recorder=recorder,
            )
        )
        leads = grid.pipeline.rank == grid.tensor.rank == 0
        show = _shown(stack) if leads else None
        stage = load_stage(
            job.checkpoint,
            job.cut,
            channel.my_stages[0],
            group=grid.tensor if job.tensor > 1 else None,
            progress=show and (lambda done, total: show("loading this rank's part", done, total)),
        )
        decoder = PipelinedDecoder(
            stage, channel, in_flight=job.in_flight, batch=job.batch, recorder=recorder
        )
        ids = prompt_ids(job)
        decoder.generate(ids[:1], 2)  # allocations and caches
        recorder.clear()
        barrier(grid.pipeline)
        done = 0

        def on_token(number: int, token: int) -> None:
            nonlocal done
            done += 1
            if show is not None:
                show("tokens", done, len(ids) * job.max_new_tokens)

        start = perf_counter()
        tokens = decoder.generate(
            ids,
            job.max_new_tokens,
            sampling=Sampling(job.temperature, job.seed),
            on_token=on_token,
        )
        taken = perf_counter() - start
        held = sum(parameter.nbytes for parameter in stage.parameters())
        timeline = recorder.timeline(grid.pipeline, "generation")
        return Answers(tokens, taken, all_gather_object(held, grid.pipeline), timeline)


def answer_plainly(job: Job) -> tuple[list[list[int]], float]:
    """Tokens and seconds of the model of transformers in this process, prompt by prompt."""
    model, _ = loaded(Source(job.checkpoint, plain=True))
    ids = prompt_ids(job)

    def generate(prompt: torch.Tensor, new: int) -> list[int]:
        out = model.generate(
            prompt[None],
            attention_mask=torch.ones_like(prompt)[None],
            max_new_tokens=new,
            do_sample=False,
        )
        return out[0, len(prompt) :].tolist()

    with torch.inference_mode():
        generate(ids[0], 2)
        start = perf_counter()
        tokens = [generate(prompt, job.max_new_tokens) for prompt in ids]
        return tokens, perf_counter() - start


def prompt_ids(job: Job) -> list[torch.Tensor]:
    """Token ids of the prompts as chats of one turn."""
    made = tokenizer(job.checkpoint)
    return [encode(made, Question(text))["input_ids"][0] for text in job.prompts]


def _shown(stack: ExitStack) -> Callable[[str, int, int], None]:
    bars = stack.enter_context(progress_bars())
    tasks: dict[str, Any] = {}

    def show(what: str, done: int, total: int) -> None:
        if what not in tasks:
            tasks[what] = bars.add_task(what, total=total)
        bars.update(tasks[what], completed=done)

    return show
