"""Progress bars on standard error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from tp_kernels.integrations.checkpoint import stock_checkpoint


class _Count(MofNCompleteColumn):
    def render(self, task: Task) -> Text:
        return Text() if task.total is None else super().render(task)


@contextmanager
def progress_bars() -> Iterator[Progress]:
    """Bars that vanish when done; nothing but the result stays on the terminal."""
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        _Count(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as bars:
        yield bars


def converted(model: str, bars: Progress) -> Path:
    """The stock checkpoint of `model`; a conversion shows its stage in one line of `bars`."""
    task = bars.add_task("finding the model", total=None)
    shown = ""

    def show(stage: str, done: int, total: int) -> None:
        nonlocal task, shown
        if stage != shown:
            # A task cannot lose its total again.
            bars.remove_task(task)
            task, shown = bars.add_task(stage, total=total or None), stage
        bars.update(task, completed=done)

    try:
        return stock_checkpoint(model, show)
    finally:
        bars.remove_task(task)
