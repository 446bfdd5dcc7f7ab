"""Each defect of mutants.py is found by the test it names, and sources without one pass it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from subprocess import CompletedProcess
from typing import Any

import pytest

from tests.native.mutants import MUTANTS, SOURCE, UNCHANGED, Mutant, run


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> Iterator[dict[Any, Future[CompletedProcess[str]]]]:
    """Of all mutants and all tests without one; two at a time."""

    def start(key: Any, function: Callable[..., CompletedProcess[str]], *arguments: Any) -> None:
        started[key] = pool.submit(function, *arguments, tmp_path_factory.mktemp("mutant"))

    started: dict[Any, Future[CompletedProcess[str]]] = {}
    with ThreadPoolExecutor(2) as pool:
        for mutant in MUTANTS:
            start(mutant, mutant.run)
        for unchanged in UNCHANGED:
            start(unchanged, run, SOURCE, *unchanged)
        yield started
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_is_found(outcomes, mutant: Mutant):
    done = outcomes[mutant].result()
    assert done.returncode != 0, "not found"
    assert re.search(mutant.finding, done.stderr), done.stderr[-3000:]


@pytest.mark.parametrize("unchanged", UNCHANGED, ids=" ".join)
def test_unchanged_source_passes(outcomes, unchanged):
    done = outcomes[unchanged].result()
    assert done.returncode == 0, done.stderr[-3000:]
