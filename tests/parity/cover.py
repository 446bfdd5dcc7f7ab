"""Which cases run: the full product, or a seeded choice that covers every three values of three axes."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from random import Random

from tests.parity.case import DTYPES, MODES, WORLDS, Case, Entry, Options
from tests.parity.entries import ENTRIES

STRENGTH = 3
FULL = os.environ.get("TP_KERNELS_PARITY") == "full"


def product(layer: str, entry: Entry) -> list[Case]:
    """All cases of a layer that exist; those of one reference follow each other."""
    cases = []
    axes = (*entry.options.values(), WORLDS, MODES, DTYPES)
    for *values, world, sp, dtype in itertools.product(*axes):
        options = tuple(zip(entry.options, values, strict=True))
        case = Case(layer, world, sp, dtype, options)
        if entry.allowed(case, Options(**dict(options))):
            cases.append(case)
    return cases


def groups(case: Case) -> Iterator[tuple[object, ...]]:
    """All choices of `STRENGTH` axes, of those that have several values, with their values."""
    axes = ENTRIES[case.layer].options
    values: list[object] = [case.world, case.sp, case.dtype]
    values += [value for name, value in case.options if len(axes[name]) > 1]
    return itertools.combinations(enumerate(values), STRENGTH)


def covering(cases: list[Case], seed: str) -> list[Case]:
    """A few of the cases, that together have every group of values that occurs in any; greedily, seeded."""
    random = Random(seed)
    missing = {group for case in cases for group in groups(case)}
    chosen = []
    pool = list(cases)
    while missing:
        candidates = random.sample(pool, min(len(pool), 60))
        best = max(candidates, key=lambda case: sum(g in missing for g in groups(case)))
        found = missing.intersection(groups(best))
        if found:
            chosen.append(best)
            missing -= found
        elif len(candidates) == len(pool):
            break
        else:  # late: only cases that still have something to show
            pool = [case for case in pool if not missing.isdisjoint(groups(case))]
    return sorted(chosen, key=lambda case: repr(case.options))


def all_cases(full: bool) -> list[Case]:
    return [
        case
        for layer, entry in ENTRIES.items()
        for case in (product(layer, entry) if full else covering(product(layer, entry), layer))
    ]
