"""Kernels compiled for GPUs: signals at system scope behind barriers, nothing spilled, resources as recorded.

`make aot` does the same for every configuration and architecture; here are the largest, for one of each kind.
"""

from __future__ import annotations

import pytest

from tests.kernels import aot, mutants
from tp_kernels.kernels._device import INTERPRETED

assert not INTERPRETED, (
    "TRITON_INTERPRET is for the ranks of the other tests: nothing compiles with it"
)

LARGEST = [
    c
    for c in aot.configurations()
    if c.world in (0, 1, 8) and (c.element in ("bf16", "i16") or c.kernel == "cross_entropy.combine")
]


@pytest.mark.parametrize(
    ("configuration", "architecture"),
    [(c, a) for c in LARGEST for a in c.architectures if a in (90, *aot.AMD)],
    ids=str,
)
def test_compiles(configuration, architecture):
    compiled = aot.build(configuration, architecture)
    assert aot.problems(configuration, compiled, architecture) == []
    recorded = aot.read_table()
    if not recorded:
        pytest.skip("resources.json is of another Triton")
    assert recorded[aot.label(architecture)][str(configuration)] == compiled.resources


OTHER_SIZES = [(c, sizes) for c in LARGEST for sizes in ("of_one", "wide") if not c.shape]
# Products refuse sizes beyond 2^31. With a transposed operand of a single row they spill, which nothing
# rests on; it is one in the gradient of a weight.
OTHER_SIZES += [(c, "of_one") for c in LARGEST if c.shape in ("few", "many") and not c.transposed]


@pytest.mark.parametrize(("configuration", "sizes"), OTHER_SIZES, ids=str)
def test_compiles_for_other_sizes(configuration, sizes):
    compiled = aot.build(configuration, 90, **{sizes: True})
    assert not compiled.spilled and not aot._unordered(compiled.ptx)


def test_table_is_complete():
    recorded = aot.read_table()
    if not recorded:
        pytest.skip("resources.json is of another Triton")
    names: dict[str, list[str]] = {}
    for configuration in aot.configurations():
        for architecture in configuration.architectures:
            names.setdefault(aot.label(architecture), []).append(str(configuration))
    assert names == {architecture: list(rows) for architecture, rows in recorded.items()}


@pytest.mark.parametrize("mutant", mutants.COMPILED, ids=lambda mutant: mutant.name)
def test_mutant_is_found(mutant, tmp_path, monkeypatch):
    package = mutant.write(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    given = {"kernel": "reduce_scatter.scatter", "world": 2} | mutant.options
    configuration = aot.Configuration(element="bf16", **given)
    assert aot.problems(configuration, aot.build(configuration, 90), 90) == []
    assert aot.problems(configuration, aot.build(configuration, 90, package), 90)
