"""vocab_parallel_cross_entropy: against float64, bits alike, its implementations, what it refuses."""

from __future__ import annotations

import pytest
import torch

from tests.ops.loss_body import Case, run_logits, variants

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def alike(results: list) -> None:
    assert all(result == results[0] for result in results), "ranks have different bits"


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_against_float64(world, size, dtype):
    provider = "none" if dtype == torch.float64 else "auto"
    alike(world(size).run(run_logits, variants(Case(dtype=dtype)), provider))


@pytest.mark.parametrize("implementation", ["reference", "host"])
def test_implementations(world, implementation):
    """Both ways of the exchange bring the same numbers."""
    cases = variants(Case(smoothing=0.1))
    results = world(3).run(run_logits, cases, "auto", implementation)
    alike([*results, *world(3).run(run_logits, cases)])


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_kernels(interpreted, dtype):
    cases = [case for case in variants(Case(dtype=dtype)) if case.cap is None]
    alike(interpreted(2).run(run_logits, cases, "auto", "triton"))
