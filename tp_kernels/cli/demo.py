"""`tp-kernels demo`: one answer, several ways to compute it, side by side."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from tp_kernels import Ranks

from .progress import converted, progress_bars
from .worker import Answer, Question, Source, answer, load, text_of


@dataclass
class Row:
    """One way to compute the answer. Every round adds what each of its ranks measured."""

    name: str
    source: Source
    ranks: Ranks
    threads: int
    weight_bytes: int = 0
    rounds: list[list[Answer]] = field(default_factory=list)

    def load(self) -> None:
        self.weight_bytes = max(self.ranks.run(load, self.source))

    def answer(self, question: Question) -> list[Answer]:
        return self.ranks.run(answer, self.source, question, self.threads)

    @property
    def speeds(self) -> list[float]:
        """Decoded tokens per second by round, of the slowest rank."""
        return [min(one.tokens_per_second for one in answers) for answers in self.rounds]

    @property
    def communication_ms(self) -> float:
        """Milliseconds per decoded token in communication and waiting; median over rounds."""
        return median(
            1e3
            * max(one.communication_seconds for one in answers)
            / max(1, len(answers[0].tokens) - 1)
            for answers in self.rounds
        )

    @property
    def implementations(self) -> str:
        calls = self.rounds[0][0].calls
        names = sorted({name for counts in calls.values() for name in counts})
        return ", ".join(names) if names else "transformers"

    @property
    def tokens(self) -> set[tuple[int, ...]]:
        return {tuple(one.tokens) for answers in self.rounds for one in answers}


def run(model: str, prompt: str, *, max_new_tokens: int = 64, rounds: int = 3) -> int:
    """Print the answer and the comparison; returns the exit status."""
    console = Console()
    question = Question(prompt, max_new_tokens=max_new_tokens)
    with ExitStack() as stack:
        bars = stack.enter_context(progress_bars())
        checkpoint = converted(model, bars)
        rows = _rows(checkpoint, stack)
        steps = bars.add_task("loading", total=len(rows) * (2 + rounds))
        for row in rows:
            bars.update(steps, description=f"loading: {row.name}")
            row.load()
            bars.advance(steps)
        # The first tokens pay for allocations and caches.
        for row in rows:
            bars.update(steps, description=f"warming up: {row.name}")
            row.answer(Question(prompt, max_new_tokens=4))
            bars.advance(steps)
        for index in range(rounds):
            for row in rows:
                bars.update(steps, description=f"round {index + 1}: {row.name}")
                row.rounds.append(row.answer(question))
                bars.advance(steps)

    identical = len(set.union(*(row.tokens for row in rows))) == 1
    console.print(Panel(text_of(checkpoint, rows[0].rounds[0][0].tokens), title=prompt))
    console.print(_table(rows))
    console.print(
        f"Greedy, {len(rows[0].rounds[0][0].tokens)} tokens, fp32; rounds: {rounds}, taking turns.\n"
        "tokens/s: decoding, slowest rank, median (lowest..highest).\n"
        "ms comm.: communication per token, waiting for the other ranks included."
    )
    console.print(f"tokens identical: {'[green]yes' if identical else '[bold red]no'}")
    return 0 if identical else 1


def _rows(checkpoint: Path, stack: ExitStack) -> list[Row]:
    plain = Source(checkpoint, plain=True)
    split = Source(checkpoint)
    one = stack.enter_context(Ranks(1, threads=1))
    return [
        Row("1 process, 1 thread", plain, one, 1),
        Row("1 process, 2 threads", plain, one, 2),
        Row("2 ranks, 1 thread", split, stack.enter_context(Ranks(2, threads=1)), 1),
        Row("3 ranks, 1 thread", split, stack.enter_context(Ranks(3, threads=1)), 1),
    ]


def _table(rows: list[Row]) -> Table:
    # Fits into 80 columns.
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0)
    table.add_column("", no_wrap=True)
    for heading in ("tokens/s", "ratio", "MiB/rank", "ms comm."):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("ran", no_wrap=True)
    baseline, whole = median(rows[0].speeds), rows[0].weight_bytes
    for row in rows:
        speeds = row.speeds
        table.add_row(
            row.name,
            f"{median(speeds):.1f} ({min(speeds):.1f}..{max(speeds):.1f})",
            f"{median(speeds) / baseline:.2f}x",
            f"{row.weight_bytes / 2**20:.0f} ({row.weight_bytes / whole:.0%})",
            "" if row.source.plain else f"{row.communication_ms:.1f}",
            row.implementations,
        )
    return table
