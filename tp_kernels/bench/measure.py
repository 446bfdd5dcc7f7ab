"""What the measurements have in common: settings, ranks for every world size, and case after case."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from tp_kernels.comm import Ranks, ShapeError

from .peers import Peers
from .pool import Case, Pool
from .timing import Budget, Contestant, Measurement, Progress, Sample, describe

# derive(case, median seconds by contestant): what follows from the times.
Derive = Callable[[Case, Mapping[str, float]], dict[str, Any]]
# start(stack, world): the contestants, alive until `stack` unwinds.
Start = Callable[[ExitStack, int], tuple[Sequence[Contestant], Derive]]


@dataclass(frozen=True)
class Settings:
    """How to measure; a measurement adds what."""

    worlds: Sequence[int] = (2,)
    threads: int = 1
    bind: bool = True
    budget: Budget = field(default_factory=Budget)


def measure(
    cases: Sequence[Case], start: Start, settings: Settings, peers: Peers, progress: Progress
) -> list[dict[str, Any]]:
    """One row per case, world size by world size; `peers` records who did not run to the end.

    Raises:
        ShapeError: a world size of one.
    """
    for world in settings.worlds:
        if world < 2:
            raise ShapeError(f"{world} rank communicates nothing; measure 2 ranks or more")
    rows: list[dict[str, Any]] = []
    for world in dict.fromkeys(settings.worlds):
        with ExitStack() as stack:
            progress(f"starting {world} ranks", len(rows), len(cases))
            contestants, derive = start(stack, world)
            lost: dict[str, str] = {}
            for case in cases:
                if case["world"] == world:
                    progress(describe(case), len(rows), len(cases))
                    done = Measurement(case, settings.budget, lost).run(contestants)
                    rows.append(row(case, done.samples, done.absent, derive))
            peers.note(world, lost)
    return rows


def row(
    case: Case, samples: Mapping[str, Sample], absent: Mapping[str, str], derive: Derive
) -> dict[str, Any]:
    """A result as it is written: times, who has none and why, and what follows."""
    return {
        "case": dict(case),
        "contestants": {name: sample.to_json() for name, sample in samples.items()},
        "absent": dict(absent),
        "derived": derive(case, {name: sample.median for name, sample in samples.items()}),
    }


def start_pool(stack: ExitStack, settings: Settings, size: int, threads: int | None = None) -> Pool:
    """`size` ranks of this package, alive until `stack` unwinds."""
    ranks = stack.enter_context(Ranks(size, threads=threads or settings.threads))
    return Pool(ranks, bind=settings.bind)
