"""Each defect of mutants.py, product_mutants.py and signalled_mutants.py is found by the test it names."""

from __future__ import annotations

import importlib

import pytest

from tests.kernels import body, mutants, product_mutants, signalled_mutants
from tests.kernels.mutants import Mutant
from tp_kernels import CollectiveTimeoutError, RankError


@pytest.mark.parametrize(
    "mutant",
    mutants.INTERPRETED + product_mutants.MUTANTS + signalled_mutants.MUTANTS,
    ids=lambda mutant: mutant.name,
)
def test_is_found(interpreted, tmp_path, mutant: Mutant):
    file, _, test = mutant.test.partition(".")
    assert hasattr(importlib.import_module(f"tests.kernels.{file}"), test)
    package = mutant.write(tmp_path)
    with pytest.raises(RankError) as caught:
        interpreted(mutant.size).run(
            body.of_copy, str(tmp_path), package, mutant.body, *mutant.args, **mutant.options
        )
    found = [outcome for outcome in caught.value.outcomes if isinstance(outcome, BaseException)]
    # Not by an error of the mutant's own making; ranks need not all find it in the same way.
    kinds = {type(one) for one in found}
    assert mutant.error in kinds and kinds <= {AssertionError, CollectiveTimeoutError}, found
