"""A timeline as a picture. Needs matplotlib, which is optional: the extra `bench`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tp_kernels.comm.errors import UnsupportedError

from .show import summary
from .timeline import Event, Timeline

# Okabe and Ito (2008): told apart also by those who do not see red and green.
COLOURS = {
    "F": "#56B4E9",
    "B": "#E69F00",
    "I": "#F0C75E",
    "W": "#009E73",
    "OPT": "#CC79A7",
}
_NAMES = {
    "F": "forward",
    "B": "backward",
    "I": "backward: input",
    "W": "backward: weights",
    "OPT": "optimizer",
}
_IDLE = "#EEEEEE"
_LATER_CHUNK = "//"  # of stages behind the first of their rank


def save_picture(timeline: Timeline, path: Path) -> None:
    """Write `timeline` to `path` (.png, .svg or .pdf): idle time is grey, stages behind the first hatched."""
    save_pictures([timeline], path)


def save_pictures(timelines: Sequence[Timeline], path: Path) -> None:
    """Several timelines below each other, on one scale of time; UnsupportedError without matplotlib."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as pyplot
    except ImportError as error:
        raise UnsupportedError(
            "pictures need matplotlib: pip install 'tp_kernels[bench]'"
        ) from error
    heights = [max(1, len(timeline.ranks)) for timeline in timelines]
    figure, grid = pyplot.subplots(
        len(timelines),
        1,
        squeeze=False,
        figsize=(14, 0.55 * sum(heights) + 0.85 * len(timelines) + 0.6),
        height_ratios=heights,
        layout="constrained",
    )
    longest = max((timeline.makespan for timeline in timelines), default=1.0) or 1.0
    unit, scale = ("s", 1.0) if longest >= 1 else ("ms", 1e3)
    for axes, timeline in zip(grid[:, 0], timelines, strict=True):
        _draw(axes, timeline, longest, scale)
    grid[-1, 0].set_xlabel(f"time, {unit}")
    kinds = [k for k in COLOURS if any(e.kind == k for t in timelines for e in t.events)]
    patch = matplotlib.patches.Patch
    handles = [patch(facecolor=COLOURS[kind], label=_NAMES[kind]) for kind in kinds]
    handles.append(patch(facecolor=_IDLE, label="idle"))
    if any(_first_stages(timeline) != _stages(timeline) for timeline in timelines):
        handles.append(
            patch(facecolor="white", hatch=_LATER_CHUNK, edgecolor="grey", label="later stage")
        )
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    figure.savefig(path, dpi=140)
    pyplot.close(figure)


def _draw(axes: Any, timeline: Timeline, longest: float, scale: float) -> None:
    first = _first_stages(timeline)
    rows = {rank: row for row, rank in enumerate(timeline.ranks)}
    for row in rows.values():
        axes.broken_barh([(0, timeline.makespan * scale)], (row - 0.42, 0.84), facecolor=_IDLE)
    for event in timeline.events:
        if event.kind not in COLOURS:
            continue
        start, seconds = (event.start - timeline.start) * scale, (event.end - event.start) * scale
        axes.broken_barh(
            [(start, seconds)],
            (rows[event.rank] - 0.42, 0.84),
            facecolor=COLOURS[event.kind],
            edgecolor="white",
            linewidth=0.6,
            hatch=None if event.stage in first or event.stage < 0 else _LATER_CHUNK,
        )
        # About 7 points per digit: a number that does not fit says nothing.
        if event.micro_batch >= 0 and (event.end - event.start) / longest * 950 > 9 * _digits(
            event
        ):
            axes.text(
                start + seconds / 2,
                rows[event.rank],
                str(event.micro_batch),
                ha="center",
                va="center",
                fontsize=8,
                bbox={
                    "boxstyle": "round,pad=0.1",
                    "facecolor": COLOURS[event.kind],
                    "linewidth": 0,
                },
            )
    axes.set_yticks(list(rows.values()), [f"rank {rank}" for rank in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, longest * scale)
    axes.set_title(summary(timeline), fontsize=9, loc="left")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)


def _digits(event: Event) -> int:
    return len(str(event.micro_batch))


def _stages(timeline: Timeline) -> set[int]:
    return {event.stage for event in timeline.events if event.stage >= 0}


def _first_stages(timeline: Timeline) -> set[int]:
    """The first stage of every rank."""
    first: dict[int, int] = {}
    for event in timeline.events:
        if event.stage >= 0:
            first[event.rank] = min(event.stage, first.get(event.rank, event.stage))
    return set(first.values())
