"""Every layer with its options against dense float64: outputs and all gradients, element by element.

A choice of cases has every three values of three axes together, among them every world size with and
without sequence parallelism in every dtype; with TP_KERNELS_PARITY=full, all there are (`make test-full`).
"""

from __future__ import annotations

import itertools

import pytest

from tests.parity.case import Case, check, compute, reference
from tests.parity.cover import FULL, STRENGTH, all_cases, groups, product
from tests.parity.entries import ENTRIES

CASES = all_cases(FULL)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_parity(world, case: Case):
    values = reference(case.layer, case.options)
    shapes = {name: tuple(value.shape) for name, (value, _) in values.items()}
    check(case, world(case.world).run(compute, case, shapes))


def test_number_of_cases():
    """A suite that lost its cases passes otherwise."""
    everything = {layer: product(layer, entry) for layer, entry in ENTRIES.items()}
    for layer, cases in everything.items():
        mine = [case for case in CASES if case.layer == layer]
        print(f"{layer}: {len(mine)} of {len(cases)} cases")
        wanted = set(itertools.chain.from_iterable(map(groups, cases)))
        assert wanted == set(itertools.chain.from_iterable(map(groups, mine))), layer
    total = sum(map(len, everything.values()))
    print(f"{len(CASES)} of {total} cases, all {STRENGTH} values of {STRENGTH} axes")
    assert len(CASES) == len(set(CASES)) >= (total if FULL else 300)
