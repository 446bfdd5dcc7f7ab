"""Each defect of elementwise_mutants.py is found by the test it names."""

from __future__ import annotations

import importlib

import pytest

from tests.kernels import elementwise_body as body
from tests.kernels.elementwise_mutants import MUTANTS
from tests.kernels.mutants import Mutant
from tests.kernels.test_collectives import alike
from tp_kernels import RankError


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_is_found(interpreted, tmp_path, mutant: Mutant):
    file, _, test = mutant.test.partition(".")
    assert hasattr(importlib.import_module(f"tests.kernels.{file}"), test)
    package, where = mutant.write(tmp_path), mutant.body.split(".")
    try:
        results = interpreted(mutant.size).run(
            body.of_copy, str(tmp_path), package, *where, *mutant.args
        )
    except RankError as error:
        # Not by an error of the mutant's own making.
        found = [one for one in error.outcomes if isinstance(one, BaseException)]
        assert {type(one) for one in found} == {mutant.error}, found
    else:
        with pytest.raises(AssertionError, match="different bits"):
            alike(results)
