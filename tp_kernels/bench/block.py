"""`tp-kernels bench block`: MLP, attention and a whole transformer block, split and on one process.

A win in a kernel counts only with the win of a whole block beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tp_kernels.comm import ShapeError

from . import measure
from .block_work import PARTS, PRESETS, work
from .peers import Peers
from .pool import Case
from .timing import Budget, Contestant, Progress

PASSES = ("forward", "forward+backward")
HIDDEN = (576, 2048)
ROWS = (1, 128, 512)
ONE = "1 process"
# Implementations that compute on CPU tensors: "triton" would only be interpreted.
CONTESTANTS = ("host", "chunked", "reference")


@dataclass(frozen=True)
class Settings(measure.Settings):
    """What to measure."""

    parts: Sequence[str] = PARTS
    passes: Sequence[str] = PASSES
    hidden: Sequence[int] = HIDDEN
    rows: Sequence[int] = ROWS
    budget: Budget = field(default_factory=lambda: Budget(5, 0.05))


QUICK = Settings(hidden=(576,), rows=(1, 128), budget=Budget(2, 0.02))


def run(settings: Settings, peers: Peers, progress: Progress) -> list[dict[str, Any]]:
    """One row per part, pass, world size, hidden size and number of rows. Peers take no part."""
    for hidden in settings.hidden:
        if hidden not in PRESETS:
            known = ", ".join(f"{size} ({preset.like})" for size, preset in PRESETS.items())
            raise ShapeError(f"no preset has hidden size {hidden}; there are {known}")
    cases = [
        {
            "part": part,
            "pass": way,
            "dtype": "float32",
            "world": world,
            "hidden": hidden,
            "rows": rows,
        }
        for world in settings.worlds
        # Weights are made once per hidden size.
        for hidden in settings.hidden
        for part in settings.parts
        for way in settings.passes
        for rows in settings.rows
        if rows > 1 or way == "forward"
    ]

    def start(stack: ExitStack, world: int) -> tuple[list[Contestant], measure.Derive]:
        split = measure.start_pool(stack, settings, world)
        contestants: list[Contestant] = [
            split.contestant(name, partial(work, implementation=name)) for name in CONTESTANTS
        ]
        threads = world * settings.threads
        for count, name in ((1, f"{ONE}, 1 thread"), (threads, f"{ONE}, {threads} threads")):
            alone = measure.start_pool(stack, settings, 1, count)
            contestants.append(alone.contestant(name, partial(work, implementation="reference")))
        return contestants, derived

    return measure.measure(cases, start, settings, peers, progress)


def derived(case: Case, medians: Mapping[str, float]) -> dict[str, Any]:
    """How much faster `host` is than each other contestant."""
    return {
        "over_host": {
            name: seconds / medians["host"] for name, seconds in medians.items() if name != "host"
        }
    }
