"""`tp-kernels bench block`: MLP, attention and a whole transformer block, split and on one process.

A win in a kernel counts only with the win of a whole block beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tp_kernels.comm import Ranks, ShapeError
from tp_kernels.dispatch import IMPLEMENTATIONS

from .block_work import PARTS, PRESETS, work
from .peers import Peers
from .pool import Pool, check_worlds
from .timing import Budget, Contestant, Measurement, Progress

PASSES = ("forward", "forward+backward")
ONE = "1 process"


@dataclass(frozen=True)
class Settings:
    """What to measure."""

    parts: Sequence[str] = PARTS
    passes: Sequence[str] = PASSES
    hidden: Sequence[int] = (576, 2048)
    rows: Sequence[int] = (1, 128, 512)
    worlds: Sequence[int] = (2,)
    threads: int = 1
    bind: bool = True
    budget: Budget = field(default_factory=lambda: Budget(5, 0.05))


def run(settings: Settings, peers: Peers, progress: Progress) -> list[dict[str, Any]]:
    """One row per part, pass, world size, hidden size and number of rows. Peers take no part."""
    check_worlds(settings.worlds)
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
    results: list[dict[str, Any]] = []
    for world in settings.worlds:
        with ExitStack() as stack:
            progress(f"starting {world} ranks", len(results), len(cases))

            def pool(size: int, threads: int, stack: ExitStack = stack) -> Pool:
                ranks = stack.enter_context(Ranks(size, threads=threads))
                return Pool(ranks, bind=settings.bind)

            split = pool(world, settings.threads)
            alone = partial(work, implementation="reference")
            contestants: list[Contestant] = [
                *(
                    split.contestant(name, partial(work, implementation=name))
                    for name in reversed(IMPLEMENTATIONS)
                ),
                pool(1, 1).contestant(f"{ONE}, 1 thread", alone),
                pool(1, world * settings.threads).contestant(
                    f"{ONE}, {world * settings.threads} threads", alone
                ),
            ]
            lost: dict[str, str] = {}
            for case in cases:
                if case["world"] == world:
                    what = f"{case['part']} {case['pass']} [{case['rows']}, {case['hidden']}]"
                    progress(what, len(results), len(cases))
                    done = Measurement(case, settings.budget, lost).run(contestants)
                    medians = {name: sample.median for name, sample in done.samples.items()}
                    results.append(
                        {
                            "case": case,
                            "contestants": {n: s.to_json() for n, s in done.samples.items()},
                            "absent": done.absent,
                            "derived": derived(medians),
                        }
                    )
            peers.note(world, lost)
    return results


def derived(medians: Mapping[str, float]) -> dict[str, Any]:
    """How much faster `host` is than each other contestant."""
    return {
        "over_host": {
            name: seconds / medians["host"] for name, seconds in medians.items() if name != "host"
        }
    }
