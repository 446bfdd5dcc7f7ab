"""Progress bars on standard error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from tp_kernels.integrations import checkpoint


@contextmanager
def progress_bars(console: Console | None = None) -> Iterator[Progress]:
    """Bars that vanish when done; nothing but the result stays on the terminal."""
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console or Console(stderr=True),
        transient=True,
    ) as bars:
        yield bars


def staged(bars: Progress) -> checkpoint.Progress:
    """A callback that shows the stage at hand in one line of `bars`."""
    task = bars.add_task("finding the model", total=None)

    def show(stage: str, done: int, total: int) -> None:
        bars.update(task, description=stage, completed=done, total=total or None)

    return show
