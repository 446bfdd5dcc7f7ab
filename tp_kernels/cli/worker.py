"""What a rank does for the commands: load a model once, then answer prompts with it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from tp_kernels import ParallelGroup

from .progress import progress_bars


@dataclass(frozen=True)
class Source:
    """A model as one rank holds it. `plain` is the stock model of transformers, unsplit."""

    checkpoint: Path
    plain: bool = False
    sequence_parallel: bool = False


@dataclass(frozen=True)
class Question:
    """A chat of one turn, answered greedily."""

    prompt: str
    system: str | None = None
    max_new_tokens: int = 64


@dataclass(frozen=True)
class Answer:
    """What one rank generated, and what it took. Seconds count from the first token to the last."""

    tokens: list[int]
    seconds: float
    communication_seconds: float = 0.0
    calls: dict[str, dict[str, int]] = field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float:
        return (len(self.tokens) - 1) / self.seconds if self.seconds else 0.0


class _Clock:
    """A streamer of transformers: told about the prompt, then about every token."""

    def __init__(self, group: ParallelGroup | None) -> None:
        self._group = group
        self._puts = 0
        self.first = self.last = 0.0
        self.communication = 0.0

    def put(self, tokens: Tensor) -> None:
        self._puts += 1
        self.last = perf_counter()
        if self._puts == 2:
            self.first = self.last
            self.communication = -self._communicated()

    def end(self) -> None:
        self.communication += self._communicated()

    def _communicated(self) -> float:
        return float(self._group.stats()["seconds"]) if self._group is not None else 0.0


def load(source: Source, show_progress: bool = False) -> int:
    """Load this rank's part, which later calls use, and return the bytes of its parameters."""
    with _loading_bar(show_progress) as bar:
        model, _ = loaded(source, bar)
    return sum(parameter.nbytes for parameter in model.parameters())


def answer(source: Source, question: Question, threads: int | None = None) -> Answer:
    """Answer without printing, and measure it."""
    if threads is not None:
        torch.set_num_threads(threads)
    model, group = loaded(source)
    if group is not None:
        group.reset_stats()
    clock = _Clock(group)
    tokens = _generate(source, model, question, clock)
    return Answer(
        tokens,
        seconds=clock.last - clock.first,
        communication_seconds=clock.communication,
        calls=group.stats()["calls"] if group is not None else {},
    )


def print_answer(source: Source, question: Question) -> None:
    """Answer; rank 0 loads with a progress bar and prints the text as it is made."""
    from transformers import TextStreamer

    leads = int(os.environ.get("RANK", "0")) == 0
    load(source, show_progress=leads)
    model, _ = loaded(source)
    printer = None
    if leads:
        printer = TextStreamer(tokenizer(source.checkpoint), True, skip_special_tokens=True)
    _generate(source, model, question, printer)


def text_of(checkpoint: Path, tokens: list[int]) -> str:
    return tokenizer(checkpoint).decode(tokens, skip_special_tokens=True).strip()


@lru_cache(maxsize=1)
def tokenizer(checkpoint: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(checkpoint, local_files_only=True)


# A model of each source stays in this process until it ends: that is what a rank is started for.
_models: dict[Source, tuple[Any, ParallelGroup | None]] = {}


def loaded(source: Source, progress: Any = None) -> tuple[Any, ParallelGroup | None]:
    """The model of `source` in this process, loaded once."""
    if source not in _models:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        from tp_kernels.integrations.transformers import load_parallel

        logging.disable_progress_bar()
        logging.set_verbosity_error()
        if source.plain:
            model = AutoModelForCausalLM.from_pretrained(
                source.checkpoint, dtype=torch.float32, local_files_only=True
            )
            _models[source] = model, None
        else:
            group = ParallelGroup()
            model = load_parallel(
                source.checkpoint,
                group,
                dtype=torch.float32,
                sequence_parallel=source.sequence_parallel,
                progress=progress,
            )
            _models[source] = model, group
    return _models[source]


def _generate(source: Source, model: Any, question: Question, streamer: Any) -> list[int]:
    """The new tokens of the greedy answer."""
    inputs = encode(tokenizer(source.checkpoint), question)
    length = inputs["input_ids"].shape[1]
    with torch.inference_mode():
        output = model.generate(
            **inputs,
            max_new_tokens=question.max_new_tokens,
            do_sample=False,
            streamer=streamer,
        )
    return output[0, length:].tolist()


def encode(tokenizer: Any, question: Question) -> Any:
    """`input_ids` [1, tokens] and what else the model takes."""
    if getattr(tokenizer, "chat_template", None) is None:
        return tokenizer(
            "\n\n".join(filter(None, (question.system, question.prompt))), return_tensors="pt"
        )
    messages = [{"role": "user", "content": question.prompt}]
    if question.system:
        messages.insert(0, {"role": "system", "content": question.system})
    return tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )


@contextmanager
def _loading_bar(show: bool) -> Iterator[Any]:
    if not show:
        yield None
        return
    with progress_bars() as bars:
        task = bars.add_task("loading this rank's slices", total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)
