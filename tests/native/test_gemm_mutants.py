"""Each defect of gemm_mutants.py is found by the test it names; that sources without one pass is test-cpp."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from subprocess import CompletedProcess

import pytest

from tests.native.gemm_mutants import GEMM_MUTANTS
from tests.native.mutants import Mutant


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> Iterator[dict[Mutant, Future[CompletedProcess[str]]]]:
    """Of all mutants; two at a time, each until the first data race."""
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(2) as pool:
        patch.setenv("TSAN_OPTIONS", "halt_on_error=1")
        yield {one: pool.submit(one.run, tmp_path_factory.mktemp("mutant")) for one in GEMM_MUTANTS}
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("mutant", GEMM_MUTANTS, ids=lambda mutant: mutant.name)
def test_is_found(outcomes, mutant: Mutant):
    done = outcomes[mutant].result()
    assert done.returncode != 0, "not found"
    assert mutant.finding in done.stderr, done.stderr[-3000:]
